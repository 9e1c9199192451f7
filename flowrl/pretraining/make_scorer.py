"""Trains the differentiable scorer of the embedded world: `flowrl pretrain scorer [key=value ...]`.

1. Random scenes, flawed ones among them, are drawn and labelled by GenEval's judge (`scorer_data.py`).
2. The network learns counts and places of every kind of object from these images flipped, blurred, softened, noisy
   and tinted, none of which changes what an image shows.
3. The weights are written in float16, with a README of their figures on scenes and on the embedded model's images.

Every scene and every batch is a function of (seed, number). A run is minutes, so there are no checkpoints.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowrl.benchmarks.geneval.metadata import RELATIONS, TASKS
from flowrl.benchmarks.geneval.rules import verdict
from flowrl.benchmarks.geneval.wording import position
from flowrl.pretraining.making import draw, readme_text
from flowrl.pretraining.network_training import average_weights
from flowrl.pretraining.scorer_data import corrupt, labels_of, training_scene
from flowrl.prompts.loading import Prompt
from flowrl.rewards.embedded.attributes import GRID, MAX_COUNT, PAIRS, AttributeNet, attribute_scores, load_net
from flowrl.runtime.files import parse_json, replacing, write_atomically
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import counter_seed
from flowrl.runtime.shapes import Int64
from flowrl.world.detector import color_of, detect_shapes
from flowrl.world.scene_prompts import Record, combinations, split
from flowrl.world.scenes import SHAPES, Shape, draw_scene, random_scene

_SCENES_A_TASK = 100  # drawn for prompts, to measure accuracy
_NO_RESULT = ("out", "generated", "measure_only")  # settings that do not change the weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerConfig:
    """Settings of the scorer's training."""

    out: str = "runs/attribute-scorer"
    """Folder of `model.safetensors` and `README.md`."""
    seed: int = 0
    """Seed of initial weights, scenes and corruptions."""
    threads: int = 1
    """CPU threads."""
    num_scenes: int = 16_384
    """Scenes drawn and labelled once."""
    steps: int = 1800
    """Updates."""
    batch_size: int = 64
    """Scenes per update."""
    lr: float = 3e-3
    """Peak learning rate."""
    ema_decay: float = 0.995
    """Decay of the averaged weights that are written."""
    label_smoothing: float = 0.02
    """Keeps probabilities off 0 and 1, where a score has no gradient."""
    generated: int = 120
    """Images of the embedded model on which the score is compared with GenEval's verdict; 0 for none."""
    measure_only: bool = False
    """Measure the weights that are in `out` and rewrite its README, after the embedded model has changed."""

    def __post_init__(self) -> None:
        for name in ("threads", "num_scenes", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")


def draw_pool(config: ScorerConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Images uint8 `[n, 64, 64, 3]`, counts int64 `[n, 2, 15]` and cells float16 `[n, 12, 8, 8]`."""
    images, counts, cells = [], [], []
    with progress("drawing scenes", config.num_scenes) as advance:
        for index in range(config.num_scenes):
            images.append(training_scene(np.random.default_rng(counter_seed(config.seed, "scorer scene", index))))
            seen = labels_of(images[-1])
            counts.append(seen[0])
            cells.append(seen[1].astype(np.float16))
            advance("")
    return tuple(torch.from_numpy(np.stack(part)) for part in (images, counts, cells))  # type: ignore[return-value]


def scorer_loss(
    net: AttributeNet, images: Tensor, counts: Int64[Tensor, " b 2 15"], cells: Tensor, smoothing: float
) -> Tensor:
    """Cross-entropy of counts, summed over the 15 counters, plus that of the 64 cells, both means over the batch."""
    found = net(images)
    target = F.one_hot(counts, MAX_COUNT + 1).float().mean(dim=1)
    target = (1 - smoothing) * target + smoothing / (MAX_COUNT + 1)
    count_loss = -(target * found.count_logits.log_softmax(dim=-1)).sum(dim=(1, 2)).mean()
    covered = torch.cat([1.0 - cells.sum(dim=1, keepdim=True), cells], dim=1)
    return count_loss + F.cross_entropy(found.cell_logits, covered) * GRID


def train(config: ScorerConfig) -> AttributeNet:
    """Draws the scenes and trains; returns the network with averaged weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(counter_seed(config.seed, "scorer weights"))
        net = AttributeNet()
    images, counts, cells = draw_pool(config)
    average = {name: value.detach().clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=0.01)
    warmup = min(0.1, 100 / config.steps)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.lr, total_steps=config.steps + 1, pct_start=warmup, cycle_momentum=False
    )
    recent = 0.0
    with progress("scorer", config.steps) as advance:
        for step in range(config.steps):
            generator = torch.Generator().manual_seed(counter_seed(config.seed, "scorer batch", step))
            chosen = torch.randint(len(images), (config.batch_size,), generator=generator)
            batch = images[chosen].permute(0, 3, 1, 2).float() / 255.0
            seen = cells[chosen].float()
            flipped = (torch.rand(len(chosen), generator=generator) < 0.5)[:, None, None, None]
            batch, seen = (torch.where(flipped, part.flip(-1), part) for part in (batch, seen))
            loss = scorer_loss(net, corrupt(batch, generator), counts[chosen], seen, config.label_smoothing)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            rates.step()
            average_weights(net, average, min(config.ema_decay, (1 + step) / (10 + step)))
            recent = loss.item() if step == 0 else 0.98 * recent + 0.02 * loss.item()
            advance(f"loss {recent:.3f}")
    net.load_state_dict(average)
    return net.requires_grad_(False).eval()


def roc_auc(scores: Sequence[float], correct: Sequence[bool]) -> float:
    """Probability that a correct image scores higher than a wrong one (ties count half); NaN where one kind lacks."""
    values, right = np.asarray(scores, dtype=np.float64), np.asarray(correct, dtype=bool)
    difference = values[right][:, None] - values[~right][None, :]
    return float(np.mean((difference > 0) + 0.5 * (difference == 0))) if difference.size else float("nan")


def scenes_for_prompts(seed: int) -> list[tuple[Record, tuple[Shape, ...]]]:
    """A hundred scenes per task with the records they were drawn for; none was trained on."""
    found = []
    for task, groups in combinations().items():
        records = [record for group in groups for record in group]
        for index in range(_SCENES_A_TASK):
            rng = np.random.default_rng(counter_seed(seed, "scorer held out", task, index))
            record = records[int(rng.integers(len(records)))]
            found.append((record, random_scene(record, rng)))
    return found


@torch.no_grad()
def accuracy(net: AttributeNet, seed: int, *, corrupted: bool) -> dict[str, float]:
    """Shares of right answers on scenes drawn for prompts, against what was drawn. `pairs`: all twelve counts of an
    image; `shapes`: one shape's count in any colour; `shapes 0` .. `shapes 4`: the same where that many were drawn;
    `relation`: which of the four relations a position prompt's two objects have."""
    scenes = scenes_for_prompts(seed)
    drawn = np.stack([draw_scene(shapes) for _, shapes in scenes])
    images = torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 255.0
    if corrupted:
        images = corrupt(images, torch.Generator().manual_seed(counter_seed(seed, "scorer held out")))
    found = net(images)
    read = found.count_logits.argmax(dim=-1).numpy()
    kinds = [[(s.label, s.color) for s in shapes] for _, shapes in scenes]
    drawn = np.asarray([[*map(k.count, PAIRS), *map([s for s, _ in k].count, SHAPES)] for k in kinds])
    right, by_shape = read == drawn, slice(len(PAIRS), None)
    figures = {"pairs": float(right[:, : len(PAIRS)].all(axis=1).mean()), "shapes": float(right[:, by_shape].mean())}
    for count in range(MAX_COUNT):
        answers = right[:, by_shape][drawn[:, by_shape] == count]
        figures[f"shapes {count}"] = float(answers.mean()) if answers.size else float("nan")
    rows = [i for i, (record, _) in enumerate(scenes) if record["tag"] == "position"]
    guesses = []
    for relation in RELATIONS:
        pairs = [scenes[i][0]["include"] for i in rows]
        asked = [position(subject["class"], relation, reference["class"]) for reference, subject in pairs]
        guesses.append(attribute_scores(type(found)(*(part[rows] for part in found)), asked, combine="product"))
    best = torch.stack(guesses).argmax(dim=0).tolist()
    wanted = [RELATIONS.index(scenes[i][0]["include"][1]["position"][0]) for i in rows]
    return figures | {"relation": float(np.mean(np.asarray(best) == wanted))}


@torch.no_grad()
def agreement(net: AttributeNet, count: int, seed: int) -> dict[str, float]:
    """How well the score separates the embedded model's images of held-out prompts by GenEval's official verdict.

    `count` images, tasks in turn, at the model's default sampling settings. `mean` and `product` are areas under the
    ROC curve of the two forms of the score over all images; `within tasks` is the mean of the six tasks' own areas of
    `mean`; `correct` is the number of correct images.
    """
    from flowrl.pipelines.families.sd3 import FAMILY
    from flowrl.pretraining.tiny_sd3 import CONTEXT, GUIDANCE_SCALE, NUM_STEPS

    folder = Path(str(resources.files("flowrl") / "assets" / "tiny-sd3"))
    pipeline = FAMILY.load(str(folder), dtype=torch.float32, max_sequence_length=CONTEXT, vae_slice=24)
    turns = [itertools.cycle(split()[1][task]) for task in TASKS]
    records = [next(turns[i % len(TASKS)]) for i in range(count)]
    correct: list[bool] = []
    scores: dict[Literal["mean", "product"], list[float]] = {"mean": [], "product": []}
    prompts = [Prompt(text=str(record["prompt"]), metadata=record) for record in records]
    keys = [(seed, "scorer agreement", number) for number in range(count)]
    for places, images in draw(pipeline, prompts, keys, NUM_STEPS, GUIDANCE_SCALE, "comparing with the verdict"):
        batch = records[places.start : places.stop]
        found = net(images)
        for form, values in scores.items():
            values += attribute_scores(found, batch, combine=form).tolist()
        for image, record in zip((images * 255).round().byte().permute(0, 2, 3, 1).numpy(), batch, strict=True):
            correct.append(verdict(detect_shapes(image), record, color_of=partial(color_of, image)).correct)
    areas = {form: roc_auc(values, correct) for form, values in scores.items()}
    tasks = [roc_auc(scores["mean"][k :: len(TASKS)], correct[k :: len(TASKS)]) for k in range(len(TASKS))]
    return areas | {"within tasks": float(np.nanmean(tasks)), "correct": float(sum(correct))}


_ROWS = {"pairs": "all twelve counts of an image", "shapes": "count of one shape, any colour"}
_ROWS |= {f"shapes {n}": f"the same where {n} were drawn" for n in range(MAX_COUNT)}
_ROWS |= {"relation": "relation of two objects, of four"}


def write_readme(config: ScorerConfig, path: Path) -> None:
    """Measures the weights at `path` and writes README.md beside them, with the settings they were trained with."""
    from safetensors import safe_open

    net = load_net(path)
    with safe_open(path, framework="pt") as file:
        notes = file.metadata() or {}
    made = ScorerConfig(**parse_json(notes.get("settings", "{}"), f"the notes of {path}"))
    usual = ScorerConfig()
    changed = {k: v for k, v in asdict(made).items() if v != getattr(usual, k) and k not in _NO_RESULT}
    plain, hard = (accuracy(net, config.seed, corrupted=corrupted) for corrupted in (False, True))
    compared = ""
    if config.generated:
        found = agreement(net, config.generated, config.seed)
        compared = readme_text("attribute-scorer-agreement").format(
            count=config.generated, within=found["within tasks"], **found
        )
    text = readme_text("attribute-scorer").format(
        parameters=sum(p.numel() for p in net.parameters()),
        kilobytes=path.stat().st_size / 1000,
        overrides="".join(f" {key}={value}" for key, value in changed.items()),
        minutes=float(notes.get("minutes", "nan")),
        drawn=_SCENES_A_TASK * len(TASKS),
        held=_SCENES_A_TASK,
        accuracy="\n".join(f"| {text} | {plain[key]:.3f} | {hard[key]:.3f} |" for key, text in _ROWS.items()),
        agreement=compared,
        **asdict(made),
    )
    write_atomically(path.with_name("README.md"), text)


def main(config: ScorerConfig) -> Path:
    """Trains and measures, or only measures; returns the folder."""
    from safetensors.torch import save

    path = Path(config.out) / "model.safetensors"
    if not config.measure_only:
        begun = time.process_time()
        net = train(config)
        minutes = f"{(time.process_time() - begun) / 60:.1f}"
        notes = {"settings": json.dumps(asdict(config)), "minutes": minutes}
        with replacing(path) as stream:
            stream.write(save({name: value.half().contiguous() for name, value in net.state_dict().items()}, notes))
    write_readme(config, path)
    return path.parent
