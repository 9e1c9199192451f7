"""Rewards relative to their group.

A batch holds P groups of `group_size` contiguous samples, the samples of one prompt. Tables of credit are more general:
K channels of M rows, where rows with equal numbers in `norm_M` form a set, and NaN marks failed judgements. Statistics
are taken in float64 and the result is returned in the rewards' dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.runtime.shapes import Bool, Float, Int

Scope = Literal["group", "global", "none"]
Baseline = Literal["mean", "leave_one_out"]
Aggregation = Literal["sum", "each", "gdpo"]


def _check_options(scope: str, eps: float, correction: int, baseline: str) -> None:
    known = scope in ("group", "global", "none") and baseline in ("mean", "leave_one_out") and correction in (0, 1)
    if not known:
        raise ValueError(
            "scope is group, global or none, baseline is mean or leave_one_out, correction is 0 or 1, "
            f"got {scope!r}, {baseline!r}, {correction!r}"
        )
    if not eps >= 0:
        raise ValueError(f"eps is added to a standard deviation and must not be negative, got {eps}")


def _contiguous(
    reward_B: Tensor, group_size: int, valid_B: Tensor | None
) -> tuple[Float[Tensor, " 1 B"], Int[Tensor, " B"]]:
    """Checks rewards; returns them as a table of one channel, NaN if invalid, and the group of each."""
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
    bad = (valid & ~reward_B.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"rewards of samples {bad} are not finite: mark failed items as invalid with valid_B")
    group_B = torch.arange(len(reward_B), device=reward_B.device) // group_size
    return torch.where(valid, reward_B, torch.nan)[None], group_B


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
        correction: 0 population std, 1 sample std.
        valid_B: [B] bool. Statistics are taken over valid members; an invalid sample, and every sample of a group with
            fewer than two valid members, gets 0. Take invalid samples out of the loss denominator too.

    Returns [B] in the dtype of the rewards. Raises ValueError: group_size < 2 or does not divide B; a valid reward is
    not finite; an option is unknown.
    """
    value, group = _contiguous(reward_B, group_size, valid_B)
    z = normalise(value, group, scope=scope, eps=eps, correction=correction, baseline=baseline)[0]
    return torch.where(z.isnan(), 0.0, z)


def zero_variance_groups(
    reward_B: Float[Tensor, " B"],
    group_size: int,
    *,
    valid_B: Bool[Tensor, " B"] | None = None,
    correction: int = 0,
    min_std: float = 0.0,
) -> Bool[Tensor, " P"]:
    """Groups without a signal: all valid rewards equal, or fewer than two valid, or a std below `min_std`.

    Raises as `group_advantages`.
    """
    value, group = _contiguous(reward_B, group_size, valid_B)
    sets = set_statistics(value, group, len(reward_B) // group_size, correction=correction, min_std=min_std)
    return sets.constant[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SetStatistics:
    """Statistics of S sets of rows in K channels, NaN left out.

    A set without two different values, or with a std below the given minimum, is constant and has std 0.
    """

    count: Float[Tensor, " K S"]
    mean: Float[Tensor, " K S"]
    std: Float[Tensor, " K S"]
    constant: Bool[Tensor, " K S"]


def set_statistics(
    value_KM: Float[Tensor, " K M"],
    set_M: Int[Tensor, " M"],
    num_sets: int,
    *,
    correction: int = 0,
    min_std: float = 0.0,
) -> SetStatistics:
    """Count, mean and standard deviation of sets of rows.

    Args:
        value_KM: [K, M] float; NaN takes no part.
        set_M: [M] integers in 0 .. num_sets - 1, the set of each row in every channel.
        correction: 0 population std, 1 sample std.
        min_std: Sets of a smaller std count as constant.
    """
    counted, index = ~value_KM.isnan(), set_M.long()
    value = torch.where(counted, value_KM.double(), 0.0)
    zeros = value.new_zeros(len(value), num_sets)
    count = zeros.index_add(1, index, counted.double())
    mean = zeros.index_add(1, index, value) / count.clamp(min=1)
    deviation = torch.where(counted, value - mean[:, index], 0.0)
    square = zeros.index_add(1, index, deviation.square())
    columns = index.expand(len(value), -1)
    up, down = (torch.where(counted, value, end) for end in (torch.inf, -torch.inf))
    lowest = torch.full_like(zeros, torch.inf).scatter_reduce(1, columns, up, "amin")
    highest = torch.full_like(zeros, -torch.inf).scatter_reduce(1, columns, down, "amax")
    std = (square / (count - correction).clamp(min=1)).sqrt()
    # The mean of equal values is often not quite that value, which would leave them a tiny std.
    constant = (lowest >= highest) | (std < min_std)
    return SetStatistics(count=count, mean=mean, std=torch.where(constant, 0.0, std), constant=constant)


def set_ranks(value_KM: Float[Tensor, " K M"], set_M: Int[Tensor, " M"], num_sets: int) -> Int[Tensor, " K M"]:
    """Ascending rank of each row in its set, from 0; equal values in order of their rows, NaN last."""
    index = set_M.long()
    by_value = torch.where(value_KM.isnan(), torch.inf, value_KM.double()).argsort(dim=1, stable=True)
    order = by_value.gather(1, index[by_value].argsort(dim=1, stable=True))
    position = torch.arange(len(index), device=index.device)
    size = position.new_zeros(num_sets).index_add(0, index, torch.ones_like(index))
    placed = torch.zeros_like(order).scatter(1, order, position.expand_as(order))
    return placed - (size.cumsum(0) - size)[index]


def sets_of(norm_M: Int[Tensor, " M"]) -> tuple[Int[Tensor, " M"], int]:
    """Renumber sets as 0 .. S-1 in ascending order of their numbers, and count them. Raises ValueError: the numbers are
    not integers [M]."""
    if norm_M.ndim != 1 or norm_M.is_floating_point() or norm_M.dtype == torch.bool:
        raise ValueError(f"sets are named by one integer per row [M], got {norm_M.dtype} {tuple(norm_M.shape)}")
    found, index = norm_M.unique(return_inverse=True)
    return index, len(found)


def _check_table(raw_KM: Tensor, norm_M: Tensor) -> None:
    """Raise unless the table is float [K, M] of numbers and NaN, with one set number per row."""
    if raw_KM.ndim != 2 or not raw_KM.is_floating_point() or norm_M.shape != raw_KM.shape[1:]:
        raise ValueError(
            f"credit is a float tensor [K, M] with sets [M], got {raw_KM.dtype} {tuple(raw_KM.shape)} and "
            f"{tuple(norm_M.shape)}"
        )
    if bool(raw_KM.isinf().any()):
        raise ValueError("credit holds infinite values: mark what could not be judged as NaN")


def _check_weights(weights_K: Tensor, channels: int) -> None:
    if weights_K.shape != (channels,) or not bool(weights_K.isfinite().all()):
        raise ValueError(f"weights are one finite number per channel [{channels}], got {weights_K.tolist()}")


def normalise(
    raw_KM: Float[Tensor, " K M"],
    norm_M: Int[Tensor, " M"],
    *,
    scope: Scope = "group",
    eps: float = 1e-4,
    correction: int = 0,
    baseline: Baseline = "mean",
    virtual_max: float | None = None,
    min_std: float = 0.0,
) -> Float[Tensor, " K M"]:
    """Normalise credit within sets of rows, each channel by itself: `z = (raw - baseline) / (std + eps)`.

    `group_advantages` is this for contiguous groups. A set of equal values gets exactly 0, so does a set with fewer
    than two members. A row counts as one member: if a sample has several rows with the same credit, number the sets by
    prompt and step. By prompt alone, the duplicates would be among the others that leave-one-out compares with, they
    would outvote a virtual member, and a sample std would see too many members.

    Args:
        raw_KM: [K, M] float. NaN is left out of all statistics and stays NaN: mask those rows.
        norm_M: [M] integers; rows with equal numbers are one set.
        scope, eps, correction, baseline: As `group_advantages`, a set for a group; "global" keeps the set's baseline.
        virtual_max: Upper bound of the reward: one virtual member of that value joins mean and std of every set (NGRPO,
            arXiv 2509.18851), so that a set of equal failures gets a negative advantage, a set of one too. A set whose
            members all reach the bound still gets 0. The real members' mean advantage is negative.
        min_std: A set of a smaller std counts as one of equal values. With a tiny eps, rewards that differ only by
            rounding would otherwise get full advantages. 1e-6 in BranchGRPO's code.

    Raises ValueError: shapes or types do not fit; credit is infinite or above `virtual_max`; an option is unknown, out
    of range, or contradicts another.
    """
    _check_options(scope, eps, correction, baseline)
    _check_table(raw_KM, norm_M)
    if virtual_max is not None and (scope == "global" or not math.isfinite(virtual_max)):
        raise ValueError(f"virtual_max is a finite member of a set, not of scope 'global': got {virtual_max}, {scope}")
    value = raw_KM.double()
    if virtual_max is not None:
        if bool((value > virtual_max + 1e-6 * max(1.0, abs(virtual_max))).any()):
            highest = float(value[~value.isnan()].max())
            raise ValueError(f"virtual_max ({virtual_max}) must bound the credit from above, which reaches {highest}")
        value = value.clamp(max=virtual_max)  # a weighted sum of full marks can miss the bound by rounding
    index, num_sets = sets_of(norm_M)
    members, member_sets = value, index
    if virtual_max is not None:
        members = torch.cat([members, members.new_full((len(members), num_sets), virtual_max)], 1)
        member_sets = torch.cat([index, torch.arange(num_sets, device=index.device)])
    sets = set_statistics(members, member_sets, num_sets, correction=correction, min_std=min_std)
    z = value - sets.mean[:, index]
    if baseline == "leave_one_out":
        z = z * (sets.count / (sets.count - 1).clamp(min=1))[:, index]
    std = sets.std
    if scope == "global":
        std = set_statistics(value, torch.zeros_like(index), 1, correction=correction).std.expand_as(std)
    divisor = torch.ones_like(std) if scope == "none" else std + eps
    nothing = sets.constant | (divisor == 0)  # the square of a tiny difference can be 0
    z = torch.where(nothing[:, index], 0.0, z / divisor[:, index])
    return torch.where(raw_KM.isnan(), torch.nan, z).to(raw_KM.dtype)


def combine(z_KM: Float[Tensor, " K M"], weights_K: Float[Tensor, " K"]) -> Float[Tensor, " M"]:
    """Weighted sum over channels, `sum_k w_k z_k`. A row that is NaN in a channel of nonzero weight is NaN. Raises
    ValueError: there is not one finite weight per channel."""
    _check_weights(weights_K, len(z_KM))
    weights = weights_K.to(z_KM.device).double()[:, None]
    return torch.where(weights != 0, weights * z_KM.double(), 0.0).sum(0).to(z_KM.dtype)


def whiten(a_M: Float[Tensor, " M"], *, eps: float = 1e-4, correction: int = 1) -> Float[Tensor, " M"]:
    """Standardise a whole batch, `(a - mean) / (std + eps)`: the last stage of GDPO (arXiv 2601.05242).

    NaN is left out and stays NaN; equal values get 0. It makes every prompt's advantage depend on all others; if the
    mean is not 0, it can flip the sign of small ones.

    Args:
        a_M: [M] advantages of the batch, of all processes.
        eps, correction: As `normalise`, which it raises as; correction 1 as released by the authors.
    """
    together = torch.zeros(len(a_M), dtype=torch.long, device=a_M.device)
    return normalise(a_M[None], together, eps=eps, correction=correction)[0]


def aggregate(
    raw_KM: Float[Tensor, " K M"],
    norm_M: Int[Tensor, " M"],
    weights_K: Float[Tensor, " K"],
    how: Aggregation = "sum",
    *,
    scope: Scope = "group",
    eps: float = 1e-4,
    correction: int = 0,
    baseline: Baseline = "mean",
    virtual_max: float | None = None,
    min_std: float = 0.0,
) -> Float[Tensor, " M"]:
    """Make one advantage per row of several rewards.

    | how | rule |
    |---|---|
    | sum | normalise the weighted sum of the rewards (Flow-GRPO) |
    | each | normalise each reward, then take the weighted sum (DanceGRPO) |
    | gdpo | "each", then `whiten` over the whole batch (GDPO, arXiv 2601.05242; released: only with K > 1) |

    "sum" lets the reward with the widest spread rule; "each" gives all the same say, noise too. Channels of weight 0
    take no part at all. PaCo-GRPO's log-taming is "sum" of rewards that `log_tame` has replaced before. A set that is
    constant in every channel gets exactly 0 whatever the rule: it counts in the batch that "gdpo" whitens over, as
    released, but the mean that is taken off there is no signal of its own.

    Args:
        raw_KM: [K, M] float; NaN as `normalise`. A row lacking a reward that counts gets NaN.
        norm_M: [M] integers; rows with equal numbers are one set.
        weights_K: [K], not all 0.
        scope, eps, correction, baseline: As `normalise`; "gdpo" whitens with the same eps and correction.
        virtual_max: As `normalise`; bounds the weighted sum with "sum", every channel otherwise.
        min_std: As `normalise`, of the weighted sum or of every channel; whitening has none.

    Raises ValueError: as `normalise` and `combine`; all weights are 0; `how` is unknown.
    """
    if how not in ("sum", "each", "gdpo"):
        raise ValueError(f"rewards are aggregated by sum, each or gdpo, got {how!r}")
    _check_weights(weights_K, len(raw_KM))
    _check_table(raw_KM, norm_M)
    weights = weights_K.to(raw_KM.device)
    used = weights != 0
    if not bool(used.any()):
        raise ValueError("all weights are 0, so no reward is left: give at least one reward a nonzero weight")
    raw, weights = raw_KM[used].double(), weights[used]
    raw = combine(raw, weights)[None] if how == "sum" else raw
    z = normalise(
        raw, norm_M, scope=scope, eps=eps, correction=correction, baseline=baseline, virtual_max=virtual_max,
        min_std=min_std,
    )  # fmt: skip
    advantage = z[0] if how == "sum" else combine(z, weights)
    if how == "gdpo":
        index, num_sets = sets_of(norm_M)
        moved = torch.zeros(num_sets, dtype=torch.bool, device=z.device)
        moved[index[(z.nan_to_num() != 0).any(0)]] = True
        white = whiten(advantage, eps=eps, correction=correction)
        advantage = torch.where(moved[index] | white.isnan(), white, 0.0)
    return advantage.to(raw_KM.dtype)
