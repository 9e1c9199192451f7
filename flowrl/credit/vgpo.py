"""Value-anchored credit: discounted rewards of clean estimates, and an absolute term beside the relative one (VGPO)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.credit.values import norm_by_step, one_channel, steps_of, values_of
from flowrl.trajectory import Credit, Sampled


def vgpo(
    sampled: Sampled,
    reward_KF: Float[Tensor, " 1 F"],
    *,
    gamma: float = 0.9,
    anchor: float = 1.0,
    anchored_steps: int | None = None,
) -> Credit:
    """Discounted reward of all that follows a step, relative to the group and, early on, in itself.

    A reconstruction of VGPO (arXiv 2512.12387) from its description: neither its final formula (eq. 13) nor code was
    available, nor the values of gamma and k. Step j is paid `R_j`, the reward of the one-step clean estimate of the
    state that it produced. Then, with means over the n stochastic steps of the sample and z over the samples of the
    same prompt and step,

        Q_j = sum_{l >= j} gamma^(l-j) R_l        omega_j = Q_j / mean_j Q        A_j = omega_j (z(Q_j) + k_j Q_j)

    with k_j = k on the first steps and 0 on the others. Where all samples of a group are equal, `omega k Q` is left.
    A is not invariant to scale or offset of the reward, and with rewards above 0 the absolute term pushes every sample
    up. R_j is value j + 1 of the sample: sample the values with mode "clean" and let the stochastic steps be
    contiguous; otherwise ODE steps taken after j count to it too.

    Args:
        sampled: Trajectories with values on the way.
        reward_KF: [1, F], not negative, NaN where a reward failed: the whole sample is then left out, for omega needs
            all of its rewards.
        gamma: Discount a step, in [0, 1]. The default is a choice of ours.
        anchor: k, not negative; 0 leaves out the absolute term.
        anchored_steps: Number of first steps with the absolute term; None takes half of them, rounded up (the paper 5
            of 10).

    Raises:
        ValueError: there are several channels; a reward is negative; gamma, anchor or
            anchored_steps is out of range; or as `values_of`.
    """
    one_channel(reward_KF, "vgpo")
    count = steps_of(sampled).shape[1]
    anchored = (count + 1) // 2 if anchored_steps is None else anchored_steps
    if not (0 <= gamma <= 1 and anchor >= 0 and 0 <= anchored <= count):
        raise ValueError(
            f"gamma lies in [0, 1], anchor is not negative and anchored_steps in 0 .. {count}, got {gamma}, {anchor} "
            f"and {anchored_steps}"
        )
    reward = values_of(sampled, reward_KF)[0, :, 1:].double()
    valid = ~reward.isnan().any(1, keepdim=True)
    if bool((reward < 0).any()):
        raise ValueError(
            f"vgpo weighs steps by their share of a sample's rewards, which takes rewards that are not negative; the "
            f"smallest here is {float(reward.nan_to_num(nan=torch.inf).min()):g}: add a constant to the reward, or map "
            "it to [0, 1], before it is passed"
        )
    action_value = reward.clone()
    for k in range(count - 2, -1, -1):
        action_value[:, k] += gamma * action_value[:, k + 1]
    mean = action_value.mean(1, keepdim=True)
    scale = torch.where(mean > 0, action_value / mean, 1.0)  # all rewards 0: the limit of equal ones
    offset = anchor * action_value * (torch.arange(count, device=reward.device) < anchored)
    # A sample without all of its rewards has no credit; its scale and offset stay finite, so that 0 times them is 0.
    columns = [torch.where(valid, x, other) for x, other in ((action_value, torch.nan), (scale, 1.0), (offset, 0.0))]
    raw, scale, offset = (column.flatten().to(reward_KF.dtype) for column in columns)
    return Credit(raw=raw[None], norm=norm_by_step(sampled), scale=scale, offset=offset)
