"""Rewards made of judges: what they have in common, from an item's images to the score read from its answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from flowrl.rewards.base import FunctionReward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.base.frames import frame_places
from flowrl.rewards.judges.answers import yes_no
from flowrl.rewards.judges.chat import Answer, Chat, Pixels, Question, build_chat, is_server
from flowrl.runtime.randomness import counter_seed

MISSING = "missing_field"
UNPARSED = "unparsed"
"""Why an item failed: it lacks a field; the judge answered, but not what was asked for."""


class NoScore(Exception):
    """An item has no score; the text is the short word for why. `judge_items` catches it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedItem:
    """What became of an item: its value, or the short word for why it has none, and its sub-scores."""

    value: float | None = None
    error: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


def judged_reward(
    name: str,
    score: Callable[..., RewardOutput],
    *,
    judge: Mapping[str, Any],
    device: torch.device,
    needs: set[str],
    version: str,
) -> FunctionReward:
    """A reward made of the answers of a judge, which `score` is given as `chat` and which is loaded if it runs here.
    One that asks a server runs beside the next rollout. `needs` is besides images and prompts, `version` besides the
    reward's name and the judge's version."""
    chat, remote = build_chat(judge, device=device), is_server(judge)
    return FunctionReward(
        name=name,
        score=partial(score, chat=chat),
        needs=frozenset({"images", "prompts"} | needs),
        version=f"{name}:{version}:{chat.version}",
        kind="remote" if remote else "pointwise",
        waits=remote,
    )


def judge_items(
    inputs: RewardInputs,
    chat: Chat,
    ask: Callable[[int], list[Question]],
    read: Callable[[int, list[Answer]], JudgedItem],
    *,
    parts: Sequence[str] = (),
) -> RewardOutput:
    """Asks all questions about all items at once, and scores every item by its answers. Both may raise `NoScore`.

    Args:
        ask: the questions about the item at a place.
        read: what the answers to them, in their order, are worth.
        parts: names of the sub-scores; NaN where an item has none.
    """
    asked: dict[int, list[Question]] = {}
    rows: list[JudgedItem] = []
    for item in range(len(inputs)):
        try:
            asked[item] = ask(item)
            rows.append(JudgedItem())
        except NoScore as error:
            rows.append(JudgedItem(error=str(error)))
    answers = iter(ask_all(chat, [question for questions in asked.values() for question in questions]))
    for item, questions in asked.items():
        try:
            rows[item] = read(item, [next(answers) for _ in questions])
        except NoScore as error:
            rows[item] = JudgedItem(error=str(error))
    return output_of(
        [row.value for row in rows],
        inputs,
        {name: [row.parts.get(name, math.nan) for row in rows] for name in parts},
        [row.error for row in rows],
    )


def ask_all(chat: Chat, questions: Sequence[Question]) -> list[Answer]:
    """The answers to some questions; no judge is called for none. Raises ValueError: another number of answers."""
    answers = chat.ask(questions) if questions else []
    if len(answers) != len(questions):
        raise ValueError(
            f"the judge was asked {len(questions)} questions and gave {len(answers)} answers: it must match."
        )
    return answers


def first_error(answers: Sequence[Answer]) -> str | None:
    """Why the first failed answer failed, None if all are there."""
    return next((answer.error for answer in answers if answer.error is not None), None)


def all_of(answers: Sequence[Answer], scores: Sequence[float | None]) -> list[float]:
    """The scores that some answers were read as; raises `NoScore` where one has none."""
    found = [score for score in scores if score is not None]
    if (error := first_error(answers)) or len(found) < len(scores):
        raise NoScore(error or UNPARSED)
    return found


def probability_of_yes(answer: Answer) -> float | None:
    """P(yes) at the first answered token, None where the judge failed or said neither yes nor no."""
    return yes_no(answer.logprobs[0]) if answer.error is None and answer.logprobs else None


def pixels_of(image: Tensor) -> Pixels:
    """One float image [3, H, W] as 8-bit [H, W, 3]."""
    pixels: Pixels = to_uint8(image[None])[0]
    return pixels


def shown_of(inputs: RewardInputs, item: int, num_frames: int | None = None) -> list[Pixels]:
    """The image of an item, or so many frames of its video, spread evenly."""
    if num_frames is None:
        return [pixels_of(inputs.images[item])]
    if inputs.videos is None:
        raise ValueError(
            f"a judge is to see {num_frames} frames, but images are made, not videos: leave the option out."
        )
    return list(to_uint8(inputs.videos[item, frame_places(inputs.videos.shape[1], policy="uniform", count=num_frames)]))


def source_of(inputs: RewardInputs, item: int) -> Pixels:
    """The image that an editing instruction is about, of several the first; raises `NoScore` where there is none."""
    if not inputs.source_images or not inputs.source_images[item]:
        raise NoScore(MISSING)
    return pixels_of(inputs.source_images[item][0])


def draw_seed(name: str, inputs: RewardInputs, item: int, temperature: float, draw: int = 0) -> int | None:
    """A seed for a sampled answer that goes by the sample alone, in any batch; None for a greedy one."""
    if temperature <= 0:
        return None
    return counter_seed(name, inputs.iteration, int(inputs.sample_ids[item]), draw) % 2**31  # 31 bits fit every server


def number_list(
    text: str, count: int, low: float = -math.inf, high: float = math.inf, *, brackets: bool = True
) -> list[float] | None:
    """The `count` ratings of an answer such as `{"reasoning": "...", "score": [20, 18]}`, cut to low .. high; None
    where there is no such list. They stand under score or scores in the last JSON object that has one; else, with
    `brackets`, in the last list of numbers in brackets, as some judges write no JSON."""
    record = json_record(text, "score", "scores")
    given = record.get("score", record.get("scores"))
    found = given if isinstance(given, list) else None
    if found is None and not brackets:
        return None
    if found is None:
        lists = re.findall(r"\[\s*(-?\d+(?:\.\d+)?(?:\s*,\s*-?\d+(?:\.\d+)?)*)\s*\]", text)
        found = [float(number) for number in lists[-1].split(",")] if lists else []
    numbers = [float(n) for n in found if isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < 1e308]
    if len(numbers) != count or len(found) != count:
        return None
    return [min(max(number, low), high) for number in numbers]


def json_record(text: str, *lists: str) -> dict[str, Any]:
    """The widest JSON object in an answer, else the last without another in it; empty where there is none. One that has
    no list under the first of the names `lists` that it holds is passed over."""
    whole = text[text.find("{") : text.rfind("}") + 1]
    for piece in (whole, *reversed(re.findall(r"\{[^{}]*\}", text))):
        try:
            record = json.loads(piece)
        except ValueError:
            continue
        named = next((name for name in lists if isinstance(record, dict) and name in record), None)
        if isinstance(record, dict) and (not lists or (named and isinstance(record[named], list))):
            return record
    return {}


def geometric_mean(values: Sequence[float]) -> float:
    """`(prod_i x_i)^(1/n)` of one value or more; any 0 gives 0."""
    return math.exp(fmean(math.log(value) for value in values)) if min(values) > 0 else 0.0


def weighted_mean(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """`sum w_k x_k / sum w_k` over the names in `scores`."""
    total = sum(weights[name] for name in scores)
    return sum(weights[name] * score for name, score in scores.items()) / total


def weighted_geometric_mean(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """`prod_k x_k^(w_k / sum w)` over the names in `scores`; any 0 gives 0."""
    if min(scores.values()) <= 0:
        return 0.0
    return math.exp(weighted_mean({name: math.log(score) for name, score in scores.items()}, weights))


def full_weights(weights: Mapping[str, Any] | None, names: Sequence[str]) -> dict[str, float]:
    """The option `weights` with 0 for what it leaves out; None gives 1 to all. Raises ValueError: for another name, a
    negative or infinite weight, or none above 0."""
    if weights is None:
        return dict.fromkeys(names, 1.0)
    good = all(
        name in names and isinstance(w, int | float) and not isinstance(w, bool) and math.isfinite(w) and w >= 0
        for name, w in weights.items()
    )
    if not good or not any(weights.values()):
        raise ValueError(
            f"weights must be a mapping of {', '.join(names)} to numbers of at least 0, one above 0, got {weights!r}."
        )
    return {name: float(weights.get(name, 0.0)) for name in names}


def check_answer_options(max_tokens: int | None, temperature: float | None) -> None:
    """Refuses lengths and temperatures that no judge takes; None is the style's own."""
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
    if temperature is not None and not temperature >= 0:
        raise ValueError(f"temperature must be at least 0 (greedy), got {temperature}.")
