"""Value-anchored credit: discounted rewards of clean estimates, and an absolute term beside the relative one (VGPO)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.credit.values import ALONE, Context, norm_by_step, one_channel, steps_of, values_of
from flowrl.runtime.shapes import Float
from flowrl.trajectory import Credit, Sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Vgpo:
    """VGPO: discounted reward of all that follows a step, relative to the group and, early on, in itself.

    A reconstruction of VGPO (arXiv 2512.12387) from its description: neither its final formula (eq. 13) nor code was
    available, nor the values of gamma and k. Step j is paid `R_j`, the reward of the one-step clean estimate of the
    state that it produced. Then, with means over the n stochastic steps of the sample and z over the samples of the
    same prompt and step,

        Q_j = sum_{l >= j} gamma^(l-j) R_l        omega_j = Q_j / mean_j Q        A_j = omega_j (z(Q_j) + k_j Q_j)

    with k_j = k on the first steps and 0 on the others. Where all samples of a group are equal, `omega k Q` is left.
    A is not invariant to scale or offset of the reward, and with rewards above 0 the absolute term pushes every sample
    up. R_j is value j + 1 of the sample: sample the values with mode "clean" and let the stochastic steps be
    contiguous; otherwise ODE steps taken after j count to it too.
    """

    gamma: float = 0.9
    """Discount per step, in [0, 1]. The default is a choice of ours."""
    anchor: float = 1.0
    """k, not negative; 0 leaves out the absolute term."""
    anchored_steps: int | None = None
    """Number of first steps with the absolute term; null takes half of them, rounded up (the paper 5 of 10)."""

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and self.anchor >= 0 and (self.anchored_steps or 0) >= 0):
            raise ValueError(
                f"gamma lies in [0, 1], anchor and anchored_steps are not negative, got {self.gamma}, {self.anchor} "
                f"and {self.anchored_steps}"
            )

    def __call__(self, sampled: Sampled, reward_KF: Float[Tensor, " 1 F"], context: Context = ALONE) -> Credit:
        """Credit of trajectories with values on the way.

        A reward that failed is NaN and leaves out its whole sample, for omega needs all of a sample's rewards. Raises
        ValueError: several channels; a negative reward; fewer steps than `anchored_steps`; or as `values_of`.
        """
        one_channel(reward_KF, "vgpo")
        count = steps_of(sampled).shape[1]
        anchored = (count + 1) // 2 if self.anchored_steps is None else self.anchored_steps
        if anchored > count:
            raise ValueError(f"anchored_steps lies in 0 .. {count}, the stochastic steps, got {anchored}")
        reward = values_of(sampled, reward_KF)[0, :, 1:].double()
        valid = ~reward.isnan().any(1, keepdim=True)
        if bool((reward < 0).any()):
            raise ValueError(
                f"vgpo weighs steps by their share of a sample's rewards, which takes rewards that are not negative; "
                f"the smallest here is {float(reward.nan_to_num(nan=torch.inf).min()):g}: add a constant to the "
                "reward, or map it to [0, 1], before it is passed"
            )
        action_value = reward.clone()
        for k in range(count - 2, -1, -1):
            action_value[:, k] += self.gamma * action_value[:, k + 1]
        mean = action_value.mean(1, keepdim=True)
        scale = torch.where(mean > 0, action_value / mean, 1.0)  # all rewards 0: the limit of equal ones
        offset = self.anchor * action_value * (torch.arange(count, device=reward.device) < anchored)

        def column(values: Tensor, without: float) -> Tensor:
            # A sample that lacks a reward has no credit; scale and offset stay finite, so that 0 times them is 0.
            return torch.where(valid, values, without).flatten().to(reward_KF.dtype)

        return Credit(
            raw=column(action_value, torch.nan)[None],
            norm=norm_by_step(sampled),
            scale=column(scale, 1.0),
            offset=column(offset, 0.0),
        )
