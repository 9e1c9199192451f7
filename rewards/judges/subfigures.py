"""Images that are grids of sub-figures, judged cell by cell (PaCo-RL, arXiv 2512.04784).

    subfigures              another reward of each cell and its own sub-prompt, mean over cells
    subfigure_similarity    cosine of CLIP's embeddings of two cells, mean over all pairs of cells

PaCo-RL's CLIP-T is `subfigures` of `clip_score`, its CLIP-I `subfigure_similarity`, both with LAION's CLIP ViT-H/14.
Whether a judge finds cells consistent is `flowrl.rewards.judges.consistency`. The similarity is highest where all cells
are the same image, so it needs a reward beside it that asks for the content of each.

Letters: B images, n cells of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.config.sections import at_least
from flowrl.prompts.grids import MAX_CELLS, cell_pairs, cell_prompts, check_grid, grid_shape, split_grid
from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import (
    FunctionReward,
    Model,
    Reward,
    RewardInputs,
    RewardOutput,
    changed,
    models_of,
    output_of,
    reward_options,
)
from flowrl.rewards.base.outputs import changed_output, check_output, join_outputs
from flowrl.rewards.base.prompt_needs import lack_of, no_cells, no_grid
from flowrl.rewards.base.specs import build_nested, nested_options
from flowrl.rewards.judges.asking import MISSING
from flowrl.rewards.networks.clip_encoder import (
    ClipEncoder,
    Library,
    Preprocess,
    gradient_of,
    load_encoder,
    score_output,
)
from flowrl.rewards.networks.pretrained import OneModel
from flowrl.runtime.placement import widened

Shape = tuple[int, int]
DEFAULT_MODEL = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
CELLS_PER_CALL = 64
FAILED = "cell_failed"
OWNER = "reward 'subfigures'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subfigures:
    """The mean over the cells of a grid of another reward, each cell with the sub-prompt that describes it.

    A prompt's metadata may have `sub_prompts`, a list with one entry per cell, row by row: a text, or an object with
    `prompt` that is the cell's metadata. Otherwise they are read off the prompt, see
    `flowrl.prompts.grids.sub_prompts`. Source and reference images are given to every cell of their image.

    An item has failed ("missing_field") if its prompt names no grid of two cells or more, or has not one sub-prompt per
    cell; and if any of its cells failed, under the cells' reason, or "cell_failed" where they give several. Sub-scores
    are averaged; the part `lowest` is the value of the worst cell.
    """

    reward: str
    """A built-in reward of images, of kind pointwise or remote."""
    options: Mapping[str, Any] | None = None
    """Its options."""
    grid: str | None = None
    """The shape of all grids, such as 2x2; null reads it off each prompt."""
    cells_per_call: int = CELLS_PER_CALL
    """Cells that the inner reward is given at a time, rounded to whole images, at least one."""

    def __post_init__(self) -> None:
        check_grid(self.grid)
        at_least(1, self, "cells_per_call")
        nested_options(self.reward, self.options)

    @property
    def models(self) -> tuple[Model, ...] | None:
        return models_of(nested_options(self.reward, self.options))

    def lacks(self, prompt: Prompt) -> str | None:
        """A grid, a sub-prompt for each of its cells, and what the inner reward needs of each of them."""
        if (lack := no_cells(prompt, self.grid)) is not None:
            return lack
        inner = nested_options(self.reward, self.options)
        cells = cell_prompts(prompt.text, prompt.metadata)
        given = (replace(cell, sources=prompt.sources, references=prompt.references) for cell in cells)
        return next((lack for cell in given if (lack := lack_of(inner, cell)) is not None), None)

    def build(self, device: torch.device) -> Reward:
        """Makes the reward. Raises ValueError: for an inner reward that cannot work; when called, for `sub_prompts`
        that are not such a list."""
        inner = build_nested(self.reward, self.options, device=device, owner=OWNER)
        if "videos" in inner.needs:
            raise ValueError(f"{OWNER}: reward {self.reward!r} looks at videos, and the cells of a grid are images.")
        return mean_over_cells(inner, grid=self.grid, cells_per_call=self.cells_per_call)


def mean_over_cells(inner: Reward, *, grid: str | None, cells_per_call: int = CELLS_PER_CALL) -> FunctionReward:
    """The reward `subfigures` of a reward that is at hand."""

    def score_cells(inputs: RewardInputs) -> RewardOutput:
        prompts = [cell_prompts(text, record) for text, record in zip(inputs.prompts, inputs.metadata, strict=True)]
        shapes = [
            shape if shape is not None and shape[0] * shape[1] == len(texts) else None
            for shape, texts in zip(_shapes(inputs, grid), prompts, strict=True)
        ]

        def score(items: list[int], shape: Shape) -> RewardOutput:
            # The cells as images of their own, those of one image side by side.
            number, images = shape[0] * shape[1], len(items)
            small = replace(inputs, images=inputs.images[..., :1, :1], videos=None, fps=None)  # not every image n times
            repeated = small[[item for item in items for _ in range(number)]]
            places = torch.arange(number, device=repeated.group_ids.device).repeat(images)
            flat = [prompt for item in items for prompt in prompts[item]]
            given = replace(
                repeated,
                images=split_grid(inputs.images[items], *shape).flatten(0, 1),
                prompts=[prompt.text for prompt in flat],
                metadata=[prompt.metadata for prompt in flat],
                # One cell of one prompt: what draws by ids draws again.
                group_ids=repeated.group_ids * MAX_CELLS + places,
            )
            # One value per image from those of its cells.
            output = check_output(inner(given), len(given), inner.name)
            values, valid = output.values.unflatten(0, (images, -1)), output.valid.unflatten(0, (images, -1)).all(1)
            failed, reasons = int((~valid).sum()), list(output.errors)
            parts = {name: _row_mean(part.unflatten(0, (images, -1))) for name, part in output.parts.items()}
            return RewardOutput(
                values=torch.where(valid, _row_mean(values), torch.nan),
                valid=valid,
                parts={**parts, "lowest": torch.where(valid, values.detach().amin(1), torch.nan)},
                errors={reasons[0] if len(reasons) == 1 else FAILED: failed} if failed else {},
            )

        return _by_shape(inputs, shapes, score, cells_per_call)

    needs, version = inner.needs | {"images", "prompts", "metadata"}, f"subfigures:grid-{grid}:{inner.version}"
    return changed(inner, score_cells, name="subfigures", needs=needs, version=version)


def _row_mean(values: Tensor) -> Tensor:
    return widened(values).mean(1).float()


@dataclass(frozen=True, kw_only=True, slots=True)
class SubfigureSimilarity(OneModel):
    """How much a grid's cells resemble each other: the mean cosine of CLIP's embeddings over all pairs, [-1, 1], in
    float32; differentiable with `preprocess` bilinear or bicubic. An item fails ("missing_field") if its prompt names
    no grid of two cells or more. `lowest` is the cosine of the least similar pair."""

    model: str = DEFAULT_MODEL
    """As of `clip_score`."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    library: Library = "transformers"
    """As of `clip_score`."""
    preprocess: Preprocess = "processor"
    """As of `clip_score`."""
    grid: str | None = None
    """The shape of all grids, such as 2x2; null reads it off each prompt."""
    cells_per_call: int = CELLS_PER_CALL
    """Cells that are encoded at a time, rounded to whole images, at least one."""

    def __post_init__(self) -> None:
        check_grid(self.grid)
        at_least(1, self, "cells_per_call")
        given = {name: getattr(self, name) for name in ("model", "revision", "library", "preprocess")}
        reward_options("clip_score", given)

    def lacks(self, prompt: Prompt) -> str | None:
        """A grid."""
        return no_grid(prompt, self.grid)

    def build(self, device: torch.device) -> Reward:
        """Makes the reward."""
        owner = "reward 'subfigure_similarity'"
        encoder = load_encoder(
            self.library, self.model, device=device, revision=self.revision, preprocess=self.preprocess, owner=owner
        )
        return mean_over_pairs(encoder, grid=self.grid, model=self.model, cells_per_call=self.cells_per_call)


def mean_over_pairs(
    encoder: ClipEncoder, *, grid: str | None, model: str, cells_per_call: int = CELLS_PER_CALL
) -> FunctionReward:
    """The reward `subfigure_similarity` of a CLIP that is loaded."""

    def score_pairs(inputs: RewardInputs) -> RewardOutput:
        def score(items: list[int], shape: Shape) -> RewardOutput:
            chosen = inputs[items]
            with gradient_of(chosen, encoder), torch.autocast(encoder.device.type, enabled=False):
                unit = encoder.images(split_grid(chosen.images, *shape).flatten(0, 1)).unflatten(0, (len(items), -1))
                first, second = zip(*cell_pairs(unit.shape[1]), strict=True)
                cosine = (unit[:, first] * unit[:, second]).sum(-1)
            output = score_output(_row_mean(cosine), chosen)
            lowest = torch.where(output.valid, cosine.detach().amin(1).to(output.valid.device), torch.nan)
            return replace(output, parts={"lowest": lowest})

        return _by_shape(inputs, _shapes(inputs, grid), score, cells_per_call)

    return FunctionReward(
        name="subfigure_similarity",
        score=score_pairs,
        needs=frozenset({"images", "prompts"}),
        version=f"subfigure_similarity:{model}:grid-{grid}:{encoder.version}",
        differentiable=encoder.differentiable,
    )


def _shapes(inputs: RewardInputs, grid: str | None) -> list[Shape | None]:
    """The grid of each image: the given one, else the one that its prompt names."""
    return [grid_shape(grid or prompt) for prompt in inputs.prompts]


def _by_shape(
    inputs: RewardInputs,
    shapes: Sequence[Shape | None],
    score: Callable[[list[int], Shape], RewardOutput],
    cells_per_call: int,
) -> RewardOutput:
    """Scores images that are cut alike together; those without a grid have failed. In the order of the inputs."""
    order = [item for item, shape in enumerate(shapes) if shape is None]
    pieces = [output_of([None] * len(order), inputs, errors=[MISSING] * len(order))]
    for shape in dict.fromkeys(shape for shape in shapes if shape is not None):
        items = [item for item, own in enumerate(shapes) if own == shape]
        step = max(1, cells_per_call // (shape[0] * shape[1]))
        pieces += [score(items[start : start + step], shape) for start in range(0, len(items), step)]
        order += items
    back = torch.tensor(order).argsort().to(inputs.images.device)
    return changed_output(join_outputs(pieces), lambda tensor: tensor[back])
