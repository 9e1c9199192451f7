"""Credit of branches: the reward of a branch's image, compared with its siblings' (TempFlow-GRPO, G2RPO).

Letters: K rewards, L strides, M transitions, F = M * L finished latents ordered (transition, stride), T steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.credit.context import ALONE, Context
from flowrl.credit.values import check_rewards, norm_by_step, norm_within
from flowrl.runtime.shapes import Float
from flowrl.trajectory import Credit, Sampled


def _rewards_by_branch(sampled: Sampled, reward_KF: Tensor) -> Float[Tensor, " K M L"]:
    """Rewards by branch and stride, checked to belong to branches."""
    count = len(sampled.finished)
    check_rewards(sampled, reward_KF)
    row = torch.arange(len(sampled), device=sampled.finished_after.device)
    strides = count // max(len(sampled), 1)
    if strides < 1 or not torch.equal(sampled.finished_after, row.repeat_interleave(strides)):
        raise ValueError(
            "credit of branches needs the same number of finished latents after every transition, in their order, as "
            f"sample_branches leaves them; got {count} after {len(sampled)} transitions"
        )
    return reward_KF.reshape(len(reward_KF), len(sampled), strides)


@dataclass(frozen=True, kw_only=True, slots=True)
class G2rpo:
    """Credit of G2RPO (Granular-GRPO, arXiv 2510.01982): every stride of the completion is a channel of its own.

    `raw[k * L + l]` is reward k of the completion with stride l, to be normalised per prompt and step. The paper then
    normalises each channel with the sample std (correction 1, eps 1e-8), sums the channels without averaging, so that
    advantages grow with K * L, and clips the sum to +-5.
    """

    def __call__(self, sampled: Sampled, reward_KF: Float[Tensor, " K F"], context: Context = ALONE) -> Credit:
        """Credit of branches (`sample_branches`): raw [K * L, M], norm by (group, step). Raises ValueError: the table
        is not one of branches, or the rewards do not fit it."""
        reward_KML = _rewards_by_branch(sampled, reward_KF)
        return Credit(raw=reward_KML.permute(0, 2, 1).flatten(0, 1), norm=norm_by_step(sampled))


@dataclass(frozen=True, kw_only=True, slots=True)
class TempFlow:
    """Credit of TempFlow-GRPO (arXiv 2508.04324): branches of one anchor state compete, noisy steps weigh more.

    The paper normalises with the population std (correction 0, eps 1e-4) and clips to +-5. The objective of step j is
    multiplied by `std_j / mean_j std_j`; without it the gradient of late steps, whose std is small, dominates.
    """

    seed_groups: bool = True
    """Normalise per prompt, start noise and step, as the paper's last component; else per prompt and step. The branches
    of one anchor must lie on one process, as `sample_branches` leaves them."""
    noise_weights: bool = True
    """Weigh steps by their std."""

    def __call__(self, sampled: Sampled, reward_KF: Float[Tensor, " K F"], context: Context = ALONE) -> Credit:
        """Credit of branches with one completion each: raw [K, M]; norm by (group, anchor state) or (group, step);
        weight with mean 1 over the steps that branch. Raises ValueError: the table is not one of branches or has
        several strides; the rewards do not fit it; `context.step_std` is missing, short, or 0 at one that branches."""
        reward_KML = _rewards_by_branch(sampled, reward_KF)
        if reward_KML.shape[2] != 1:
            raise ValueError(
                f"tempflow completes every branch once, got {reward_KML.shape[2]} strides: use g2rpo for several"
            )
        weight = _noise_weights(sampled, context.step_std) if self.noise_weights else None
        # An anchor's state at a step is one latent of the pool, so its index stands for (start noise, step).
        within = sampled.source if self.seed_groups else sampled.step
        return Credit(raw=reward_KML[:, :, 0], norm=norm_within(sampled, within), weight=weight)


def _noise_weights(sampled: Sampled, step_std: Tensor | None) -> Float[Tensor, " M"]:
    """Std of each transition's step over the mean of the steps that occur."""
    steps = sampled.step.unique()
    if step_std is None or step_std.ndim != 1 or len(step_std) <= int(steps.max()):
        raise ValueError(
            "noise_weights need step_std [T], the std of the kernel at each step, got "
            f"{None if step_std is None else tuple(step_std.shape)}"
        )
    std = step_std.to(device=steps.device, dtype=torch.float64)
    if not bool((std[steps] > 0).all()):
        raise ValueError(
            f"step_std must be positive at the steps {steps.tolist()} that branch, got {step_std.tolist()}"
        )
    return (std / std[steps].mean())[sampled.step].to(sampled.log_prob.dtype)
