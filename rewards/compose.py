"""Several rewards as one: reading a run's list of rewards, and their weighted sum.

A reward spec is a mapping, one entry of `rewards:` in a configuration:

    {name: geneval, weight: 1.0, credit: graded}
    {file: my/rewards.py, function: sharpness, weight: 0.2, radius: 3}

`weight` defaults to 1; every other key is an option of that reward. Weight 0 computes and logs a reward and leaves it
out of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowrl.rewards import KINDS, REWARDS, Reward, RewardInputs, RewardOutput, build_reward, check_reward
from flowrl.rewards.outputs import check_output
from flowrl.rewards.user_file import check_user_file, user_file_reward

__all__ = [
    "RewardSpec",
    "WeightedSum",
    "build_weighted_sum",
    "check_output",
    "parse_reward_spec",
    "validate_reward_specs",
    "weighted_sum",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSpec:
    """One checked entry: either a built-in `name`, or `file` and `function`."""

    name: str | None
    file: str | None
    function: str | None
    weight: float
    options: dict[str, Any]


def parse_reward_spec(spec: Mapping[str, Any]) -> RewardSpec:
    """Reads one spec and checks its own keys, not yet the options.

    Raises:
        ValueError: if neither or both forms are given, a key has the wrong type, or the weight is not finite.
    """
    if not isinstance(spec, Mapping):
        raise ValueError(f"a reward must be a mapping such as {{name: geneval, weight: 1.0}}, got {spec!r}.")
    options = dict(spec)
    name, file, function = options.pop("name", None), options.pop("file", None), options.pop("function", None)
    if (name is None) == (file is None and function is None) or (file is None) != (function is None):
        raise ValueError(
            f"a reward needs either name, or file and function, got {dict(spec)!r}: names are "
            f"{', '.join(sorted(REWARDS))}."
        )
    for key, value in (("name", name), ("file", file), ("function", function)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"a reward's {key} must be text, got {value!r} in {dict(spec)!r}.")
    weight = options.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ValueError(f"the weight of reward {name or function!r} must be a finite number, got {weight!r}.")
    return RewardSpec(name=name, file=file, function=function, weight=float(weight), options=options)


def validate_reward_specs(specs: Sequence[Mapping[str, Any]]) -> None:
    """Checks everything about a run's rewards that needs no weights, so that a run can stop before a model loads.

    Names, options with their types and values, that a user's file can be imported and has the function. It runs the
    top level of a user's file.

    Raises:
        ValueError: saying which entry, what was given, what is allowed.
    """
    _check_weights([parsed.weight for parsed in _parse_all(specs)])
    for parsed in _parse_all(specs):
        if parsed.file is not None and parsed.function is not None:
            check_user_file(parsed.file, parsed.function, parsed.options)
        elif parsed.name is not None:
            check_reward(parsed.name, parsed.options)


def _parse_all(specs: Sequence[Mapping[str, Any]]) -> list[RewardSpec]:
    if isinstance(specs, (str, Mapping)) or not isinstance(specs, Sequence) or not specs:
        raise ValueError(f"rewards must be a list with at least one entry such as {{name: geneval}}, got {specs!r}.")
    return [parse_reward_spec(spec) for spec in specs]


def _check_weights(weights: Sequence[float]) -> None:
    if not any(weights):
        raise ValueError("every reward has weight 0, so nothing would be trained: give at least one another weight.")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedSum:
    """A `Reward`: `sum_k weight_k r_k`, with every reward and its sub-scores as parts.

    Parts are `reward/<key>` and `reward/<key>/<part>`; `keys` are the rewards' names, the second of a name with `_2`.
    An item that is invalid in any reward of nonzero weight is invalid, with value NaN. Weights are not normalised.
    """

    rewards: tuple[Reward, ...]
    weights: tuple[float, ...]
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        return "+".join(self.keys)

    @property
    def kind(self) -> str:
        """The most demanding kind of its members, in the order of `KINDS`."""
        return max((reward.kind for reward in self.rewards), key=KINDS.index)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(reward.needs for reward in self.rewards))

    @property
    def differentiable(self) -> bool:
        """Whether the whole sum carries gradient: every member of nonzero weight must."""
        return all(reward.differentiable for reward, weight in self._members() if weight)

    @property
    def version(self) -> str:
        return " + ".join(f"{weight:g} * {reward.version}" for reward, weight in self._members())

    def _members(self) -> list[tuple[Reward, float]]:
        return list(zip(self.rewards, self.weights, strict=True))

    def __call__(self, inputs: RewardInputs) -> RewardOutput:
        device = inputs.images.device
        total = torch.zeros(len(inputs), dtype=torch.float32, device=device)
        valid = torch.ones(len(inputs), dtype=torch.bool, device=device)
        parts = {}
        for key, (reward, weight) in zip(self.keys, self._members(), strict=True):
            output = check_output(reward(inputs), len(inputs), key)
            values = output.values.to(device)
            if weight:  # 0 * NaN is NaN, and a reward that is only watched must not spoil the sum
                valid = valid & output.valid.to(device)
                total = total + weight * values
            parts[f"reward/{key}"] = values
            parts |= {f"reward/{key}/{part}": numbers.to(device) for part, numbers in output.parts.items()}
        return RewardOutput(values=total, valid=valid, parts=parts)


def weighted_sum(rewards: Sequence[Reward], weights: Sequence[float]) -> WeightedSum:
    """Sums rewards that are at hand; a name that occurs again gets the key `<name>_2`, `<name>_3`, ….

    Raises:
        ValueError: if the lengths differ, there are none, a weight is not finite, or all are 0, or a kind is unknown.
    """
    if not rewards or len(rewards) != len(weights):
        raise ValueError(f"each reward needs one weight, got {len(rewards)} rewards and {len(weights)} weights.")
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights must be finite, got {list(weights)}.")
    _check_weights(weights)
    taken = {reward.name for reward in rewards}
    keys: list[str] = []
    for reward in rewards:
        if reward.kind not in KINDS:
            raise ValueError(f"reward {reward.name!r}: kind must be one of {', '.join(KINDS)}, got {reward.kind!r}.")
        key, number = reward.name, 1
        while key in keys or (number > 1 and key in taken):  # `a_2` may also be some reward's own name
            number += 1
            key = f"{reward.name}_{number}"
        keys.append(key)
    return WeightedSum(rewards=tuple(rewards), weights=tuple(float(w) for w in weights), keys=tuple(keys))


def build_weighted_sum(specs: Sequence[Mapping[str, Any]], *, device: torch.device | str = "cpu") -> WeightedSum:
    """Checks all specs, then makes the rewards, loading their weights on `device`, and sums them."""
    validate_reward_specs(specs)
    rewards: list[Reward] = []
    parsed_specs = _parse_all(specs)
    for parsed in parsed_specs:
        if parsed.file is not None and parsed.function is not None:
            reward = user_file_reward(parsed.file, parsed.function, device=device, options=parsed.options)
        else:
            assert parsed.name is not None
            reward = build_reward(parsed.name, device=device, options=parsed.options)
        rewards.append(reward)
    return weighted_sum(rewards, [parsed.weight for parsed in parsed_specs])
