"""The rewards of a configuration: their names, weights, and how their values are combined."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from flowrl.config.source_syntax import PACKAGE
from flowrl.config.strict_yaml import ConfigError, read_mapping

FramePolicy = Literal["first", "uniform", "every", "all"]
_HEAVIEST = 1e9
_VALUED = ("name", "file", "function", "frames")
"""Keys that, beside label and options, decide what values a reward gives."""
FrameReducer = Literal["mean", "min", "top_frac", "positive_mean"]


@cache
def built_in_rewards() -> dict[str, dict[str, str]]:
    """Name of a built-in reward -> `place`, "module:Class" of its options, and what a published one `reproduces`."""
    rows: dict[str, dict[str, str]] = read_mapping(PACKAGE / "rewards" / "built_in.yaml")
    return {name: row | {"place": f"flowrl.rewards.{row['place']}"} for name, row in rows.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Frames:
    """How a reward of images judges videos: which of their n frames it sees, and how their values become one."""

    policy: FramePolicy = "all"
    """`first`; `uniform`, `count` frames spread evenly from the first to the last; `every`, the first and then every
    `count`-th; `all`."""
    count: int | None = None
    """See `policy`; only for `uniform` and `every`, which need it."""
    reducer: FrameReducer = "mean"
    """`mean`; `min`; `top_frac`, the mean of the best `max(1, floor(fraction n))` frames; `positive_mean`, the mean
    over the frames above 0, or 0 if there are none."""
    fraction: float | None = None
    """Share of the frames in (0, 1]; only for `top_frac`, which needs it."""
    frames_per_call: int = 64
    """Frames that the reward gets at a time, rounded to whole videos, at least one."""

    def __post_init__(self) -> None:
        counted = self.policy in ("uniform", "every")
        if counted != (self.count is not None):
            needed = "must be given" if counted else "means nothing"
            raise ValueError(f"count {needed} with policy {self.policy!r}, got {self.count!r}.")
        if (self.reducer == "top_frac") != (self.fraction is not None):
            needed = "must be given" if self.reducer == "top_frac" else "means nothing"
            raise ValueError(f"fraction {needed} with reducer {self.reducer!r}, got {self.fraction!r}.")
        if self.count is not None and self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}.")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {self.fraction}.")
        if self.frames_per_call < 1:
            raise ValueError(f"frames_per_call must be at least 1, got {self.frames_per_call}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """One reward: a built-in by ``name``, or a ``function`` in your own Python ``file``."""

    name: str | None = None
    """Name of a built-in reward."""
    file: str | None = None
    """Path of a Python file; it may have any name."""
    function: str | None = None
    """Function in that file."""
    label: str | None = None
    """Its name in logs, tables and charts; null takes `name` or `function`. Set it if two rewards have one name."""
    weight: float = 1.0
    """Factor in the total; a negative weight turns the reward into a penalty, 0 logs it without training on it."""
    schedule: tuple[tuple[int, float], ...] = ()
    """Factors of the weight over the run, [[iteration, factor], ...]: linear between the points, constant outside."""
    clip: tuple[float | None, float | None] | None = None
    """Lowest and highest value, null for no limit; applied before the weight."""
    gate: float | None = None
    """An image whose value is below this gets the lowest total of its group; weight 0 makes the reward a gate only."""
    routes: tuple[str, ...] = ()
    """Parts of a state that it speaks of: video, sound (ltx2), left, right (other families); none for all of them."""
    frames: Frames | None = None
    """How a reward of images judges videos: {policy: uniform, count: 4, reducer: mean}."""
    options: dict[str, Any] = field(default_factory=dict)
    """The reward's own options."""

    def __post_init__(self) -> None:
        given = {key: value for key in ("name", "file", "function") if (value := getattr(self, key)) is not None}
        if set(given) not in ({"name"}, {"file", "function"}):
            got = ", ".join(f"{key}: {value}" for key, value in given.items()) or "none of them"
            raise ConfigError(f"a reward has either name (a built-in) or both file and function (your own), got {got}")
        for key, value in given.items():
            if not value.strip():
                raise ConfigError(f"{key} is empty text; give it a value")
        if self.label is not None and re.fullmatch(r"[A-Za-z0-9][\w.-]{0,39}", self.label) is None:
            raise ConfigError(
                f"the label of a reward is at most 40 letters, digits, dots, dashes and underscores, got {self.label!r}"
            )
        self._check_schedule()
        low, high = self.bounds
        if low >= high:
            raise ConfigError(f"the clip of {self.called} needs lowest < highest, got {list(self.clip or ())}")
        if self.gate is not None and not low < self.gate <= high:
            raise ConfigError(
                f"{self.called}: with clip {list(self.clip or ())} no value, or every one, lies below the gate "
                f"{self.gate:g}: move one of them"
            )

    def _check_schedule(self) -> None:
        factors = [self.weight, *(factor for _, factor in self.schedule)]
        if max(map(abs, factors)) > _HEAVIEST:
            raise ConfigError(f"the weight of {self.called} and its factors are at most {_HEAVIEST:g}, got {factors}")
        iterations = [iteration for iteration, _ in self.schedule]
        if iterations != sorted(set(iterations)) or min(iterations, default=0) < 0:
            raise ConfigError(
                f"the schedule of {self.called} is a list of [iteration, factor] with rising iterations, such as "
                f"[[0, 0], [50, 1]], got {[list(point) for point in self.schedule]}"
            )
        if (self.schedule or self.routes) and self.weight == 0:
            key = "schedule" if self.schedule else "routes"
            raise ConfigError(f"the {key} of {self.called} go with its weight, which is 0: give a weight, or no {key}")

    @property
    def called(self) -> str:
        """Its name in messages and tables."""
        return str(self.label or self.name or self.function)

    @property
    def bounds(self) -> tuple[float, float]:
        """`clip` in numbers; infinite if it is open."""
        low, high = self.clip or (None, None)
        return -math.inf if low is None else low, math.inf if high is None else high

    def weight_at(self, iteration: int) -> float:
        """Weight times the schedule's factor: linear between its points, constant before and after."""
        if not self.schedule:
            return self.weight
        before = [point for point in self.schedule if point[0] <= iteration] or [self.schedule[0]]
        after = [point for point in self.schedule if point[0] > iteration] or [self.schedule[-1]]
        (first, low), (last, high) = before[-1], after[0]
        share = (iteration - first) / (last - first) if last > first else 0.0
        return self.weight * (low + share * (high - low))


def check_weights(weights: Sequence[float]) -> None:
    """Refuses a list of rewards none of which is trained on."""
    if weights and not any(weights):
        raise ConfigError("every weight in rewards is 0, so there is nothing to learn: give one reward a weight")


def check_rewards(rewards: Sequence[RewardConfig], *, needed: bool = True) -> None:
    """Refuses an empty list if one is `needed`, a list without any weight, and duplicate rewards or labels."""
    if needed and not rewards:
        raise ConfigError(
            "rewards is empty: list at least one, for instance '- name: NAME' or '- {file: my.py, function: NAME}'"
        )
    check_weights([reward.weight for reward in rewards])
    for index, reward in enumerate(rewards):
        for earlier, other in enumerate(rewards[:index]):
            if reward.label is not None and reward.label == other.label:
                raise ConfigError(
                    f"rewards.{earlier} and rewards.{index} have the same label '{reward.label}': change one"
                )
            if dataclasses.replace(other, weight=reward.weight, label=reward.label) == reward:
                raise ConfigError(
                    f"rewards.{index} and rewards.{earlier} are the same reward, "
                    f"'{reward.called}', with the same options: remove one and add up the weights"
                )


def unique_keys(names: Sequence[str]) -> list[str]:
    """Labels or names of rewards as the log calls them; a repeated one becomes `<name>_2`, `<name>_3`, …."""
    keys: list[str] = []
    for name in names:
        key, number = name, 1
        while key in keys or (number > 1 and key in names):  # `a_2` may also be some reward's own name
            number += 1
            key = f"{name}_{number}"
        keys.append(key)
    return keys


def each_once(entries: Sequence[RewardConfig]) -> list[RewardConfig]:
    """Rewards without those that give the values of an earlier one, and differ in its part of the sum alone."""
    values = [(one.called, one.options, [getattr(one, key) for key in _VALUED]) for one in entries]
    return [one for k, one in enumerate(entries) if values[k] not in values[:k]]


def told_apart(config: Mapping[str, Any]) -> dict[str, str]:
    """Keys of a configuration's rewards in evaluations -> how readers see them: with the first option that namesakes
    have otherwise, such as `geneval_2 (credit: official)`."""
    told, facts = dict[str, str](), list[tuple[Any, Mapping[str, Any], list[Any]]]()
    with suppress(AttributeError, TypeError):  # of a configuration that somebody has edited
        for one in (*(config.get("rewards") or ()), *((config.get("eval") or {}).get("rewards") or ())):
            called = next(filter(None, map(one.get, ("label", "name", "function"))), None)
            fact = called, {**(one.get("options") or {})}, [one.get(key) for key in _VALUED]
            facts += [fact] if fact not in facts else []
    for key, (name, options, _) in zip(unique_keys([str(fact[0]) for fact in facts]), facts, strict=True):
        same = [other for called, other, _ in facts if called == name]
        own = (word for word, value in options.items() if any(one.get(word) != value for one in same))
        told[key] = next((f"{key} ({word}: {options[word]})" for word in own), key)
    return told
