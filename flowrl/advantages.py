"""Rewards relative to their group.

A batch holds P groups of `group_size` contiguous samples, the samples of one prompt. Statistics are taken in float64
and the result is returned in the rewards' dtype.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Scope = Literal["group", "global", "none"]
Baseline = Literal["mean", "leave_one_out"]


def _grouped(
    reward_B: Tensor, group_size: int, valid_B: Tensor | None
) -> tuple[Float[Tensor, " P G"], Bool[Tensor, " P G"]]:
    """Rewards in float64 and their validity as [P, G], checked; invalid rewards are replaced by 0."""
    if reward_B.ndim != 1 or not reward_B.is_floating_point():
        raise ValueError(f"rewards must be a float tensor [B], got {reward_B.dtype} {tuple(reward_B.shape)}")
    if group_size < 2 or len(reward_B) == 0 or len(reward_B) % group_size:
        raise ValueError(
            f"group_size ({group_size}) must be at least 2 and divide the number of rewards ({len(reward_B)}): "
            "a sample is compared with the others of its prompt, and groups are contiguous"
        )
    valid = torch.ones_like(reward_B, dtype=torch.bool) if valid_B is None else valid_B
    if valid.shape != reward_B.shape or valid.dtype != torch.bool:
        raise ValueError(f"valid_B must be bool {tuple(reward_B.shape)}, got {valid.dtype} {tuple(valid.shape)}")
    reward = torch.where(valid, reward_B.double(), 0.0)
    if not bool(reward.isfinite().all()):
        bad = (~reward.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"rewards of samples {bad} are not finite: mark failed items as invalid with valid_B")
    return reward.reshape(-1, group_size), valid.reshape(-1, group_size)


def _constant(reward: Tensor, valid: Tensor) -> Bool[Tensor, " P 1"]:
    """Groups with fewer than two valid members or all valid rewards equal."""
    lowest = torch.where(valid, reward, torch.inf).amin(1, keepdim=True)
    highest = torch.where(valid, reward, -torch.inf).amax(1, keepdim=True)
    return lowest >= highest


def _std(reward: Tensor, valid: Tensor, correction: int) -> Float[Tensor, " P 1"]:
    """Standard deviation over the valid members of each row."""
    count = valid.sum(1, keepdim=True)
    mean = reward.sum(1, keepdim=True) / count.clamp(min=1)
    square = torch.where(valid, reward - mean, 0.0).square().sum(1, keepdim=True)
    return (square / (count - correction).clamp(min=1)).sqrt()


def group_advantages(
    reward_B: Float[Tensor, " B"],
    group_size: int,
    scope: Scope = "group",
    eps: float = 1e-4,
    correction: int = 0,
    baseline: Baseline = "mean",
    *,
    valid_B: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """Advantage of each sample: reward minus the baseline of its group, over a standard deviation.

    `A = (r - baseline) / (std + eps)`. The baseline is the group's mean (Shao et al., GRPO, arXiv 2402.03300; Liu et
    al., Flow-GRPO, arXiv 2505.05470) or the mean of the other members (leave-one-out, Kool et al. 2019). Leave-one-out
    advantages are G / (G - 1) times the others, and without division by a std the policy gradient they give is
    unbiased; the plain mean shrinks it by (G - 1) / G. A group of equal rewards gets exactly 0, whatever the scope.

    Args:
        reward_B: [B] float, groups contiguous.
        group_size: G, at least 2.
        scope: Whose std divides: "group" the sample's own group, "global" all rewards of the batch about their common
            mean, "none" no division.
        eps: Added to the std.
        correction: 0 population std, 1 sample std.
        baseline: "mean" or "leave_one_out".
        valid_B: [B] bool. Statistics are taken over valid members; an invalid sample, and every sample of a group with
            fewer than two valid members, gets 0. Take invalid samples out of the loss denominator too.

    Returns:
        [B] in the dtype of the rewards.

    Raises:
        ValueError: group_size < 2 or does not divide B; a valid reward is not finite; an option is unknown.
    """
    known = scope in ("group", "global", "none") and baseline in ("mean", "leave_one_out") and correction in (0, 1)
    if not known:
        raise ValueError(
            "scope is group, global or none, baseline is mean or leave_one_out, correction is 0 or 1, "
            f"got {scope!r}, {baseline!r}, {correction!r}"
        )
    if not eps >= 0:
        raise ValueError(f"eps is added to a standard deviation and must not be negative, got {eps}")
    reward, valid = _grouped(reward_B, group_size, valid_B)
    count = valid.sum(1, keepdim=True)
    centred = reward - reward.sum(1, keepdim=True) / count.clamp(min=1)
    if baseline == "leave_one_out":
        centred = centred * count / (count - 1).clamp(min=1)
    if scope == "group":
        centred = centred / (_std(reward, valid, correction) + eps)
    elif scope == "global":
        centred = centred / (_std(reward.reshape(1, -1), valid.reshape(1, -1), correction) + eps)
    # The mean of equal numbers is often not quite that number, and eps = 0 would make 0 / 0 of it.
    advantage = torch.where(valid & ~_constant(reward, valid), centred, 0.0)
    return advantage.flatten().to(reward_B.dtype)


def zero_variance_groups(
    reward_B: Float[Tensor, " B"], group_size: int, *, valid_B: Bool[Tensor, " B"] | None = None
) -> Bool[Tensor, " P"]:
    """Groups that teach nothing: all valid rewards equal, or fewer than two valid.

    Raises:
        ValueError: as `group_advantages`.
    """
    return _constant(*_grouped(reward_B, group_size, valid_B)).flatten()
