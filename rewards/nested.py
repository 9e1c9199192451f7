"""A reward within a reward: the option `reward` names a built-in one, and `options` are that one's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flowrl.rewards import Reward, build_reward, check_reward

_KINDS = ("pointwise", "remote")
_OTHERS = ("adversarial", "rank", "tournament", "win_rate")  # refused before weights load; what is built tells its kind


def check_nested(reward: str, options: Mapping[str, Any] | None, *, owner: str) -> None:
    """Checks name and options of the inner reward. Loads no weights.

    Raises:
        ValueError: naming the owner, what was given and what is allowed.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"{owner}: options must be a mapping of the options of {reward!r}, or null, got {options!r}.")
    if reward in _OTHERS:
        raise ValueError(_refusal(reward, owner))
    try:
        check_reward(reward, options or {})
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from error


def build_nested(reward: str, options: Mapping[str, Any] | None, *, device: torch.device, owner: str) -> Reward:
    """Makes the inner reward, which must judge every item by itself.

    Raises:
        ValueError: as `check_nested`, or its kind is another.
    """
    check_nested(reward, options, owner=owner)
    inner = build_reward(reward, device=device, options=options)
    if inner.kind not in _KINDS:
        raise ValueError(_refusal(reward, owner))
    return inner


def _refusal(reward: str, owner: str) -> str:
    return f"{owner}: reward {reward!r} does not judge an item by itself: take one of kind {' or '.join(_KINDS)}."
