"""A run's list of rewards: what an entry may say, read and checked before anything loads.

An entry of `rewards:` is a `RewardConfig`, or a mapping that becomes one:

    {name: geneval, weight: 1.0, options: {credit: graded}}
    {file: my/rewards.py, function: sharpness, weight: 0.2, options: {radius: 3}}
    {name: safety, weight: 0, gate: -0.5}
    {name: pick_score, schedule: [[0, 0], [50, 1]], clip: [0.5, 1.0]}
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowrl.config.options import build_options
from flowrl.config.rewards import RewardConfig, check_weights
from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import Model, Reward, RewardOptions, SharesPart, models_of, reward_options
from flowrl.rewards.base.frames import framewise
from flowrl.rewards.base.prompt_needs import lack_of
from flowrl.rewards.base.text_limits import TextLimit, limit_of
from flowrl.rewards.base.user_file import user_file_options

_KINDS = ("pointwise", "remote")
_OTHERS = ("adversarial", "rank", "tournament", "votes", "win_rate")
"""Kinds that are refused before weights load; the built reward tells its kind."""


class InnerOptions:
    """What rewards that change the values of another reward have in common; each states its fields itself."""

    __slots__ = ()
    reward: str
    options: Mapping[str, Any] | None

    @property
    def models(self) -> tuple[Model, ...] | None:
        return models_of(nested_options(self.reward, self.options))

    def lacks(self, prompt: Prompt) -> str | None:
        """What the inner reward needs."""
        return lack_of(nested_options(self.reward, self.options), prompt)

    @property
    def text_limit(self) -> TextLimit | None:
        """What the inner reward reads."""
        return limit_of(nested_options(self.reward, self.options))


def nested_options(reward: str, options: Mapping[str, Any] | None) -> RewardOptions:
    """The inner reward's checked options. Loads no weights. Raises ValueError: what was given and what is allowed."""
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"options must be a mapping of the options of {reward!r}, or null, got {options!r}.")
    if reward in _OTHERS:
        raise ValueError(_refusal(reward))
    return reward_options(reward, options or {})


def build_nested(reward: str, options: Mapping[str, Any] | None, *, device: torch.device, owner: str) -> Reward:
    """Makes the inner reward, which must judge every item by itself."""
    inner = nested_options(reward, options).build(device)
    if inner.kind not in _KINDS:
        raise ValueError(f"{owner}: {_refusal(reward)}")
    return inner


def _refusal(reward: str) -> str:
    return f"reward {reward!r} does not judge an item by itself: take one of kind {' or '.join(_KINDS)}."


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedReward:
    """An entry and the checked options of its reward."""

    entry: RewardConfig
    options: RewardOptions

    def build(self, device: torch.device, parts: dict[Hashable, Any]) -> Reward:
        """Makes the reward; loads its weights, if any, on `device`. `parts` collects what the run's rewards share."""
        if isinstance(self.options, SharesPart):
            key = type(self.options), self.options.shared
            if key not in parts:
                parts[key] = self.options.load(device)
            reward = self.options.on(parts[key])
        else:
            reward = self.options.build(device)
        return reward if self.entry.frames is None else framewise(reward, self.entry.frames)


Spec = RewardConfig | CheckedReward | Mapping[str, Any]


def parse_reward_specs(specs: Sequence[Spec]) -> list[RewardConfig]:
    """Reads the whole list; the options of each reward are not looked at. Raises ValueError: it is not a list, or
    empty, or an entry has something that no entry may have."""
    if isinstance(specs, (str, Mapping)) or not isinstance(specs, Sequence) or not specs:
        raise ValueError(f"rewards must be a list with at least one entry such as {{name: geneval}}, got {specs!r}.")
    entries = []
    for spec in specs:
        entry = spec.entry if isinstance(spec, CheckedReward) else spec
        if not isinstance(entry, RewardConfig):
            if not isinstance(entry, Mapping):
                raise ValueError(f"a reward must be a mapping such as {{name: geneval, weight: 1.0}}, got {entry!r}.")
            entry = build_options(RewardConfig, entry, owner=f"reward {entry.get('name') or entry.get('function')!r}")
        entries.append(entry)
    return entries


def validate_reward_specs(specs: Sequence[Spec]) -> list[CheckedReward]:
    """Checks all of a run's rewards that needs no weights, before a model loads: names, options with types and values,
    and that a user's file can be imported (which runs its top level) and has the function."""
    entries = parse_reward_specs(specs)
    check_weights([entry.weight for entry in entries])
    return [
        spec if isinstance(spec, CheckedReward) else check_reward(entry)
        for spec, entry in zip(specs, entries, strict=True)
    ]


def check_reward(entry: RewardConfig) -> CheckedReward:
    """One entry with its checked options; see `validate_reward_specs`."""
    if entry.file is not None and entry.function is not None:
        options: RewardOptions = user_file_options(entry.file, entry.function, entry.options)
    else:
        assert entry.name is not None
        options = reward_options(entry.name, entry.options)
    return CheckedReward(entry=entry, options=options)
