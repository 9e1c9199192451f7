"""Outcome credit: the reward of the finished image at every step that led to it (Flow-GRPO)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowrl.credit.context import ALONE, Context
from flowrl.credit.values import final_rewards, norm_by_step
from flowrl.runtime.shapes import Float
from flowrl.trajectory import Credit, Sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Reward of the finished image at each of its steps (Liu et al., Flow-GRPO, arXiv 2505.05470).

    Compared over the samples of a prompt, step by step, which gives every step the statistics of the finished images.
    """

    def __call__(self, sampled: Sampled, reward_KF: Float[Tensor, " K F"], context: Context = ALONE) -> Credit:
        """Credit of b trajectories, with or without values on the way; rewards are NaN where one failed.
        Raises as `final_rewards`."""
        return Credit(raw=final_rewards(sampled, reward_KF)[:, sampled.sample], norm=norm_by_step(sampled))
