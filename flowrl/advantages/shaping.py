"""Shaping after normalisation: advantages over visits, asymmetry, selection, and how rows are averaged.

NGRPO's virtual member acts inside the statistics, see `flowrl.advantages.normalise`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowrl.advantages.normalise import set_ranks, set_statistics, sets_of
from flowrl.runtime.shapes import Bool, Float, Int
from flowrl.trajectory import check_columns

Merge = Literal["pooled", "release"]
Average = Literal["rows", "samples", "sum_of_samples", "balanced"]
_HIGHEST_RATIO = 10.0  # of DCPO's dynamic clip


def set_means(value_M: Float[Tensor, " M"], set_M: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    """Mean of each row's set, NaN left out: of successes in [0, 1], the success rate of the row's group. Raises
    ValueError: the columns differ in length, or `set_M` holds no integers."""
    check_columns(value_M=value_M, set_M=set_M)
    index, num_sets = sets_of(set_M)
    return set_statistics(value_M[None], index, num_sets).mean[0, index].to(value_M.dtype)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RewardHistory:
    """What is remembered of the rewards of P prompts: a plain value, replaced and never changed."""

    visits: Int[Tensor, " P"]
    """[P] iterations in which the prompt was sampled."""
    count: Float[Tensor, " P"]
    """[P] float64, rewards seen."""
    mean: Float[Tensor, " P"]
    """[P] float64."""
    variance: Float[Tensor, " P"]
    """[P] float64; population variance if pooled, the mixture of sample variances of "release"."""
    merge: Merge = "pooled"
    """With "pooled" the variance of all rewards seen, with "release" the formula of DCPO's code."""

    @staticmethod
    def start(num_prompts: int, merge: Merge = "pooled") -> RewardHistory:
        """Nothing seen yet. Raises ValueError: there is no prompt, or the merge is unknown."""
        if num_prompts < 1 or merge not in ("pooled", "release"):
            raise ValueError(f"a history needs prompts and merge pooled or release, got {num_prompts}, {merge!r}")
        nothing = torch.zeros(num_prompts, dtype=torch.float64)
        visits = torch.zeros(num_prompts, dtype=torch.long)
        return RewardHistory(visits=visits, count=nothing, mean=nothing, variance=nothing, merge=merge)


def _check_prompts(history: RewardHistory, prompt_B: Tensor, **columns: Tensor) -> None:
    check_columns(prompt_B=prompt_B, **columns)
    if prompt_B.is_floating_point() or not bool(((prompt_B >= 0) & (prompt_B < len(history.visits))).all()):
        raise ValueError(
            f"prompts are integers in 0 .. {len(history.visits) - 1}, the prompts of the history, got "
            f"{prompt_B.unique().tolist()}"
        )


def update_history(history: RewardHistory, reward_B: Float[Tensor, " B"], prompt_B: Int[Tensor, " B"]) -> RewardHistory:
    """Add one visit's rewards; call it once an iteration, with one reward per sample.

    "pooled": `mean = (N m + n m') / (N + n)` and `var = (N v + n v' + N n / (N + n) (m' - m)^2) / (N + n)`, which are
    the statistics of all rewards together. "release" weights visits equally, N = earlier visits and n = 1, and takes
    sample variances for v, v'; its result lies off the pooled one. NaN takes no part, and a prompt with nothing else is
    not visited; prompts are numbers in 0 .. P-1 of the `history`, which is not changed.
    """
    _check_prompts(history, prompt_B, reward_B=reward_B)
    pooled, device = history.merge == "pooled", history.mean.device
    prompts = len(history.visits)
    new = set_statistics(reward_B[None].to(device), prompt_B.to(device), prompts, correction=0 if pooled else 1)
    seen = new.count[0] > 0
    before = history.count if pooled else history.visits.double()
    added = new.count[0] if pooled else seen.double()
    total = (before + added).clamp(min=1)
    gap = torch.where(seen, new.mean[0] - history.mean, 0.0)
    spread = before * history.variance + added * new.std[0].square() + before * added / total * gap.square()
    return replace(
        history,
        visits=history.visits + seen.long(),
        count=history.count + new.count[0],
        mean=history.mean + gap * added / total,
        variance=torch.where(seen, spread / total, history.variance),
    )


def dcpo(
    reward_B: Float[Tensor, " B"],
    advantage_B: Float[Tensor, " B"],
    prompt_B: Int[Tensor, " B"],
    history: RewardHistory,
    *,
    eps: float = 1e-4,
) -> Float[Tensor, " B"]:
    """Smooth advantages over the visits of a prompt: DCPO's smooth advantage standardisation (arXiv 2509.02333).

    With A the advantage within this visit's group and `A' = (r - mean) / (std + eps)` among all rewards of the prompt
    so far, at visit i: `S1 = ((i-1) A + A') / i`, `S2 = (A + (i-1) A') / i`, and the smaller of the two in magnitude is
    taken, S2 if they tie. A group of equal rewards (A = 0) gets A' / i. The first visit keeps A; a prompt whose rewards
    never differed has A' = 0. Rewards of old visits come from older policies, so their mean lags. The history holds
    this visit already, see `update_history`; eps is added to the std. A NaN reward gives NaN. Raises ValueError: shapes
    differ, a prompt is unknown or has a reward but no visit, or eps is negative.
    """
    _check_prompts(history, prompt_B, reward_B=reward_B, advantage_B=advantage_B)
    if not eps >= 0:
        raise ValueError(f"eps is added to a standard deviation and must not be negative, got {eps}")
    device = advantage_B.device
    prompt, reward, own = prompt_B.to(device), reward_B.to(device).double(), advantage_B.double()
    visit = history.visits.to(device)[prompt].double()
    if bool(((visit < 1) & ~reward.isnan()).any()):
        raise ValueError("the history has not seen these rewards: pass what update_history returns for them")
    mean, std = history.mean.to(device)[prompt], history.variance.to(device).sqrt()[prompt]
    differ = std > 1e-9 * mean.abs()  # merged means of equal rewards differ by rounding
    whole = torch.where(differ, (reward - mean) / (std + eps), 0.0)
    visit = visit.clamp(min=1)
    first, second = ((visit - 1) * own + whole) / visit, (own + (visit - 1) * whole) / visit
    smooth = torch.where(first.abs() < second.abs(), first, second)
    smooth = torch.where(visit > 1, smooth, own)
    return torch.where(reward.isnan(), torch.nan, smooth).to(advantage_B.dtype)


def dcpo_clip(
    probability: Float[Tensor, " *shape"], *, eps_low: float, eps_high: float
) -> tuple[Float[Tensor, " *shape"], Float[Tensor, " *shape"]]:
    """DCPO's bounds of the ratio for an action of old probability q: wide for rare actions (arXiv 2509.02333).

    `1/2 + sqrt(max(1 - 4 eps_low / q, 0)) / 2 <= ratio <= min(1/2 + sqrt(1 + 4 eps_high / q) / 2, 10)`. For small eps
    that is `1 - eps_low / q <= ratio <= 1 + eps_high / q`. `probability` is q in (0, 1], the eps are not negative;
    published .16 and .20 for words. Returns lower and upper bound of the ratio itself, not distances from 1.
    """
    q = probability.double()
    if not bool(((q > 0) & (q <= 1)).all()):
        raise ValueError("probability must lie in (0, 1]: densities of continuous steps have no such bounds")
    if not (eps_low >= 0 and eps_high >= 0):
        raise ValueError(f"eps must not be negative, got {eps_low}, {eps_high}")
    low = 0.5 + 0.5 * (1 - 4 * eps_low / q).clamp(min=0).sqrt()
    high = (0.5 + 0.5 * (1 + 4 * eps_high / q).sqrt()).clamp(max=_HIGHEST_RATIO)
    return low.to(probability.dtype), high.to(probability.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dcpo:
    """DCPO (arXiv 2509.02333): advantages smoothed over the visits of a prompt (`dcpo`), and its clip range."""

    merge: Merge = "pooled"
    """pooled: the variance of all rewards seen; release: the formula of DCPO's code."""
    clip: Literal["fixed", "dynamic"] = "fixed"
    """dynamic divides the clip range by q, see `dcpo_clip`. A step has a density and no probability; q is here that
    density over its highest value, per latent dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AGrae:
    """Asymmetric group-relative advantages (A-GRAE, arXiv 2602.05548): hold back praise while successes are rare.

    `A' = A (omega / (2 sqrt(p)) + (1 - omega) / (2 sqrt(1 - p)))`, then positive A' times `min(1, omega / alpha)`. With
    the population std, `sum |A| = 2 G sqrt(p (1 - p))` in a group of successes and failures. The factor's first part
    makes that `G sqrt(1 - p)`, for hard groups while omega is large, its second the mirror `G sqrt(p)`, for easy ones
    while omega is small. p of 0 or 1 leaves A as it is.
    """

    alpha: float = 1.0
    """In (0, 1]; the published values are 1 and 0.5."""
    published: bool = False
    """Take `1 - sqrt(p)` in place of `sqrt(1 - p)`, as the released code does: it grows without bound as p nears 1."""

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha must lie in (0, 1], got {self.alpha}: published are 1 and 0.5")

    def __call__(
        self, advantage_M: Float[Tensor, " M"], success_M: Float[Tensor, " M"], omega: float
    ) -> Float[Tensor, " M"]:
        """The changed advantages.

        Args:
            advantage_M: [M], normalised within groups.
            success_M: [M] p, the success rate of the row's group in [0, 1], see `set_means`.
            omega: Mean success of the whole batch, in [0, 1].
        """
        check_columns(advantage_M=advantage_M, success_M=success_M)
        p = success_M.double()
        if not bool(((p >= 0) & (p <= 1)).all()) or not 0 <= omega <= 1:
            raise ValueError(
                f"success rates and omega must lie in [0, 1], got omega {omega} and rates {p.unique().tolist()}: "
                "rewards on another scale have no success rate"
            )
        mixed = (p > 0) & (p < 1)
        rate = torch.where(mixed, p, 0.5)
        failure = 1 - rate.sqrt() if self.published else (1 - rate).sqrt()
        factor = torch.where(mixed, omega / (2 * rate.sqrt()) + (1 - omega) / (2 * failure), 1.0)
        shaped = advantage_M.double() * factor
        return torch.where(shaped > 0, shaped * min(1.0, omega / self.alpha), shaped).to(advantage_M.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Real:
    """Rewards as labels (REAL, arXiv 2602.05630): a group's images are told apart by a classifier, right from wrong.

    With s an image's mean log-ratio to the policy that sampled it, the loss of a group of R right and W wrong images is
    `log(1 + sum_right exp(-s / tau)) + log(1 + sum_wrong exp(s / tau))`. A rollout's first update has s = 0, and there
    the gradient is that of the advantages `G / (tau (1 + R))` of each right image and `-G / (tau (1 + W))` of each
    wrong one, in the mean over the G of a group. Further updates would weigh by s, so they are refused.
    """

    tau: float = 0.5
    """Temperature of the two classes, above 0; published 0.5."""

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise ValueError(f"tau divides log-ratios and must be above 0, got {self.tau}: published is 0.5")

    def __call__(self, reward_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Advantages [B] of verdicts [B], 0 or 1; NaN stays, uncounted. Raises ValueError: other rewards or shapes."""
        check_columns(reward_B=reward_B, group_B=group_B)
        valid = ~reward_B.isnan()
        if not bool(((reward_B == 0) | (reward_B == 1) | ~valid).all()):
            raise ValueError(
                "shaping real takes verdicts, 0 or 1, but there are other rewards: choose a reward of verdicts, such "
                "as geneval with options.credit official"
            )
        index, num_groups = sets_of(group_B)
        counts = [
            torch.zeros(num_groups, dtype=torch.float64).index_add(0, index, (valid & (reward_B == label)).double())
            for label in (0, 1)
        ]
        wrong, right = (counts[0] + counts[1])[index] / (self.tau * (1 + torch.stack(counts)[:, index]))
        return torch.where(valid, torch.where(reward_B == 1, right, -wrong), torch.nan).to(reward_B.dtype)


SHAPINGS: dict[str, type[Dcpo] | type[AGrae] | type[Real]] = {"dcpo": Dcpo, "a_grae": AGrae, "real": Real}


def select_best(advantage_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"], n: int) -> Bool[Tensor, " B"]:
    """Keep the n/2 best and the n/2 worst samples of each group (DanceGRPO's best-of-N, arXiv 2505.07818).

    Advantages come from all samples; only then are the middling ones left out of training. Of equal ones the earlier
    are held for worse, so exactly n are kept. Samples that are NaN are never kept; a group with n valid samples or
    fewer keeps them all. n is even, at least 2 and no more than the smallest group. Returns [B] bool. Raises
    ValueError: n is odd, below 2, or greater than a group; shapes differ.
    """
    check_columns(advantage_B=advantage_B, group_B=group_B)
    if n < 2 or n % 2:
        raise ValueError(f"n is shared by best and worst and must be even and at least 2, got {n}")
    index, num_groups = sets_of(group_B)
    smallest = int(torch.bincount(index, minlength=1).min())
    if n > smallest:
        raise ValueError(f"n ({n}) samples cannot be selected from a group of {smallest}: lower n or sample more")
    rank = set_ranks(advantage_B[None], index, num_groups)[0]
    count = set_statistics(advantage_B[None], index, num_groups).count[0, index]
    return ~advantage_B.isnan() & ((rank < n // 2) | (rank >= count - n // 2))


def aggregation_weights(
    sample_M: Int[Tensor, " M"],
    advantage_M: Float[Tensor, " M"],
    keep_M: Bool[Tensor, " M"],
    kind: Average = "rows",
    *,
    group_M: Int[Tensor, " M"] | None = None,
) -> Float[Tensor, " M"]:
    """Weights with which `loss = sum_m weight_m loss_m` is one of the averages in use; 0 for rows not kept.

    | kind | loss | weight of a row |
    |---|---|---|
    | rows | mean over rows | 1 / rows |
    | samples | mean over samples of their row means | 1 / (samples * rows of the sample) |
    | sum_of_samples | sum over samples of their row means (DCPO) | 1 / rows of the sample |
    | balanced | k/G mean over rows of good samples + (G-k)/G mean over rows of the others | k or G-k / (G * its rows) |

    "balanced" is Balanced Aggregation: long bad samples cannot outvote short good ones. k of the G samples that keep a
    row are good, their kept rows' advantages being positive on average. All but the sum are the same where every sample
    keeps equally many rows.

    Args:
        sample_M: [M] sample of each row; -1, a row of several samples, can be averaged by "rows" only.
        advantage_M: [M]; read by "balanced" only.
        keep_M: [M] bool, rows that are trained. If there is none, all weights are 0.
        group_M: [M] integers: "balanced" within each group, weighted by samples; None takes all rows as one group.

    Returns [M] in the dtype of the advantages. Raises ValueError: shapes differ, the kind is unknown, a kept row has no
    sample of its own though samples count, or the advantage of a kept row is NaN though it counts.
    """
    group_M = torch.zeros_like(sample_M) if group_M is None else group_M
    check_columns(sample_M=sample_M, advantage_M=advantage_M, keep_M=keep_M, group_M=group_M)
    if kind not in ("rows", "samples", "sum_of_samples", "balanced"):
        raise ValueError(f"rows are averaged by rows, samples, sum_of_samples or balanced, got {kind!r}")
    weight = torch.zeros(len(sample_M), dtype=torch.float64, device=advantage_M.device)
    sample, advantage = sample_M[keep_M], advantage_M[keep_M].double()
    if kind == "rows":
        weight[keep_M] = 1 / max(len(sample), 1)
        return weight.to(advantage_M.dtype)
    if bool((sample < 0).any()):
        raise ValueError(f"rows shared by several samples (sample -1) have no {kind!r} average: use 'rows'")
    if kind == "balanced" and bool(advantage.isnan().any()):
        raise ValueError("a kept row has no advantage (NaN): leave it out with keep_M")
    index, num_samples = sets_of(sample)
    rows = torch.bincount(index, minlength=num_samples).double()
    if kind == "balanced":
        good = torch.zeros_like(rows).index_add(0, index, advantage) > 0
        group = torch.zeros_like(rows, dtype=torch.long).scatter(0, index, group_M[keep_M].long())
        side, num_sides = sets_of(2 * group + good.long())
        samples_of_side = torch.bincount(side, minlength=num_sides).double()
        rows_of_side = torch.zeros_like(samples_of_side).index_add(0, side, rows)
        of_sample = (samples_of_side / rows_of_side)[side] / max(num_samples, 1)
    else:
        of_sample = 1 / rows if kind == "sum_of_samples" else 1 / (rows * max(num_samples, 1))
    weight[keep_M] = of_sample[index]
    return weight.to(advantage_M.dtype)
