"""A reward within a reward: the option `reward` names a built-in one, and `options` are that one's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flowrl.rewards.base import Reward, RewardOptions, reward_options

_KINDS = ("pointwise", "remote")
_OTHERS = ("adversarial", "rank", "tournament", "win_rate")  # refused before weights load; what is built tells its kind


def nested_options(reward: str, options: Mapping[str, Any] | None) -> RewardOptions:
    """The checked options of the inner reward. Loads no weights.

    Raises:
        ValueError: what was given and what is allowed, without the owner.
    """
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
