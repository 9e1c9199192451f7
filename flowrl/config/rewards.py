"""The rewards of a configuration: what is scored, with which weight, and how values come together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.config.strict_yaml import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """One reward: a built-in by ``name``, or a ``function`` of a Python ``file`` of yours."""

    name: str | None = None
    """Name of a built-in reward."""
    file: str | None = None
    """Path of a Python file; it may have any name."""
    function: str | None = None
    """Function of that file."""
    weight: float = 1.0
    """Factor in the total; negative turns a penalty round, 0 logs without training on it."""
    schedule: tuple[tuple[int, float], ...] = ()
    """Factors of the weight over the run, [[iteration, factor], ...]: linear between the points, constant outside."""
    clip: tuple[float | None, float | None] | None = None
    """Lowest and highest value, null for open; applied before the weight."""
    gate: float | None = None
    """An image whose value is below this gets the lowest total of its group; weight 0 makes the reward a gate only."""
    frames: dict[str, Any] | None = None
    """How a reward of images judges videos: {policy: uniform, count: 4, reducer: mean}."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward."""

    def __post_init__(self) -> None:
        given = {key: value for key in ("name", "file", "function") if (value := getattr(self, key)) is not None}
        if set(given) not in ({"name"}, {"file", "function"}):
            got = ", ".join(f"{key}: {value}" for key, value in given.items()) or "none of them"
            raise ConfigError(f"a reward has either name (a built-in) or both file and function (your own), got {got}")
        for key, value in given.items():
            if not value.strip():
                raise ConfigError(f"{key} is empty text; give it a value")


def check_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Refuses an empty list, one without any weight, and one reward listed twice."""
    if not rewards:
        raise ConfigError(
            "rewards is empty: list at least one, for instance '- name: NAME' or '- {file: my.py, function: NAME}'"
        )
    if not any(reward.weight for reward in rewards):
        raise ConfigError("every weight in rewards is 0, so there is nothing to learn: give one reward a weight")
    for index, reward in enumerate(rewards):
        for earlier, other in enumerate(rewards[:index]):
            if dataclasses.replace(other, weight=reward.weight) == reward:
                raise ConfigError(
                    f"rewards.{index} and rewards.{earlier} are the same reward, "
                    f"'{reward.name or reward.function}', with the same options: remove one and add up the weights"
                )
