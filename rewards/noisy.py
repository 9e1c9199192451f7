"""A reward with noise on it: how much of what a method learns survives a judge that errs?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flowrl.config.sections import at_least, share
from flowrl.rewards.base import Reward, RewardInputs, RewardOutput, changed
from flowrl.rewards.base.specs import InnerOptions, build_nested, nested_options
from flowrl.runtime.randomness import counter_integers, counter_normal

_MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Noisy(InnerOptions):
    """`r + bias + s z`, z standard normal and s the `std`, of outliers more; new for every (seed, iteration, group, i),
    the same if asked again. Failed items stay failed. The part `clean` is r."""

    reward: str
    """A built-in reward of kind pointwise or remote."""
    options: Mapping[str, Any] | None = None
    """Its options."""
    std: float = 0.1
    """Standard deviation of the noise."""
    outliers: float = 0.0
    """Share of scores with `outlier_scale` times as much noise, like a judge that fails now and then."""
    outlier_scale: float = 20.0
    """How much wider."""
    bias: float = 0.0
    """Added to every value."""
    seed: int = 0
    """Seed of the noise."""

    def __post_init__(self) -> None:
        at_least(0, self, "std")
        share("outliers", self.outliers)
        at_least(1, self, "outlier_scale")
        nested_options(self.reward, self.options)

    def build(self, device: torch.device) -> Reward:
        """Makes the inner reward and puts noise on it."""
        inner = build_nested(self.reward, self.options, device=device, owner="reward 'noisy'")

        def score(inputs: RewardInputs) -> RewardOutput:
            output = inner(inputs)
            noise = []
            for group, i in zip(inputs.group_ids.tolist(), inputs.sample_ids.tolist(), strict=True):
                key = (inputs.iteration, group, i)
                wild = counter_integers(0, _MILLION, self.seed, "reward-outlier", *key) < self.outliers * _MILLION
                width = self.std * self.outlier_scale if wild else self.std
                noise.append(width * counter_normal((1,), self.seed, "reward-noise", *key))
            values = output.values + (self.bias + torch.cat(noise)).to(output.values.device)
            return RewardOutput(
                values=values, valid=output.valid, parts={**output.parts, "clean": output.values}, errors=output.errors
            )

        return changed(
            inner,
            score,
            name="noisy",
            needs=inner.needs | {"group_ids", "sample_ids"},
            version=f"noisy:std-{self.std:g}:outliers-{self.outliers:g}x{self.outlier_scale:g}:bias-{self.bias:g}:"
            f"seed-{self.seed}:{inner.version}",
        )
