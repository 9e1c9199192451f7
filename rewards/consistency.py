"""Consistency of pictures that belong together: the cells of a grid, or a picture before and after an edit.

PaCo-RL (arXiv 2512.04784): a judge is shown two pictures and asked whether they are consistent; the score is its
probability of yes at the first answered token, also of a judge that was trained to give reasons after. Checkpoints
X-GenGroup/PaCo-Reward-7B. The shipped templates are our own words; scores of a published checkpoint need its published
template, in the repository X-GenGroup/PaCo-RL; see `flowrl.rewards.judge_templates`.

    mode         compared                              one reward
    grid         all pairs of cells                    mean over pairs, then over criteria
    edit         source and edited picture             sqrt(consistency * following the instruction)
    clip_text    each cell and its own sub-prompt      mean cosine of CLIP's embeddings
    clip_image   all pairs of cells                    mean cosine of CLIP's embeddings
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, Literal

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.asking import BLANK, MISSING, UNPARSED, ask_items, first_error, judged_reward, picture_of, source_of
from flowrl.rewards.chat import Answer, Chat, Picture, Question, build_chat, check_chat
from flowrl.rewards.judge_templates import Template, digest_of, load_templates
from flowrl.rewards.judging import yes_no
from flowrl.rewards.pretrained import check_model, clip_fingerprint, clip_image, clip_text, load_clip

Mode = Literal["grid", "edit", "clip_text", "clip_image"]
OWNER = "reward 'grid_consistency'"
CRITERIA = ("style, logic and identity",)
DEFAULT_MODEL = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
MAX_CELLS = 36  # "1024x1024" in a prompt is a size and no grid
TOP_LOGPROBS = 20


def grid_shape(text: str) -> tuple[int, int] | None:
    """Rows and columns of the first grid that a prompt names ("2x2", "3 x 4", "2\u00d72"), None where it names none.

    One cell has no pairs, and more than `MAX_CELLS` is taken for a picture's size; both are passed over.
    """
    for rows, columns in re.findall(r"(?<![\w.])(\d+)\s?[xX\u00d7\u2a09]\s?(\d+)(?![\w.]*\d)", text):
        if 2 <= int(rows) * int(columns) <= MAX_CELLS:
            return int(rows), int(columns)
    return None


def grid_cells(image: Float[Tensor, " 3 h w"], rows: int, columns: int) -> Float[Tensor, " n 3 cell_h cell_w"]:
    """The cells of a grid, row by row, [rows * columns, 3, floor(H / rows), floor(W / columns)].

    What is left over at the bottom and the right is dropped.

    Raises:
        ValueError: if there are more rows or columns than pixels.
    """
    height, width = image.shape[1] // rows, image.shape[2] // columns
    if not (rows >= 1 and columns >= 1 and height and width):
        raise ValueError(f"a picture of {list(image.shape[1:])} pixels has no {rows}x{columns} cells.")
    cut = image[:, : rows * height, : columns * width]
    cells = cut.reshape(3, rows, height, columns, width).permute(1, 3, 0, 2, 4)
    return cells.reshape(rows * columns, 3, height, width)


def sub_prompts(prompt: str) -> list[str]:
    """The parts of a prompt that describe one cell each, in order: what follows a sentence's end and a label.

    A label is of capitals, digits, dashes and brackets, and ends in a colon: "... 2x2 grid. [LEFT]: a cat. [RIGHT]: a
    dog". What stands before the first label belongs to no cell.
    """
    return [part.strip() for part in re.split(r"[.\"]\s+[A-Z0-9\-\[\]]+:", prompt)[1:]]


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
        words.parts([BLANK, BLANK], prompt="", criterion="")
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
    """Whether pictures that belong together do so; see the module for the modes.

    An item has failed ("missing_field") if its prompt names no grid of two cells or more, if it lacks a source picture
    in `edit`, or if it has not as many sub-prompts as cells in `clip_text`; and if any of its questions failed.

    Args:
        device: where a judge in this process, or CLIP, runs.
        judge: which one, see `flowrl.rewards.chat`; one that gives log-probabilities. Only for `grid` and `edit`.
        mode: `grid`, `edit`, `clip_text` or `clip_image`.
        criteria: in what respects the pictures are compared, each in a question of its own; null for style, logic and
            identity in one. A prompt's metadata may have its own, `criteria`: a text or a list of texts.
        grid: the shape of all grids, such as 2x2; null reads it off each prompt.
        template: a text file that takes the place of consistency.txt; for `edit` a folder with consistency_edit.txt and
            edit_following.txt.
        model: of `clip_text` and `clip_image`: a local folder, or an id on the hub. A prompt's metadata may have
            `sub_prompts`, a list of texts; otherwise they are read off the prompt, see `sub_prompts`.
        revision: branch, tag or commit on the hub.

    Raises:
        ValueError: for bad values, or a judge, template or model that is not there.
    """
    check(judge=judge, mode=mode, criteria=criteria, grid=grid, template=template, model=model, revision=revision)
    shape = None if grid is None else grid_shape(grid)
    if judge is None:
        network, processor = load_clip(model, revision=revision, device=device, owner=OWNER, option="model")
        return FunctionReward(
            name="grid_consistency",
            score=partial(_score_clip, network=network, processor=processor, mode=mode, shape=shape, device=device),
            needs=frozenset({"images", "prompts", "metadata"}),
            version=f"grid_consistency:{mode}:{model}@{clip_fingerprint(network)}:grid-{grid}:float32",
        )
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


def _respects(record: Mapping[str, Any], default: Sequence[str]) -> Sequence[str]:
    """The criteria of one item: those of its record, else the reward's."""
    own = record.get("criteria")
    if own is None:
        return default
    texts = [own] if isinstance(own, str) else own
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{OWNER}: metadata field criteria must be a text or a list of texts, got {own!r}.")
    return texts


def _ask(words: Template, pair: Sequence[Picture], prompt: str, criterion: str = "") -> Question:
    fields = {"prompt": prompt, "criterion": criterion}
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
    questions = []
    for item, prompt in enumerate(inputs.prompts):
        found = shape or grid_shape(prompt)
        cells = [] if found is None else [picture_of(cell) for cell in grid_cells(inputs.images[item], *found)]
        questions.append([
            _ask(templates["consistency"], pair, prompt, criterion)
            for criterion in _respects(inputs.metadata[item], criteria)
            for pair in combinations(cells, 2)
        ])  # fmt: skip
    # Every criterion has the same pairs, so the mean over all is the mean over pairs, then over criteria.
    return _output([_agreed(answers) for answers in ask_items(chat, questions)], inputs)


def _score_edit(
    inputs: RewardInputs, *, chat: Chat, templates: Mapping[str, Template], criteria: Sequence[str]
) -> RewardOutput:
    questions: list[list[Question]] = []
    for item, prompt in enumerate(inputs.prompts):
        source = source_of(inputs, item)
        if source is None:
            questions.append([])
            continue
        pair = [source, picture_of(inputs.images[item])]
        respects = _respects(inputs.metadata[item], criteria)
        questions.append([_ask(templates["edit_following"], pair, prompt)])
        questions[-1] += [_ask(templates["consistency_edit"], pair, prompt, criterion) for criterion in respects]
    values: list[float | None] = []
    parts: dict[str, list[float]] = {"consistency": [], "following": []}
    errors = []
    for answers in ask_items(chat, questions):
        scores, error = _agreed(answers)
        following, *kept = scores if error is None else [math.nan, math.nan]
        consistency = math.fsum(kept) / len(kept)
        parts["consistency"].append(consistency)
        parts["following"].append(following)
        values.append(None if error else math.sqrt(consistency * following))
        errors.append(error)
    return output_of(values, inputs, parts=parts, errors=errors)


def _output(scored: Sequence[tuple[list[float], str | None]], inputs: RewardInputs) -> RewardOutput:
    values = [None if error else math.fsum(scores) / len(scores) for scores, error in scored]
    return output_of(values, inputs, errors=[error for _, error in scored])


def _texts_of(record: Mapping[str, Any], prompt: str) -> Sequence[str]:
    """What the cells of one item show: the texts of its record, else those read off the prompt."""
    own = record.get("sub_prompts")
    if own is None:
        return sub_prompts(prompt)
    if not isinstance(own, list) or not all(isinstance(text, str) for text in own):
        raise ValueError(f"{OWNER}: metadata field sub_prompts must be a list of texts, one a cell, got {own!r}.")
    return own


@torch.no_grad()
def _score_clip(
    inputs: RewardInputs,
    *,
    network: Any,
    processor: Any,
    mode: Mode,
    shape: tuple[int, int] | None,
    device: torch.device,
) -> RewardOutput:
    scored: list[tuple[list[float], str | None]] = []
    for item, prompt in enumerate(inputs.prompts):  # grids of one batch may differ in shape
        found = shape or grid_shape(prompt)
        texts = _texts_of(inputs.metadata[item], prompt)
        if found is None or (mode == "clip_text" and len(texts) != found[0] * found[1]):
            scored.append(([], MISSING))
            continue
        cells = [Image.fromarray(cell) for cell in to_uint8(grid_cells(inputs.images[item], *found))]
        pixels = processor.image_processor(cells, return_tensors="pt").to(device)
        with torch.autocast(device.type, enabled=False):
            image = clip_image(network, pixels["pixel_values"])
            if mode == "clip_text":
                cosines = (image * clip_text(network, processor.tokenizer, list(texts), device)).sum(-1)
            else:
                first, second = torch.triu_indices(len(image), len(image), offset=1)
                cosines = (image[first] * image[second]).sum(-1)
        scored.append((cosines.double().tolist(), None))
    return _output(scored, inputs)
