"""Consistency of images that belong together: the cells of a grid, or an image before and after an edit.

PaCo-RL (arXiv 2512.04784): a judge is shown two images and asked whether they are consistent; the score is its
probability of yes at the first answered token, also of a judge that was trained to give reasons after. Checkpoints
X-GenGroup/PaCo-Reward-7B. The published texts are in the repository X-GenGroup/PaCo-RL, which states no licence, so
they are not shipped: `template` must be given, as a copy of yours, or as `own` for our words, whose scores are others;
see `flowrl.rewards.judges.templates`. A template of `grid` may hold `{prompt}`, `{theme}`, which is the prompt up to
the first cell's label, and `{criterion}`; one without `{criterion}` is asked once for each pair, whatever the criteria.

    mode         compared                              one reward
    grid         all pairs of cells                    mean over pairs, then over criteria
    edit         source and edited image               sqrt(consistency * following the instruction)
    clip_text    each cell and its own sub-prompt      reward `subfigures` of `clip_score`
    clip_image   all pairs of cells                    reward `subfigure_similarity`

    subfigures              another reward of each cell and its own sub-prompt, mean over cells
    subfigure_similarity    cosine of CLIP's embeddings of two cells, mean over all pairs of cells

PaCo-RL's CLIP-T is `subfigures` of `clip_score`, its CLIP-I `subfigure_similarity`, both with LAION's CLIP ViT-H/14.
The similarity is highest where all cells are the same image: it needs a reward that asks for the content beside it.

Letters: B images, n cells of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flowrl.config.sections import at_least
from flowrl.prompts.grids import MAX_CELLS, cell_pairs, cell_prompts, check_grid, grid_shape, split_grid, theme
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
from flowrl.rewards.base.prompt_needs import lack_of, no_cells, no_grid, no_source
from flowrl.rewards.base.specs import build_nested, nested_options
from flowrl.rewards.judges import asking
from flowrl.rewards.judges.asking import MISSING
from flowrl.rewards.judges.chat import TOP_LOGPROBS, Answer, Chat, Pixels, Question, check_chat, judge_models
from flowrl.rewards.judges.templates import Template, digest_of, load_templates
from flowrl.rewards.networks.clip_encoder import (
    ClipEncoder,
    Library,
    Preprocess,
    gradient_of,
    load_encoder,
    prompt_reward,
    score_output,
    transformers_clip,
)
from flowrl.rewards.networks.pretrained import OneModel, check_model, model_of
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


CRITERIA = ("style, logic and identity",)


@dataclass(frozen=True, kw_only=True, slots=True)
class GridConsistency:
    """Whether a grid's cells, or images, show the same subject, by a judge (PaCo-RL); modes: see the module. An item
    has failed ("missing_field") if its prompt names no grid of two cells or more, a source image is missing in `edit`,
    or sub-prompts are not as many as cells in `clip_text`; and if any of its questions failed."""

    judge: Mapping[str, Any] | None = None
    """Which one, see `flowrl.rewards.judges.chat`; one that gives log-probabilities. Only for `grid` and `edit`."""
    mode: Literal["grid", "edit", "clip_text", "clip_image"] = "grid"
    """`grid`, `edit`, `clip_text` or `clip_image`."""
    criteria: Sequence[str] | None = None
    """In what respects the images are compared, each in a question of its own; null for style, logic and identity in
    one. A prompt's metadata may have its own, `criteria`: a text, a list of texts, or a mapping of dimensions to either
    or to texts by name, as in T2IS-Bench; dimensions count alike, and in each its texts."""
    grid: str | None = None
    """The shape of all grids, such as 2x2; null reads it off each prompt."""
    template: str | None = None
    """Required with a judge: the text file that it is asked with; for `edit` a folder with consistency_edit.txt and
    edit_following.txt; or `own`."""
    model: str = DEFAULT_MODEL
    """Of `clip_text` and `clip_image`: a local folder, or an id on the hub. A prompt's metadata may have `sub_prompts`,
    a list of texts; otherwise they are read off the prompt, see `flowrl.prompts.grids.sub_prompts`."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""

    def __post_init__(self) -> None:
        check_grid(self.grid)
        if self.grid is not None and self.mode == "edit":
            raise ValueError(f"grid means nothing with mode edit: leave it out, got {self.grid!r}.")
        by_clip = self.mode in ("clip_text", "clip_image")
        if by_clip != (self.judge is None) or (by_clip and (self.criteria is not None or self.template is not None)):
            rule = "asks no judge: leave judge, criteria and template out" if by_clip else "needs judge"
            raise ValueError(f"mode {self.mode!r} {rule}.")
        if self.judge is None:
            check_model(self.model, what="CLIP")
            return
        if self.criteria is not None and not (self.criteria and all(self.criteria)):
            raise ValueError(f"criteria must be a list of texts, such as [style, identity], got {self.criteria!r}.")
        self.templates()
        check_chat(self.judge)

    def templates(self) -> dict[str, Template]:
        """The mode's templates, or those that take their place, by name."""
        names = ("consistency_edit", "edit_following") if self.mode == "edit" else ("consistency",)
        return load_templates(dict.fromkeys(names, 2), self.template, source="paco_rl")

    @property
    def models(self) -> tuple[Model, ...]:
        return (model_of(self.model),) if self.judge is None else judge_models(self.judge)

    def lacks(self, prompt: Prompt) -> str | None:
        """A grid and its sub-prompts, or a source image; criteria that can be read, where the record has some."""
        if self.mode == "clip_text":
            return no_cells(prompt, self.grid)
        if (lack := no_source(prompt) if self.mode == "edit" else no_grid(prompt, self.grid)) is not None:
            return lack
        try:
            _respects(prompt.metadata, CRITERIA)
        except ValueError as error:
            return f"needs other criteria: {error}" if self.judge is not None else None
        return None

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; loads the judge, if it runs here."""
        if self.judge is None:
            owner = "reward 'grid_consistency'"
            encoder = transformers_clip(
                self.model, device=device, revision=self.revision, preprocess="processor", owner=owner
            )
            if self.mode == "clip_image":
                made = mean_over_pairs(encoder, grid=self.grid, model=self.model)
            else:
                version = f"{self.model}:cosine"
                inner = prompt_reward("clip_score", encoder, lambda cosine, _: cosine, threshold=None, version=version)
                made = mean_over_cells(inner, grid=self.grid)
            return replace(made, name="grid_consistency")
        templates, criteria = self.templates(), "|".join(self.criteria or CRITERIA)
        score = self._score_edit if self.mode == "edit" else self._score_grid
        return asking.judged_reward(
            "grid_consistency",
            partial(score, templates=templates),
            judge=self.judge,
            device=device,
            needs={"metadata"} | ({"source_images"} if self.mode == "edit" else set()),
            version=f"{self.mode}:grid-{self.grid}:{criteria}:template-{digest_of(templates)}",
        )

    def _score_grid(self, inputs: RewardInputs, *, chat: Chat, templates: Mapping[str, Template]) -> RewardOutput:
        words, criteria = templates["consistency"], self.criteria or CRITERIA
        respects = [_respects(record, criteria) for record in inputs.metadata]
        if "{criterion}" not in words.user + (words.system or ""):
            respects = [[("", 1.0)]] * len(inputs)

        def ask(item: int) -> list[Question]:
            prompt = inputs.prompts[item]
            found = grid_shape(self.grid or prompt)
            if found is None:
                raise asking.NoScore(asking.MISSING)
            cells = [asking.pixels_of(cell) for cell in split_grid(inputs.images[item][None], *found)[0]]
            pairs = [(cells[i], cells[j]) for i, j in cell_pairs(len(cells))]
            return [_ask(words, pair, prompt, criterion) for criterion, _ in respects[item] for pair in pairs]

        def read(item: int, answers: list[Answer]) -> asking.JudgedItem:
            scores = asking.all_of(answers, [asking.probability_of_yes(answer) for answer in answers])
            # Questions of one criterion stand side by side, one per pair.
            means = np.mean(np.reshape(scores, (len(respects[item]), -1)), axis=1)
            return asking.JudgedItem(value=float(np.dot(means, [share for _, share in respects[item]])))

        return asking.judge_items(inputs, chat, ask, read)

    def _score_edit(self, inputs: RewardInputs, *, chat: Chat, templates: Mapping[str, Template]) -> RewardOutput:
        respects = [_respects(record, self.criteria or CRITERIA) for record in inputs.metadata]

        def ask(item: int) -> list[Question]:
            pair, prompt = [asking.source_of(inputs, item), asking.pixels_of(inputs.images[item])], inputs.prompts[item]
            return [
                _ask(templates["edit_following"], pair, prompt),
                *(_ask(templates["consistency_edit"], pair, prompt, criterion) for criterion, _ in respects[item]),
            ]

        def read(item: int, answers: list[Answer]) -> asking.JudgedItem:
            scores = asking.all_of(answers, [asking.probability_of_yes(answer) for answer in answers])
            following, consistency = scores[0], float(np.dot(scores[1:], [share for _, share in respects[item]]))
            return asking.JudgedItem(
                value=math.sqrt(consistency * following), parts={"consistency": consistency, "following": following}
            )

        return asking.judge_items(inputs, chat, ask, read, parts=("consistency", "following"))


def _respects(record: Mapping[str, Any], default: Sequence[str]) -> list[tuple[str, float]]:
    """The criteria of one item, those of its record, else the reward's, and what each counts; the counts sum to 1."""
    own = record.get("criteria")
    if own is None:
        own = list(default)
    dimensions = [
        list(texts.values()) if isinstance(texts, Mapping) else texts if isinstance(texts, list) else [texts]
        for texts in (own.values() if isinstance(own, Mapping) else [own])
    ]
    if not dimensions or not all(
        texts and all(isinstance(text, str) and text for text in texts) for texts in dimensions
    ):
        raise ValueError(
            f"reward 'grid_consistency': metadata field criteria must be a text or a list of texts, or a mapping of "
            f"dimensions to them, got {own!r}."
        )
    return [(text, 1 / (len(dimensions) * len(texts))) for texts in dimensions for text in texts]


def _ask(words: Template, pair: Sequence[Pixels], prompt: str, criterion: str = "") -> Question:
    fields = {"prompt": prompt, "theme": theme(prompt), "criterion": criterion}
    return words.question(pair, fields, top_logprobs=TOP_LOGPROBS)
