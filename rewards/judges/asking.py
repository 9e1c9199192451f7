"""Rewards made of judges: what they have in common, from an item's images to a list of its answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from flowrl.randomness import counter_seed
from flowrl.rewards import FunctionReward, RewardInputs, RewardOutput, to_uint8
from flowrl.rewards.judges.chat import Answer, Chat, Pixels, Question

MISSING = "missing_field"
UNPARSED = "unparsed"
"""Why an item failed: it lacks a field; the judge answered, but not what was asked for."""

BLANK: Pixels = np.zeros((1, 1, 3), dtype=np.uint8)
"""Stands for an image where it is checked whether a template has a place for each."""


def judged_reward(
    name: str, score: Callable[[RewardInputs], RewardOutput], *, judge: Mapping[str, Any], needs: set[str], version: str
) -> FunctionReward:
    """A reward made of a judge's answers; one that asks a server runs beside the next rollout."""
    remote = "server" in judge
    return FunctionReward(
        name=name,
        score=score,
        needs=frozenset({"images", "prompts"} | needs),
        version=version,
        kind="remote" if remote else "pointwise",
        waits=remote,
    )


def ask_items(chat: Chat, questions: Sequence[Sequence[Question]]) -> list[list[Answer]]:
    """Asks all questions of all items at once; returns each item's answers in their order."""
    flat = [question for item in questions for question in item]
    answers = chat.ask(flat) if flat else []
    if len(answers) != len(flat):
        raise ValueError(f"the judge was asked {len(flat)} questions and gave {len(answers)} answers: it must match.")
    rest = iter(answers)
    return [[next(rest) for _ in item] for item in questions]


def first_error(answers: Sequence[Answer]) -> str | None:
    """Why the first failed answer failed, None if all are there."""
    return next((answer.error for answer in answers if answer.error is not None), None)


def pixels_of(image: Tensor) -> Pixels:
    """One float image [3, H, W] as 8-bit [H, W, 3]."""
    pixels: Pixels = to_uint8(image[None])[0]
    return pixels


def source_of(inputs: RewardInputs, item: int) -> Pixels | None:
    """The image that an editing instruction is about, None where the item has none; of several the first."""
    sources = inputs.source_images[item] if inputs.source_images is not None else []
    return pixels_of(sources[0]) if sources else None


def draw_seed(name: str, inputs: RewardInputs, item: int, draw: int = 0) -> int:
    """A seed for a sampled answer that goes by the sample alone, in any batch. 31 bits fit every server."""
    return counter_seed(name, inputs.iteration, int(inputs.sample_ids[item]), draw) % 2**31


def number_list(text: str, count: int, low: float, high: float) -> list[float] | None:
    """The ratings of an answer such as `{"reasoning": "...", "score": [20, 18]}`, cut to low .. high.

    JSON first, whose key is score or scores; else the last list of numbers in brackets, as some judges write no JSON.

    Returns:
        `count` numbers, or None where there is no such list.
    """
    found: Any = None
    start, end = text.find("{"), text.rfind("}")
    if 0 <= start < end:
        try:
            record = json.loads(text[start : end + 1])
            found = record.get("score", record.get("scores")) if isinstance(record, dict) else None
        except ValueError:
            found = None
    if not isinstance(found, list):
        lists = re.findall(r"\[\s*(-?\d+(?:\.\d+)?(?:\s*,\s*-?\d+(?:\.\d+)?)*)\s*\]", text)
        found = [float(number) for number in lists[-1].split(",")] if lists else []
    numbers = [float(n) for n in found if isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n)]
    if len(numbers) != count or len(found) != count:
        return None
    return [min(max(number, low), high) for number in numbers]


def weighted_mean(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """`sum w_k x_k / sum w_k` over the names in `scores`."""
    total = sum(weights[name] for name in scores)
    return sum(weights[name] * score for name, score in scores.items()) / total


def check_weights(weights: Any, names: Sequence[str], *, owner: str) -> dict[str, float]:
    """The option `weights` with 0 for what it leaves out; None gives 1 to all.

    Raises:
        ValueError: for another name, a negative or infinite weight, or none above 0.
    """
    if weights is None:
        return dict.fromkeys(names, 1.0)
    good = isinstance(weights, Mapping) and all(
        name in names and isinstance(w, int | float) and not isinstance(w, bool) and math.isfinite(w) and w >= 0
        for name, w in weights.items()
    )
    if not good or not any(weights.values()):
        raise ValueError(
            f"{owner}: weights must be a mapping of {', '.join(names)} to numbers of at least 0, one above 0, got "
            f"{weights!r}."
        )
    return {name: float(weights.get(name, 0.0)) for name in names}


def check_answer_options(max_tokens: int | None, temperature: float | None, *, owner: str) -> None:
    """Refuses lengths and temperatures that no judge takes; None is the style's own."""
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"{owner}: max_tokens must be at least 1, got {max_tokens}.")
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"{owner}: temperature must be at least 0 (greedy), got {temperature}.")
