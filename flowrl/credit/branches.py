"""Credit of branches: a branch's reward against its siblings' (TempFlow-GRPO, G2RPO) or the ODE's image's (Self-OPD).

Letters: K rewards, L strides, M transitions, F = M * L finished latents ordered (transition, stride), T steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.credit.values import ALONE, Context, check_rewards, norm_by_step, norm_within
from flowrl.runtime.shapes import Float
from flowrl.trajectory import Credit, Sampled


def _rewards_by_branch(sampled: Sampled, reward_KF: Tensor) -> Float[Tensor, " K M L"]:
    """Rewards by branch and stride, without those of finished anchors, checked to belong to branches."""
    check_rewards(sampled, reward_KF)
    after = sampled.finished_after[sampled.finished_after >= 0]
    row, count = torch.arange(len(sampled), device=after.device), len(after)
    strides = count // max(len(sampled), 1)
    if strides < 1 or not torch.equal(after, row.repeat_interleave(strides)):
        raise ValueError(
            "credit of branches needs the same number of finished latents after every transition, in their order, as "
            f"sample_branches leaves them; got {count} after {len(sampled)} transitions"
        )
    return reward_KF[:, -count:].reshape(len(reward_KF), len(sampled), strides)


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
        weight, step_std = None, context.step_std
        if self.noise_weights:  # std of each transition's step over the mean of the steps that occur
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
            weight = (std / std[steps].mean())[sampled.step].to(sampled.log_prob.dtype)
        # An anchor's state at a step is one latent of the pool, so its index stands for (start noise, step).
        within = sampled.source if self.seed_groups else sampled.step
        return Credit(raw=reward_KML[:, :, 0], norm=norm_within(sampled, within), weight=weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfOpd:
    """Credit of Self-OPD (arXiv 2608.26872): how much better a branch ends than the ODE's image of its start noise.

    Of the K branches of an anchor state, with the kernel's mean there and `d_k = x_k - mean`:

        A_k = (R_k - R_ode) / max(std_k R_k, 1e-4),    w_k = A_k,  or  A_k (1 - cos(d_k, d_best)) / 2  where A_k < 0

    with the sample std, and w_k clamped to +-1: a bad branch that points the way of the best one hardly counts. Its
    loss, `mean_k w_k mean (mean - x_k)^2 / (2 std^2)`, has the gradient of objective reinforce with the advantages w_k.
    """

    def __call__(self, sampled: Sampled, reward_KF: Float[Tensor, " K F"], context: Context = ALONE) -> Credit:
        """Credit of branches and finished anchors (`sample_branches`): raw [1, M] of 0, NaN at states with an image
        without reward, and w_k as offset. Raises ValueError: not a table of those, with means and one reward."""
        anchors, width = int((sampled.finished_after < 0).sum()), len(sampled) // max(len(sampled.source.unique()), 1)
        reward_KML = _rewards_by_branch(sampled, reward_KF)
        if sampled.mean is None or reward_KML.shape[::2] != (1, 1) or anchors < 1 or width < 2:
            raise ValueError(
                f"self_opd compares at least 2 branches of a state, with means and one reward, with finished anchors; "
                f"got {width} branches, {anchors} anchors and rewards [K, M, L] {list(reward_KML.shape)}"
            )
        reward = reward_KML[0, :, 0].double().view(-1, anchors, width)  # by (step, anchor, branch)
        moved = (sampled.states[sampled.produced] - sampled.mean).flatten(1).double().view(*reward.shape, -1)
        best = reward.nan_to_num(-torch.inf).argmax(-1)[..., None, None].expand(-1, -1, 1, moved.shape[-1])
        along = torch.cosine_similarity(moved, moved.gather(2, best), dim=-1)
        gain = (reward - reward_KF[0, :anchors].double()[:, None]) / reward.std(-1, keepdim=True).clamp(min=1e-4)
        weight = torch.where(gain < 0, gain * (1 - along) / 2, gain).clamp(-1, 1).flatten()
        raw = torch.where(weight.isnan(), torch.nan, 0.0)[None]
        return Credit(raw=raw, norm=norm_within(sampled, sampled.source), offset=weight)
