"""Consistency of images that belong together: the cells of a grid, or an image before and after an edit.

PaCo-RL (arXiv 2512.04784): a judge is shown two images and asked whether they are consistent; the score is its
probability of yes at the first answered token, also of a judge that was trained to give reasons after. Checkpoints
X-GenGroup/PaCo-Reward-7B. The shipped templates are our own words; scores of a published checkpoint need its published
template, in the repository X-GenGroup/PaCo-RL; see `flowrl.rewards.judges.templates`. A template of `grid` may hold
`{prompt}`, `{theme}`, which is the prompt up to the first cell's label, and `{criterion}`; one without `{criterion}` is
asked once for each pair, whatever the criteria.

    mode         compared                              one reward
    grid         all pairs of cells                    mean over pairs, then over criteria
    edit         source and edited image               sqrt(consistency * following the instruction)
    clip_text    each cell and its own sub-prompt      reward `subfigures` of `clip_score`
    clip_image   all pairs of cells                    reward `subfigure_similarity`
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from flowrl.prompts.grids import MAX_CELLS, cell_pairs, grid_shape, split_grid, theme
from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, output_of
from flowrl.rewards.judges.answers import yes_no
from flowrl.rewards.judges.asking import (
    BLANK,
    MISSING,
    UNPARSED,
    ask_items,
    first_error,
    judged_reward,
    pixels_of,
    source_of,
)
from flowrl.rewards.judges.chat import Answer, Chat, Pixels, Question, build_chat, check_chat
from flowrl.rewards.judges.subfigures import DEFAULT_MODEL, mean_over_cells, mean_over_pairs
from flowrl.rewards.judges.templates import Template, digest_of, load_templates
from flowrl.rewards.networks.clip_encoder import prompt_reward, transformers_clip
from flowrl.rewards.networks.pretrained import check_model

Mode = Literal["grid", "edit", "clip_text", "clip_image"]
OWNER = "reward 'grid_consistency'"
CRITERIA = ("style, logic and identity",)
TOP_LOGPROBS = 20


def check(
    *,
    judge: Mapping[str, Any] | None = None,
    mode: Mode = "grid",
    criteria: Sequence[str] | None = None,
    grid: str | None = None,
    template: str | None = None,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
) -> None:
    """Refuses option values that are wrong, without asking the judge or loading the model."""
    if grid is not None and (mode == "edit" or grid_shape(grid) is None):
        raise ValueError(
            f"{OWNER}: grid must be ROWSxCOLUMNS of 2 to {MAX_CELLS} cells, such as 2x2, and means nothing with mode "
            f"edit; got {grid!r}."
        )
    by_clip = mode in ("clip_text", "clip_image")
    if by_clip != (judge is None) or (by_clip and (criteria is not None or template is not None)):
        rule = "asks no judge: leave judge, criteria and template out" if by_clip else "needs judge"
        raise ValueError(f"{OWNER}: mode {mode!r} {rule}.")
    if by_clip:
        return check_model(model, owner=OWNER, what="CLIP")
    assert judge is not None
    good = criteria is None or (isinstance(criteria, list | tuple) and all(isinstance(c, str) and c for c in criteria))
    if not good or (criteria is not None and not criteria):
        raise ValueError(f"{OWNER}: criteria must be a list of texts, such as [style, identity], got {criteria!r}.")
    for words in load_templates(_templates(mode), template, owner=OWNER).values():
        words.parts([BLANK, BLANK], prompt="", theme="", criterion="")
    return check_chat(judge, owner=OWNER)


def grid_consistency(
    *,
    device: torch.device,
    judge: Mapping[str, Any] | None = None,
    mode: Mode = "grid",
    criteria: Sequence[str] | None = None,
    grid: str | None = None,
    template: str | None = None,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
) -> Reward:
    """Whether images that belong together do so; see the module for the modes.

    An item has failed ("missing_field") if its prompt names no grid of two cells or more, if it lacks a source image
    in `edit`, or if it has not as many sub-prompts as cells in `clip_text`; and if any of its questions failed.

    Args:
        device: where a judge in this process, or CLIP, runs.
        judge: which one, see `flowrl.rewards.judges.chat`; one that gives log-probabilities. Only for `grid` and
        `edit`.
        mode: `grid`, `edit`, `clip_text` or `clip_image`.
        criteria: in what respects the images are compared, each in a question of its own; null for style, logic and
            identity in one. A prompt's metadata may have its own, `criteria`: a text, a list of texts, or a mapping of
            dimensions to either or to texts by name, as in T2IS-Bench; dimensions count alike, and in each its texts.
        grid: the shape of all grids, such as 2x2; null reads it off each prompt.
        template: a text file that takes the place of consistency.txt; for `edit` a folder with consistency_edit.txt and
            edit_following.txt.
        model: of `clip_text` and `clip_image`: a local folder, or an id on the hub. A prompt's metadata may have
            `sub_prompts`, a list of texts; otherwise they are read off the prompt, see
            `flowrl.prompts.grids.sub_prompts`.
        revision: branch, tag or commit on the hub.

    Raises:
        ValueError: for bad values, or a judge, template or model that is not there.
    """
    check(judge=judge, mode=mode, criteria=criteria, grid=grid, template=template, model=model, revision=revision)
    shape = None if grid is None else grid_shape(grid)
    if judge is None:
        return replace(_by_clip(mode, model, revision, grid=grid, device=device), name="grid_consistency")
    templates = load_templates(_templates(mode), template, owner=OWNER)
    chat = build_chat(judge, device=device, owner=OWNER)
    respects = CRITERIA if criteria is None else tuple(criteria)
    score = _score_edit if mode == "edit" else partial(_score_grid, shape=shape)
    return judged_reward(
        "grid_consistency",
        partial(score, chat=chat, templates=templates, criteria=respects),
        judge=judge,
        needs={"metadata"} | ({"source_images"} if mode == "edit" else set()),
        version=f"grid_consistency:{mode}:grid-{grid}:{'|'.join(respects)}:template-{digest_of(templates)}:{chat.version}",
    )


def _templates(mode: Mode) -> tuple[str, ...]:
    return ("consistency_edit", "edit_following") if mode == "edit" else ("consistency",)


def _by_clip(mode: Mode, model: str, revision: str | None, *, grid: str | None, device: torch.device) -> FunctionReward:
    encoder = transformers_clip(model, device=device, revision=revision, preprocess="processor", owner=OWNER)
    if mode == "clip_image":
        return mean_over_pairs(encoder, grid=grid, model=model)
    inner = prompt_reward("clip_score", encoder, lambda cosine, _: cosine, threshold=None, version=f"{model}:cosine")
    return mean_over_cells(inner, grid=grid)


def _respects(record: Mapping[str, Any], default: Sequence[str]) -> list[tuple[str, float]]:
    """The criteria of one item, those of its record, else the reward's, and what each counts; the counts sum to 1."""
    own = record.get("criteria")
    if own is None:
        own = list(default)
    dimensions = [_texts(texts) for texts in (own.values() if isinstance(own, Mapping) else [own])]
    if not dimensions or not all(
        texts and all(isinstance(text, str) and text for text in texts) for texts in dimensions
    ):
        raise ValueError(
            f"{OWNER}: metadata field criteria must be a text or a list of texts, or a mapping of dimensions to them, "
            f"got {own!r}."
        )
    return [(text, 1 / (len(dimensions) * len(texts))) for texts in dimensions for text in texts]


def _texts(given: Any) -> list[Any]:
    if isinstance(given, Mapping):
        return list(given.values())
    return given if isinstance(given, list) else [given]


def _ask(words: Template, pair: Sequence[Pixels], prompt: str, criterion: str = "") -> Question:
    fields = {"prompt": prompt, "theme": theme(prompt), "criterion": criterion}
    return Question(parts=words.parts(pair, **fields), system=words.system_of(**fields), top_logprobs=TOP_LOGPROBS)


def _agreed(answers: Sequence[Answer]) -> tuple[list[float], str | None]:
    """The probabilities of yes, or why there are not all."""
    error = first_error(answers) if answers else MISSING
    scores = [yes_no(answer.logprobs[0]) if answer.logprobs else None for answer in answers]
    found = [score for score in scores if score is not None]
    return found, error if error is not None or len(found) == len(answers) else UNPARSED


def _score_grid(
    inputs: RewardInputs,
    *,
    chat: Chat,
    templates: Mapping[str, Template],
    criteria: Sequence[str],
    shape: tuple[int, int] | None,
) -> RewardOutput:
    words = templates["consistency"]
    questions, shares = [], []
    for item, prompt in enumerate(inputs.prompts):
        found = shape or grid_shape(prompt)
        cells = [] if found is None else [pixels_of(cell) for cell in split_grid(inputs.images[item][None], *found)[0]]
        respects = _respects(inputs.metadata[item], criteria)
        if "{criterion}" not in words.user + (words.system or ""):
            respects = [("", 1.0)]
        pairs = [(cells[i], cells[j]) for i, j in cell_pairs(len(cells))]
        questions.append([_ask(words, pair, prompt, criterion) for criterion, _ in respects for pair in pairs])
        shares.append([share for _, share in respects])
    values, errors = [], []
    for answers, counts in zip(ask_items(chat, questions), shares, strict=True):
        scores, error = _agreed(answers)
        # Questions of one criterion stand side by side, one a pair.
        means = None if error else np.mean(np.reshape(scores, (len(counts), -1)), axis=1)
        values.append(None if means is None else float(np.dot(means, counts)))
        errors.append(error)
    return output_of(values, inputs, errors=errors)


def _score_edit(
    inputs: RewardInputs, *, chat: Chat, templates: Mapping[str, Template], criteria: Sequence[str]
) -> RewardOutput:
    questions: list[list[Question]] = []
    shares: list[list[float]] = []
    for item, prompt in enumerate(inputs.prompts):
        source, respects = source_of(inputs, item), _respects(inputs.metadata[item], criteria)
        questions.append([])
        shares.append([share for _, share in respects])
        if source is None:
            continue
        pair = [source, pixels_of(inputs.images[item])]
        questions[-1] = [_ask(templates["edit_following"], pair, prompt)]
        questions[-1] += [_ask(templates["consistency_edit"], pair, prompt, criterion) for criterion, _ in respects]
    values: list[float | None] = []
    parts: dict[str, list[float]] = {"consistency": [], "following": []}
    errors = []
    for answers, counts in zip(ask_items(chat, questions), shares, strict=True):
        scores, error = _agreed(answers)
        following, consistency = (scores[0], float(np.dot(scores[1:], counts))) if error is None else (math.nan,) * 2
        parts["consistency"].append(consistency)
        parts["following"].append(following)
        values.append(None if error else math.sqrt(consistency * following))
        errors.append(error)
    return output_of(values, inputs, parts=parts, errors=errors)
