"""Stepwise credit: gains of all steps compared with each other (Stepwise-Flow-GRPO, CVPR 2026)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from flowrl.credit.context import ALONE, Context
from flowrl.credit.values import gains_of, norm_by_group
from flowrl.trajectory import Credit, Sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepwise:
    """Gain of every step, `V_{k+1} - V_k`, compared with the gains of all steps under the same prompt.

    One mean and one std over all gains of a prompt. Early gains are larger; dividing each step by its own std, as
    `DenseGrpo` does, lifts the noise of late steps to the same size, and was reported to converge more slowly. The
    paper completes with 5 Euler steps of equal size.
    """

    def __call__(self, sampled: Sampled, reward_KF: Float[Tensor, " K F"], context: Context = ALONE) -> Credit:
        """Credit of b trajectories with values on the way; rewards are NaN where one failed.

        Raises:
            ValueError: as `values_of`.
        """
        return Credit(raw=gains_of(sampled, reward_KF).flatten(1), norm=norm_by_group(sampled))
