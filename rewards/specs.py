"""A run's list of rewards: what an entry may say, read and checked before anything loads.

A reward spec is a mapping, one entry of `rewards:` in a configuration:

    {name: geneval, weight: 1.0, options: {credit: graded}}
    {file: my/rewards.py, function: sharpness, weight: 0.2, options: {radius: 3}}
    {name: safety, weight: 0, gate: -0.5}
    {name: pick_score, schedule: [[0, 0], [50, 1]], clip: [0.5, 1.0]}

`options` are the reward's own. `weight` defaults to 1; weight 0 computes and logs a reward and leaves it out of the
sum. `schedule` multiplies the weight, linearly between the iterations named. `clip` bounds the values, null for open.
An image whose value lies below `gate` gets the lowest total of its group. `frames` says how a reward of images judges
videos (`flowrl.rewards.frames`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.config.options import unknown_name
from flowrl.rewards import REWARDS, check_reward
from flowrl.rewards.user_file import check_user_file


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSpec:
    """One checked entry: either a built-in `name`, or `file` and `function`; see the module for the rest."""

    name: str | None
    file: str | None
    function: str | None
    weight: float
    schedule: tuple[tuple[int, float], ...] = ()
    clip: tuple[float, float] = (-math.inf, math.inf)
    gate: float | None = None
    frames: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What messages call it."""
        return str(self.name or self.function)


def parse_reward_spec(spec: Mapping[str, Any]) -> RewardSpec:
    """Reads one spec and checks its own keys, not yet the options.

    Raises:
        ValueError: if neither or both forms are given, a key is unknown or has the wrong type, a number is not finite.
    """
    if not isinstance(spec, Mapping):
        raise ValueError(f"a reward must be a mapping such as {{name: geneval, weight: 1.0}}, got {spec!r}.")
    given = dict(spec)
    name, file, function = given.pop("name", None), given.pop("file", None), given.pop("function", None)
    if (name is None) == (file is None and function is None) or (file is None) != (function is None):
        raise ValueError(
            f"a reward needs either name, or file and function, got {dict(spec)!r}: names are "
            f"{', '.join(sorted(REWARDS))}."
        )
    for key, value in (("name", name), ("file", file), ("function", function)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"a reward's {key} must be text, got {value!r} in {dict(spec)!r}.")
    label = f"reward {name or function!r}"
    weight, options = given.pop("weight", 1.0), given.pop("options", None) or {}
    schedule, clip, gate = given.pop("schedule", None) or (), given.pop("clip", None), given.pop("gate", None)
    frames = given.pop("frames", None)
    for key in given:
        what = unknown_name("key", key, ("weight", "schedule", "clip", "gate", "frames", "options"))
        raise ValueError(f"{label}: {what} Settings of the reward itself go under options.")
    if not _is_number(weight):
        raise ValueError(f"the weight of {label} must be a finite number, got {weight!r}.")
    if gate is not None and not _is_number(gate):
        raise ValueError(f"the gate of {label} must be a finite number or null, got {gate!r}.")
    if schedule and weight == 0:
        raise ValueError(
            f"the schedule of {label} multiplies its weight, which is 0: give it a weight, or no schedule."
        )
    bounds = _bounds(clip, label)
    if gate is not None and not bounds[0] < gate <= bounds[1]:
        raise ValueError(
            f"{label}: with clip {clip!r} no value, or every one, lies below the gate {gate:g}: move one of them."
        )
    if not isinstance(options, Mapping):
        raise ValueError(f"the options of {label} must be a mapping, got {options!r}.")
    return RewardSpec(
        name=name, file=file, function=function, weight=float(weight), schedule=_schedule(schedule, label),
        clip=bounds, gate=None if gate is None else float(gate), frames=frames, options=dict(options),
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _schedule(points: Any, label: str) -> tuple[tuple[int, float], ...]:
    try:
        given = [(iteration, factor) for iteration, factor in points]
    except (TypeError, ValueError):
        given = [(-1, 0.0)]
    iterations = [iteration for iteration, _ in given]
    whole = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in iterations)
    if not (whole and iterations == sorted(set(iterations)) and all(_is_number(factor) for _, factor in given)):
        raise ValueError(
            f"the schedule of {label} is a list of [iteration, factor] with rising iterations, such as "
            f"[[0, 0], [50, 1]], got {points!r}."
        )
    return tuple((iteration, float(factor)) for iteration, factor in given)


def _bounds(clip: Any, label: str) -> tuple[float, float]:
    if clip is None:
        return (-math.inf, math.inf)
    ends = list(clip) if isinstance(clip, Sequence) and not isinstance(clip, str) else []
    if len(ends) != 2 or not all(end is None or _is_number(end) for end in ends):
        raise ValueError(f"the clip of {label} is [lowest, highest], null for open, got {clip!r}.")
    low, high = -math.inf if ends[0] is None else ends[0], math.inf if ends[1] is None else ends[1]
    if low >= high:
        raise ValueError(f"the clip of {label} needs lowest < highest, got {clip!r}.")
    return (float(low), float(high))


def validate_reward_specs(specs: Sequence[Mapping[str, Any]]) -> None:
    """Checks everything about a run's rewards that needs no weights, so that a run can stop before a model loads.

    Names, options with their types and values, that a user's file can be imported and has the function. It runs the
    top level of a user's file.

    Raises:
        ValueError: saying which entry, what was given, what is allowed.
    """
    check_weights([parsed.weight for parsed in parse_reward_specs(specs)])
    for parsed in parse_reward_specs(specs):
        if parsed.frames is not None:
            from flowrl.rewards.frames import check_frames

            check_frames(parsed.frames, owner=f"reward {parsed.label!r}")
        if parsed.file is not None and parsed.function is not None:
            check_user_file(parsed.file, parsed.function, parsed.options)
        elif parsed.name is not None:
            check_reward(parsed.name, parsed.options)


def parse_reward_specs(specs: Sequence[Mapping[str, Any]]) -> list[RewardSpec]:
    """Reads the whole list.

    Raises:
        ValueError: as `parse_reward_spec`, or it is no list, or empty.
    """
    if isinstance(specs, (str, Mapping)) or not isinstance(specs, Sequence) or not specs:
        raise ValueError(f"rewards must be a list with at least one entry such as {{name: geneval}}, got {specs!r}.")
    return [parse_reward_spec(spec) for spec in specs]


def check_weights(weights: Sequence[float]) -> None:
    """Refuses a list of rewards none of which is trained on."""
    if not any(weights):
        raise ValueError("every reward has weight 0, so nothing would be trained: give at least one another weight.")
