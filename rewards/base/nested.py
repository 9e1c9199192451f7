"""A reward within a reward: the option `reward` names a built-in one, and `options` are that one's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import Model, Reward, RewardOptions, models_of, reward_options
from flowrl.rewards.base.prompt_needs import lack_of
from flowrl.rewards.base.text_limits import TextLimit, limit_of

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
