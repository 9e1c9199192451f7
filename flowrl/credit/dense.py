"""Outcome credit, the reward of the finished image (Flow-GRPO), and dense credit: the gain of each step (DenseGRPO,
arXiv 2601.20218; Stepwise-Flow-GRPO), and noise calibrated by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.credit.values import ALONE, Context, final_rewards, gains_of, norm_by_step, values_of
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseGrpo:
    """DenseGRPO (arXiv 2601.20218): gain of a step, `V_{k+1} - V_k`, compared with the same step's for the same prompt.

    V_k is the reward of the ODE completion after k stochastic steps; a sample's gains add up to `V_n - V_0`. In the
    paper one Euler step per completion ("clean") was worse than outcome credit, and all remaining steps ("full") best.
    """

    difference: bool = True
    """False takes `V_{k+1}` itself, the paper's weaker variant."""

    def __call__(self, sampled: Sampled, reward_KF: Float[Tensor, " K F"], context: Context = ALONE) -> Credit:
        """Credit of b trajectories with values on the way; rewards are NaN where one failed. Raises as `values_of`."""
        raw = gains_of(sampled, reward_KF) if self.difference else values_of(sampled, reward_KF)[..., 1:]
        return Credit(raw=raw.flatten(1), norm=norm_by_step(sampled))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepwise:
    """Stepwise-Flow-GRPO (CVPR 2026): gain of a step, compared with the gains of all steps for the same prompt.

    One mean and one std over all gains of a prompt. Early gains are larger; dividing each step by its own std, as
    `DenseGrpo` does, lifts the noise of late steps to the same size, and was reported to converge more slowly. The
    paper completes with 5 Euler steps of equal size.
    """

    def __call__(self, sampled: Sampled, reward_KF: Float[Tensor, " K F"], context: Context = ALONE) -> Credit:
        """Credit of b trajectories with values on the way; rewards are NaN where one failed. Raises as `values_of`."""
        return Credit(raw=gains_of(sampled, reward_KF).flatten(1), norm=sampled.group.long())


def calibrate_noise(
    psi: Float[Tensor, " T"], gains_NT: Float[Tensor, " N T"], eps1: float = 2, eps2: float = 0.01
) -> Float[Tensor, " T"]:
    """One round of exploration calibration: a table of noise levels, moved by how often each step gained.

    Noise is right where a step helps about as often as it harms: `psi_j` rises by eps2 where
    `|#(gain_j > 0) - #(gain_j < 0)| < eps1` and falls by eps2 elsewhere (DenseGRPO). Sample with the
    current table, call, repeat; then freeze the table and train. The paper gives neither the number of samples, nor
    the first table, nor when to stop. With an even number of samples and no gain of 0 the published eps1 = 2 asks for
    an exact tie, because the two counts then differ by an even number.

    Args:
        psi: [T] noise level of each step, positive.
        gains_NT: [N, T] gains of N samples sampled with psi; NaN where a value failed, which counts on neither side.

    Returns [T] the next table. A level stays where no sample had a valid gain, and where it would fall to 0 or below.
    """
    if psi.ndim != 1 or gains_NT.ndim != 2 or gains_NT.shape[1] != len(psi):
        raise ValueError(
            f"psi is [T] and the gains are [N, T] of the same T, got {tuple(psi.shape)} and {tuple(gains_NT.shape)}"
        )
    if not (bool((psi > 0).all()) and eps1 > 0 and eps2 > 0):
        raise ValueError(
            f"noise levels, eps1 and eps2 must be positive, got {psi.tolist()}, {eps1}, {eps2}: a step of level 0 has "
            "no density, run it as an ODE step"
        )
    excess = (gains_NT > 0).sum(0) - (gains_NT < 0).sum(0)
    moved = psi.double() + eps2 * (2 * (excess.abs() < eps1).double() - 1)
    stays = (moved <= 0) | gains_NT.isnan().all(0)
    return torch.where(stays, psi.double(), moved).to(psi.dtype)
