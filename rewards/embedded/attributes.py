"""A differentiable score of the embedded world: a small network reads an image's shapes, a formula compares them.

`AttributeNet` estimates how many shapes of each kind and colour an image holds and where they lie. From that,
`attribute_scores` forms a number in [0, 1] for a GenEval record. Every step is smooth in the pixels, so that reward
back-propagation can train through it; GenEval's own verdict has none. `flowrl pretrain scorer` makes the weights.

A clause of a record (class k, perhaps colour c, count n, perhaps "relation to clause j") holds with probability

    p = P(n <= N < m) * P(relation)        N: number of k, or of c k; m: count of the exclude clause of k, else none

and the score is the mean, or the product, of p over the clauses. Exclude clauses of other classes count as clauses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowrl.benchmarks.geneval.metadata import Record, parse_record
from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, tensor_output
from flowrl.rewards.base.prompt_needs import no_record
from flowrl.runtime.shapes import Float
from flowrl.world.scenes import COLORS, SHAPES, SIZE

Combine = Literal["mean", "product"]

PAIRS = tuple((label, color) for label in SHAPES for color in COLORS)
"""The twelve kinds of objects, (shape, colour)."""
MAX_COUNT = 5
"""Highest count of its own; the last class means this many or more."""
GRID = 8
"""Side of the grid of cells on which objects are located."""

_WIDTHS = (24, 48, 80)  # channels at 1/2, 1/4 and 1/8 of the resolution
_NUM_COUNTERS = len(PAIRS) + len(SHAPES)
_DEAD_ZONE = 0.06  # shares of the image's side: GenEval's margin for shapes of the world's mean size,
_SOFTENING = 0.05  # and what keeps the direction of two coinciding centres smooth
_DIRECTIONS = {"left of": (0, -1.0), "right of": (0, 1.0), "above": (1, -1.0), "below": (1, 1.0)}  # axis and sign
_SHARPNESS = 10.0  # of the step at GenEval's threshold of one half


class Attributes(NamedTuple):
    """The answer for b images. `count_logits` [b, 15, 6]: counts 0 .. 5 (5: or more) of the twelve pairs, then of the
    three shapes in any colour. `cell_logits` [b, 13, 8, 8]: ground and the twelve pairs in each cell."""

    count_logits: Float[Tensor, " b 15 6"]
    cell_logits: Float[Tensor, " b 13 8 8"]


class AttributeNet(nn.Module):
    """Six convolutions to an 8 x 8 grid; cells are classified one by one, counts read from the sum over all cells."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = _WIDTHS
        self.trunk = nn.Sequential(
            *_block(3, first, stride=2),
            *_block(first, second, stride=2),
            *_block(second, second, stride=1),
            *_block(second, third, stride=2),
            *_block(third, third, stride=1),
            *_block(third, third, stride=1),
        )
        self.cells = nn.Conv2d(third, 1 + len(PAIRS), 1)
        self.counts = nn.Sequential(nn.Linear(third, 128), nn.SiLU(), nn.Linear(128, _NUM_COUNTERS * (MAX_COUNT + 1)))

    def features(self, images: Float[Tensor, " b 3 h w"]) -> Float[Tensor, " b c 8 8"]:
        """Reads images in [0, 1]."""
        return self.trunk(prepare(images))

    def forward(self, images: Float[Tensor, " b 3 h w"]) -> Attributes:
        """Counts and cells of images in [0, 1]."""
        features = self.features(images)
        counts = self.counts(features.sum(dim=(2, 3)) / GRID)
        return Attributes(counts.unflatten(1, (_NUM_COUNTERS, MAX_COUNT + 1)), self.cells(features))


def prepare(images: Float[Tensor, " b 3 h w"]) -> Float[Tensor, " b 3 64 64"]:
    """Images of [0, 1] in [-1, 1]; sizes other than 64 x 64 are resized (bilinear, antialiased) first."""
    if images.shape[-2:] != (SIZE, SIZE):
        images = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False)
    return 2.0 * images - 1.0


def _block(inputs: int, outputs: int, *, stride: int) -> tuple[nn.Module, ...]:
    """SiLU rather than ReLU: a score that is smooth in the pixels."""
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()


def check_weights(path: Path) -> None:
    """Refuses a missing file of weights."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give one that 'flowrl pretrain scorer' wrote.")


def load_net(path: Path, device: torch.device | str = "cpu") -> AttributeNet:
    """A trained network in float32, frozen, in evaluation mode."""
    from safetensors.torch import load_file

    check_weights(path)
    net = AttributeNet()
    try:
        net.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    except Exception as error:
        raise ValueError(
            f"{path} holds no weights of the attribute scorer ({str(error).splitlines()[0]}): make some with "
            f"'flowrl pretrain scorer'."
        ) from error
    return net.requires_grad_(False).eval().to(device)


def shipped_weights() -> Path:
    """The weights that come with flowrl."""
    return Path(str(resources.files("flowrl") / "assets" / "attribute-scorer" / "model.safetensors"))


def attribute_scores(
    attributes: Attributes, records: Sequence[Mapping[str, Any]], *, combine: Combine = "mean"
) -> Float[Tensor, " b"]:
    """Scores images against GenEval records, one per image; see the module's formula.

    `mean` of the clauses' probabilities rewards partial success; their `product` estimates the probability that the
    whole prompt holds. In [0, 1], differentiable in the attributes. Records hold `tag`, `include`, perhaps `exclude`.

    Raises ValueError: a record is malformed, or asks for something outside the world.
    """
    if len(records) != len(attributes.count_logits):
        raise ValueError(
            f"each image needs one record, got {len(records)} records for {len(attributes.count_logits)} images."
        )
    counts = attributes.count_logits.softmax(dim=-1)
    cells = attributes.cell_logits.softmax(dim=1)[:, 1:]
    values = []
    for item, metadata in enumerate(records):
        record, forbidden = _world_record(metadata), dict[str, int]()
        count, cell = counts[item], cells[item]
        for clause in record.exclude:
            forbidden[clause.label] = min(clause.count, forbidden.get(clause.label, clause.count))
        held = []
        for clause in record.include:
            below = forbidden.get(clause.label) if clause.color is None else None
            probability = count[_counter(clause.label, clause.color), clause.count : below].sum()
            if clause.position is not None:
                relation, target = clause.position
                reference = record.include[target]
                subject_at = _centre(cell, clause.label, clause.color)
                # Smooth form of GenEval's rule that the offset [2], less a margin, exceed half its length along the
                # direction.
                offset = subject_at - _centre(cell, reference.label, reference.color)
                axis, sign = _DIRECTIONS[relation]
                cosine = (sign * offset[axis] - _DEAD_ZONE) / torch.sqrt((offset**2).sum() + _SOFTENING**2)
                probability = probability * torch.sigmoid(_SHARPNESS * (cosine - 0.5))
            held.append(probability)
        bounded = {clause.label for clause in record.include if clause.color is None}
        held += [count[_counter(k, None), :below].sum() for k, below in forbidden.items() if k not in bounded]
        clauses = torch.stack(held)
        values.append(clauses.prod() if combine == "product" else clauses.mean())
    return torch.stack(values)


def _counter(label: str, color: str | None) -> int:
    """Row of `count_logits` that counts a shape, in one colour or in any."""
    return len(PAIRS) + SHAPES.index(label) if color is None else PAIRS.index((label, color))


def _centre(cells: Tensor, label: str, color: str | None) -> Tensor:
    """Mean (x, y) in [0, 1] of a kind's cells, weighted by squared probability, so that many nearly empty cells do not
    draw it to the middle, where it is if the kind is absent."""
    rows = [i for i, pair in enumerate(PAIRS) if pair[0] == label and color in (None, pair[1])]
    weight = cells[rows].sum(dim=0) ** 2
    line = (torch.arange(GRID, dtype=cells.dtype, device=cells.device) + 0.5) / GRID
    moments = torch.stack([(weight * line).sum(), (weight * line[:, None]).sum()])
    prior = 0.05
    return (moments + prior * 0.5) / (weight.sum() + prior)


def _world_record(metadata: Mapping[str, Any]) -> Record:
    """A checked record that the network can judge."""
    record = parse_record(metadata)
    where = f"reward 'attributes': the record of prompt {metadata.get('prompt')!r}"
    for clause in (*record.include, *record.exclude):
        if clause.label not in SHAPES:
            raise ValueError(f"{where} asks for {clause.label!r}: the scorer knows {', '.join(SHAPES)} only.")
        if clause.color is not None and clause.color not in COLORS:
            raise ValueError(
                f"{where} asks for the colour {clause.color!r}: the scorer knows {', '.join(COLORS)} only."
            )
        if clause.count > MAX_COUNT:
            raise ValueError(f"{where} names a count of {clause.count}: the scorer counts up to {MAX_COUNT}.")
    return record


@dataclass(frozen=True, kw_only=True, slots=True)
class AttributeScore:
    """How far an image has what its GenEval record asks for, with gradient: a value in [0, 1], computed in float32 also
    under autocast; the network's own weights are frozen. Only for images of the embedded world: not for photos."""

    combine: Combine = "mean"
    """`mean` or `product` of the clauses' probabilities; the other one is logged as a part."""
    weights: str | None = None
    """A file that `flowrl pretrain scorer` wrote; null takes the file that comes with flowrl."""
    differentiable: ClassVar[bool] = True
    models: ClassVar[tuple[Model, ...]] = ()

    def __post_init__(self) -> None:
        if self.weights is not None:
            check_weights(Path(self.weights))

    def lacks(self, prompt: Prompt) -> str | None:
        """A GenEval record of the embedded world."""
        if (lack := no_record(prompt)) is not None:
            return lack
        try:
            _world_record({"prompt": prompt.text, **prompt.metadata})
        except ValueError as error:
            return f"needs a record of the embedded world: {error}"
        return None

    def build(self, device: torch.device) -> Reward:
        """Loads the network."""
        path = shipped_weights() if self.weights is None else Path(self.weights)
        net = load_net(path, device)

        def score(inputs: RewardInputs) -> RewardOutput:
            for prompt, metadata in zip(inputs.prompts, inputs.metadata, strict=True):
                if missing := [key for key in ("tag", "include") if key not in metadata]:
                    raise ValueError(
                        f"reward 'attributes': prompt {prompt!r} has no {' and no '.join(missing)} in its metadata: "
                        f"prompts must come from a JSONL file with one GenEval record (tag, include, prompt) per line."
                    )
            records = [{"prompt": p, **m} for p, m in zip(inputs.prompts, inputs.metadata, strict=True)]
            with torch.autocast(device.type, enabled=False):
                found = net(inputs.images.to(device))
                scores = {form: attribute_scores(found, records, combine=form) for form in get_args(Combine)}
            parts = {form: values.to(inputs.images.device) for form, values in scores.items()}
            return tensor_output(
                parts[self.combine], parts, valid=torch.ones_like(parts[self.combine], dtype=torch.bool)
            )

        return FunctionReward(
            name="attributes",
            score=score,
            needs=frozenset({"images", "prompts", "metadata"}),
            version=f"attributes:{self.combine}:{hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()}",
            differentiable=True,
        )
