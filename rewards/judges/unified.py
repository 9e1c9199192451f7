"""Images rated by a judge that writes down its score: UnifiedReward, aesthetic judges, RationalRewards, edit ratings.

    style           asked for                                      one reward             published use
    final_score     "Final Score: X", X in 1 .. 5                  X / 5                  flow_grpo
    dimensions      alignment, coherence, style, each 1 .. 5       weighted mean, raw     Pref-GRPO, verl-omni, UniRL
    aesthetic       <Score>X</Score>, a whole number 1 .. 5        X / 5                  flow_grpo with Qwen2.5-VL
    rational        a score 1 .. 4 for each aspect, or N/A         (mean - 1) / 3         RationalRewards-8B-T2I
    rational_edit   the same, of an edited image                   (mean - 1) / 3         RationalRewards-8B-Edit
    edit            quality and instruction, two of 0 .. 25 each   weighted mean, raw     Pref-GRPO, UnifiedReward-Edit

UnifiedReward (arXiv 2503.05236): checkpoints CodeGoat24/UnifiedReward-* on the hub, TIGER-Lab/RationalRewards-8B-*.
The shipped templates are our own words. Scores of a published checkpoint need its published template: CodeGoat24/
Pref-GRPO and CodeGoat24/UnifiedReward for the former, X-GenGroup/Flow-Factory for RationalRewards, yifan123/flow_grpo
for the aesthetic judge; see `flowrl.rewards.judges.templates`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from flowrl.rewards import Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.frames import frame_places
from flowrl.rewards.judges.answers import parse_score
from flowrl.rewards.judges.asking import (
    BLANK,
    MISSING,
    UNPARSED,
    ask_items,
    check_answer_options,
    check_weights,
    draw_seed,
    first_error,
    judged_reward,
    number_list,
    pixels_of,
    source_of,
    weighted_mean,
)
from flowrl.rewards.judges.chat import Chat, Pixels, Question, build_chat, check_chat
from flowrl.rewards.judges.templates import Template, digest_of, load_templates

Style = Literal["final_score", "dimensions", "aesthetic", "rational", "rational_edit", "edit"]
Scale = Literal["raw", "divided", "unit"]
OWNER = "reward 'unified_reward'"
RATING = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ask:
    """A style: its templates, the range of its scores, how it is usually scaled, and how long its answers are."""

    templates: tuple[str, ...]
    low: float
    high: float
    scale: Scale
    max_tokens: int
    temperature: float = 0.0
    dimensions: tuple[str, ...] = ()
    edits: bool = False


STYLES: dict[str, _Ask] = {
    "final_score": _Ask(templates=("final_score",), low=1, high=5, scale="divided", max_tokens=4096),
    "dimensions": _Ask(
        templates=("dimensions",), low=1, high=5, scale="raw", max_tokens=4096,
        dimensions=("alignment", "coherence", "style"),
    ),
    "aesthetic": _Ask(templates=("aesthetic",), low=1, high=5, scale="divided", max_tokens=2048),
    "rational": _Ask(templates=("rational",), low=1, high=4, scale="unit", max_tokens=2048, temperature=0.1),
    "rational_edit": _Ask(
        templates=("rational_edit",), low=1, high=4, scale="unit", max_tokens=2048, temperature=0.1, edits=True
    ),
    "edit": _Ask(
        templates=("edit_quality", "edit_instruction"), low=0, high=25, scale="raw", max_tokens=4096,
        dimensions=("quality", "instruction"), edits=True,
    ),
}  # fmt: skip


def check(
    *,
    judge: Mapping[str, Any],
    style: Style = "dimensions",
    scale: Scale | None = None,
    weights: Mapping[str, float] | None = None,
    num_frames: int = 1,
    template: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
) -> None:
    """Refuses option values that are wrong, without asking the judge."""
    ask = STYLES[style]
    if weights is not None and not ask.dimensions:
        raise ValueError(f"{OWNER}: style {style!r} has one score, so weights mean nothing: leave them out.")
    check_weights(weights, ask.dimensions, owner=OWNER)
    if num_frames < 1 or (num_frames > 1 and ask.edits):
        raise ValueError(
            f"{OWNER}: num_frames must be at least 1, and 1 for style {style!r} if it judges edits, got {num_frames}."
        )
    check_answer_options(max_tokens, temperature, owner=OWNER)
    for name, words in load_templates(ask.templates, template, owner=OWNER).items():
        words.parts([BLANK] * _num_images(name, num_frames), prompt="")
    check_chat(judge, owner=OWNER)


def unified_reward(
    *,
    device: torch.device,
    judge: Mapping[str, Any],
    style: Style = "dimensions",
    scale: Scale | None = None,
    weights: Mapping[str, float] | None = None,
    num_frames: int = 1,
    template: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
) -> Reward:
    """A judge's written rating of each image, or of each edit of a source image.

    An answer without the score that was asked for is a failed item ("unparsed"), as is an edit without a source image
    ("missing_field"). A number outside the scale is cut to its end. Sub-scores are unscaled.

    Args:
        device: where a judge in this process runs.
        judge: which one, see `flowrl.rewards.judges.chat`.
        style: what is asked for, see the module.
        scale: `raw`; `divided`, by the top of the scale; `unit`, (x - low) / (high - low). Null is the style's own.
        weights: of the dimensions, only for `dimensions` (alignment, coherence, style) and `edit` (quality,
            instruction); null weighs all alike. What has weight 0 need not be answered, and in `edit` is not asked.
            For dimensions whose advantages are combined rather than their scores, name the reward once for each.
        num_frames: frames of a video shown in one question, evenly spaced; 1 shows `images`.
        template: a text file, or for `edit` a folder with edit_quality.txt and edit_instruction.txt.
        max_tokens: length of an answer; null is the style's own.
        temperature: 0 is greedy; null is the style's own. A sampled answer is seeded by iteration and sample.

    Raises:
        ValueError: for bad values, or a judge or template that is not there.
    """
    check(
        judge=judge, style=style, scale=scale, weights=weights, num_frames=num_frames, template=template,
        max_tokens=max_tokens, temperature=temperature,
    )  # fmt: skip
    ask = STYLES[style]
    own = check_weights(weights, ask.dimensions, owner=OWNER)
    templates = load_templates(ask.templates, template, owner=OWNER)
    if style == "edit":
        templates = {name: words for name, words in templates.items() if own[name.removeprefix("edit_")] > 0}
    chat = build_chat(judge, device=device, owner=OWNER)
    settings = {
        "max_tokens": max_tokens or ask.max_tokens,
        "temperature": ask.temperature if temperature is None else temperature,
    }
    listed = ",".join(f"{name}-{weight:g}" for name, weight in own.items())
    return judged_reward(
        "unified_reward",
        partial(
            _score, chat=chat, style=style, scale=scale or ask.scale, weights=own, num_frames=num_frames,
            templates=templates, settings=settings,
        ),
        judge=judge,
        needs=({"source_images"} if ask.edits else set()) | ({"videos"} if num_frames > 1 else set()),
        version=f"unified_reward:{style}:{scale or ask.scale}:{listed}:frames-{num_frames}:"
        f"max_tokens-{settings['max_tokens']}:temperature-{settings['temperature']:g}:"
        f"template-{digest_of(templates)}:{chat.version}",
    )  # fmt: skip


def read_ratings(style: Style, texts: Mapping[str, str], weights: Mapping[str, float]) -> dict[str, float] | None:
    """The ratings in a judge's answers, unscaled, by name; None where one that counts is not there.

    Args:
        style: what was asked for.
        texts: the answers by template.
        weights: of the dimensions; one of weight 0 is not read.
    """
    ask = STYLES[style]
    ratings: dict[str, float | None] = {}
    if style == "edit":
        for name, text in texts.items():
            pair = number_list(text, 2, ask.low, ask.high)
            ratings[name.removeprefix("edit_")] = None if pair is None else math.fsum(pair) / 2
    elif style in ("rational", "rational_edit"):
        ratings = {"mean": _mean_aspect(texts[style])}
    else:
        patterns = {
            # "Alignment Score (1-5): 4" and "Alignment: 4", with the colon of either width and bold marks around.
            name: rf"(?m)^\W*{name}\W{{0,4}}(?:score)?\W{{0,4}}(?:\(1\s*-\s*5\))?\W{{0,4}}[:\uff1a]\W{{0,4}}?{RATING}"
            for name in ask.dimensions
            if weights[name] > 0
        }
        if style == "final_score":
            patterns = {"score": rf"final score\W{{0,4}}[:\uff1a]\W{{0,4}}?{RATING}"}
        if style == "aesthetic":
            patterns = {"score": r"<score>\s*(\d+)\s*</score>"}
        text = texts[style]
        ratings = {
            name: parse_score(text, pattern=pattern, low=ask.low, high=ask.high) for name, pattern in patterns.items()
        }
    found = {name: rating for name, rating in ratings.items() if rating is not None}
    return found if found and len(found) == len(ratings) else None


def scaled(rating: float, *, low: float, high: float, scale: Scale) -> float:
    """A rating on low .. high as it is, divided by `high`, or moved to 0 .. 1."""
    if scale == "unit":
        return (rating - low) / (high - low)
    return rating / high if scale == "divided" else rating


def _mean_aspect(text: str) -> float | None:
    """The mean of the aspects' scores before the summary, each cut to 1 .. 4; those that say N/A do not count."""
    body = re.split(r"(?im)^\W*summary\b", text)[0]
    scores = [float(number) for number in re.findall(rf"(?im)^\W*score\W{{0,4}}[:\uff1a]\W{{0,4}}?{RATING}", body)]
    return math.fsum(min(max(score, 1.0), 4.0) for score in scores) / len(scores) if scores else None


def _num_images(template: str, num_frames: int) -> int:
    return 2 if template in ("edit_instruction", "rational_edit") else num_frames


def _score(
    inputs: RewardInputs,
    *,
    chat: Chat,
    style: Style,
    scale: Scale,
    weights: Mapping[str, float],
    num_frames: int,
    templates: Mapping[str, Template],
    settings: Mapping[str, Any],
) -> RewardOutput:
    ask = STYLES[style]
    questions: list[list[Question]] = []
    for item, prompt in enumerate(inputs.prompts):
        source = source_of(inputs, item) if ask.edits else None
        if ask.edits and source is None:
            questions.append([])
            continue
        shown = _shown(inputs, item, num_frames)
        both = shown if source is None else [source, *shown]
        questions.append([
            Question(
                parts=words.parts(shown if name == "edit_quality" else both, prompt=prompt),
                system=words.system_of(prompt=prompt),
                seed=draw_seed(style, inputs, item) if settings["temperature"] > 0 else None,
                **settings,
            )
            for name, words in templates.items()
        ])  # fmt: skip
    values: list[float | None] = []
    errors: list[str | None] = []
    rows: list[dict[str, float]] = []
    for answers in ask_items(chat, questions):
        error = first_error(answers) if answers else MISSING
        texts = {name: answer.text for name, answer in zip(templates, answers, strict=False)}
        ratings = read_ratings(style, texts, weights) if error is None else None
        errors.append(UNPARSED if error is None and ratings is None else error)
        rows.append(ratings or {})
        mean = None if ratings is None else weighted_mean(ratings, weights) if ask.dimensions else sum(ratings.values())
        values.append(None if mean is None else scaled(mean, low=ask.low, high=ask.high, scale=scale))
    names = [name for name in ask.dimensions if weights[name] > 0]
    return output_of(
        values, inputs, parts={name: [row.get(name, math.nan) for row in rows] for name in names}, errors=errors
    )


def _shown(inputs: RewardInputs, item: int, num_frames: int) -> list[Pixels]:
    """The image of an item, or frames of its video."""
    if num_frames == 1:
        return [pixels_of(inputs.images[item])]
    if inputs.videos is None:
        raise ValueError(f"{OWNER}: num_frames is {num_frames}, but images are made, not videos: leave it out.")
    places = frame_places(inputs.videos.shape[1], policy="uniform", count=num_frames)
    return list(to_uint8(inputs.videos[item, places]))
