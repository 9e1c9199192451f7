"""How far a reward can be trusted: its repeatability, how much of an advantage is noise, and a judge's position bias.

A group-relative method sees a value minus its group's mean, so noise is compared with the spread within groups. Let x
and y be two measurements of the same images, both minus their group's mean, and S sums over images:

    reliability = 2 Sxy / (Sxx + Syy)            intraclass correlation within groups, the share of signal
    noise share = sqrt(1 - reliability)          share of the standard deviation that is noise
    signal to noise = sqrt(reliability / (1 - reliability))

Adding a constant to a whole group, or to everything, changes neither advantages nor these numbers. Items that failed
(NaN) in either measurement are left out.

Intervals are over groups (prompts): Student's of means (`flowrl.statistics.means`), percentile bootstraps of all other
statistics, widened as in `flowrl.statistics.bootstrap`; a single group has none.

Letters: N images, G groups, K sums, R resamples, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flowrl.runtime.shapes import Float64, Int64
from flowrl.statistics.bootstrap import UNKNOWN, Interval, Statistic, codes, percentiles, point, resample
from flowrl.statistics.means import mean_interval

Values = Float64[np.ndarray, " n"]
Groups = Int64[np.ndarray, " n"]
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Retest:
    """Two measurements of the same images."""

    count: int
    """Images that both measured."""
    largest: float
    """Max |x - y|."""
    mean: Interval
    """Of |x - y|."""
    correlation: Interval
    """Pearson's, over all images."""
    noise_std: Interval
    """Of one measurement, sqrt(mean (x - y)² / 2)."""

    @property
    def exact(self) -> bool:
        """Whether both gave the same values."""
        return self.largest == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How well group-relative advantages of two measurements agree; see the module for the formulas."""

    groups: int
    """Groups with two or more images that both measured."""
    shift: Interval
    """Mean of y - x, which does not affect advantages."""
    reliability: Interval
    """In [-1, 1]."""
    noise_share: Interval
    """In [0, 1]."""
    within_std: Interval
    """Standard deviation within groups, of one measurement."""
    rank: Interval
    """Mean over groups with spread in x of Spearman's correlation within the group, which is 0 if y has no spread."""

    @property
    def signal_to_noise(self) -> float:
        """sqrt(reliability / (1 - reliability)), infinite without noise, NaN where unknown."""
        share = max(0.0, self.reliability.mean)
        return math.inf if share >= 1 else math.sqrt(share / (1 - share))


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How a reward's variance divides between and within prompts."""

    std: Interval
    """Standard deviation over all images."""
    between_prompts: Interval
    """Share of the variance that lies between prompts, which does not affect advantages (one-way random effects)."""
    flat_groups: Interval
    """Share of groups without any advantage: those of two or more images that all have the same value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderBias:
    """Verdicts of a judge that sees the same pairs in both orders."""

    count: int
    """Pairs with a verdict in both orders."""
    failed: int
    """Pairs without."""
    first_wins: Interval
    """Share of verdicts for the first image minus one half: 0 without bias, 1/2 if the judge always names the first."""
    agreement: Interval
    """Share of pairs for which both orders name the same image; a tie against a win counts as half."""


def over_groups(
    sum_KG: Float64[np.ndarray, " k g"], statistic: Statistic, *, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> Interval:
    """A statistic of sums over all groups, with an interval from groups drawn with replacement.

    Leaves out resamples in which the statistic is undefined; if these are more than half, the bounds are NaN.

    Args:
        statistic: from the K sums of whole samples.
        bounds: range of the statistic, which widened bounds keep to.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate = float(statistic(sum_KG.sum(axis=1, keepdims=True))[0])
        value_R = resample(
            sum_KG, statistic, estimate, bounds=bounds, num_resamples=RESAMPLES, rng=np.random.default_rng(0)
        )
    value_R = value_R[np.isfinite(value_R)]
    if 2 * len(value_R) < RESAMPLES:
        return point(estimate)
    return percentiles(estimate, value_R)


def retest(first: ArrayLike, second: ArrayLike, groups: ArrayLike) -> Retest:
    """Two measurements `[N]` of the same images; `groups` `[N]` are labels of their prompts."""
    x, y, group = _pair(first, second, groups)
    if len(x) == 0:
        return Retest(count=0, largest=math.nan, mean=UNKNOWN, correlation=UNKNOWN, noise_std=UNKNOWN)
    difference = y - x
    moments = _sums([np.ones_like(x), difference**2 / 2], group)
    return Retest(
        count=len(x),
        largest=float(np.abs(difference).max()),
        mean=mean_interval(np.abs(difference), group, ends=None),
        correlation=_pearson(x, y, group),
        noise_std=over_groups(moments, lambda s: np.sqrt(s[1] / s[0]), bounds=(0, math.inf)),
    )


def agreement(first: ArrayLike, second: ArrayLike, groups: ArrayLike) -> Agreement:
    """Advantages of the measurement `second` `[N]` against those of `first` `[N]`; `groups` `[N]` are labels."""
    x, y, group = _pair(first, second, groups)
    shift = mean_interval(y - x, group, ends=None) if len(x) else UNKNOWN
    kept = np.bincount(group)[group] >= 2
    x, y, group = x[kept], y[kept], codes(group[kept])
    if len(x) == 0:
        return Agreement(
            groups=0, shift=shift, reliability=UNKNOWN, noise_share=UNKNOWN, within_std=UNKNOWN, rank=UNKNOWN
        )
    a, b = _centre(x, group), _centre(y, group)
    freedom = 1 - 1 / np.bincount(group)[group]  # sums to n - 1 over a group
    moments = _sums([a * a + b * b, 2 * a * b, freedom], group)

    def reliability(s: np.ndarray) -> np.ndarray:
        return np.clip(s[1] / s[0], -1, 1)

    ranks = [
        _spearman(x[members], y[members])
        for members in (np.flatnonzero(group == g) for g in range(group.max() + 1))
        if np.ptp(x[members]) > 0
    ]
    return Agreement(
        groups=int(group.max()) + 1,
        shift=shift,
        reliability=over_groups(moments, reliability, bounds=(-1, 1)),
        noise_share=over_groups(moments, lambda s: np.sqrt(1 - np.clip(reliability(s), 0, 1)), bounds=(0, 1)),
        within_std=over_groups(moments, lambda s: np.sqrt(s[0] / 2 / s[2]), bounds=(0, math.inf)),
        rank=mean_interval(ranks, ends=None) if ranks else UNKNOWN,
    )


def spread(values: ArrayLike, groups: ArrayLike) -> Spread:
    """Where the variance of values `[N]` lies; `groups` `[N]` are labels."""
    x, _, group = _pair(values, values, groups)
    if len(x) == 0:
        return Spread(std=UNKNOWN, between_prompts=UNKNOWN, flat_groups=UNKNOWN)
    size = np.bincount(group).astype(np.float64)
    origin = x - x.mean()  # moments about the sample's own mean do not cancel badly
    total, within = np.bincount(group, weights=origin), np.bincount(group, weights=_centre(x, group) ** 2)
    squares = np.bincount(group, weights=origin**2)
    sum_KG = np.stack([np.ones_like(size), size, size**2, total, total**2 / size, within, squares])
    extent = np.array([np.ptp(x[group == g]) for g in range(len(size))])
    flat = (extent == 0)[size >= 2]
    return Spread(
        std=over_groups(
            sum_KG, lambda s: np.sqrt(np.maximum(0.0, s[6] - s[3] ** 2 / s[1]) / (s[1] - 1)), bounds=(0, math.inf)
        ),
        between_prompts=over_groups(sum_KG, _between, bounds=(0, 1)),
        flat_groups=mean_interval(flat) if len(flat) else UNKNOWN,
    )


def _between(s: np.ndarray) -> np.ndarray:
    """From sums of 1, n, n², T, T²/n and the squares within: sigma_p² / (sigma_p² + MSW)."""
    groups, images, squared_sizes, total, per_group, within = s[:6]
    mean_within = within / (images - groups)
    mean_between = (per_group - total**2 / images) / (groups - 1)
    size = (images - squared_sizes / images) / (groups - 1)  # the mean size of groups that differ in size
    variance = np.maximum(0.0, (mean_between - mean_within) / size)
    return np.asarray(variance / (variance + mean_within))


def order_bias(first_shown: ArrayLike, other_order: ArrayLike, groups: ArrayLike) -> OrderBias:
    """Verdicts on P pairs (a, b) in both orders.

    Args:
        first_shown: [P] probability that a wins, a shown first; above 1/2 is a win, 1/2 a tie, NaN a failure.
        other_order: [P] probability that b wins, b shown first.
        groups: [P] labels of the pairs' prompts.
    """
    a, b, group = _pair(first_shown, other_order, groups)
    failed = np.asarray(first_shown).size - len(a)
    if len(a) == 0:
        return OrderBias(count=0, failed=failed, first_wins=UNKNOWN, agreement=UNKNOWN)
    a, b = (0.5 + 0.5 * np.sign(part - 0.5) for part in (a, b))
    return OrderBias(
        count=len(a),
        failed=failed,
        first_wins=mean_interval((a + b - 1) / 2, group, ends=None),
        agreement=mean_interval(1 - np.abs(a + b - 1), group),
    )


def rank_correlation(first: ArrayLike, second: ArrayLike, groups: ArrayLike) -> Interval:
    """Spearman's correlation of two rewards over all images; resamples keep the ranks of the whole sample."""
    x, y, group = _pair(first, second, groups)
    return _pearson(ranks(x), ranks(y), group) if len(x) else UNKNOWN


def ranks(values: ArrayLike) -> Values:
    """Ranks from 0, equal values share their mean rank."""
    value_N = np.asarray(values, dtype=np.float64)
    _, place, count = np.unique(value_N, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return np.asarray((last - (count + 1) / 2)[place], dtype=np.float64)


def repeats_for(reliability: float, target: float = 0.9) -> float:
    """How many values to average for a mean of this reliability (Spearman and Brown 1910): `target (1 - r) / (r (1 -
    target))`, rounded up; infinite without signal."""
    if not reliability > 0:
        return math.inf
    return max(1, math.ceil(target * (1 - reliability) / (reliability * (1 - target)) - 1e-9))


def _spearman(x: Values, y: Values) -> float:
    """Spearman's correlation of values that differ in x; 0 if they do not differ in y."""
    a, b = ranks(x) - (len(x) - 1) / 2, ranks(y) - (len(y) - 1) / 2
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale else 0.0


def _pearson(x: Values, y: Values, group: Groups) -> Interval:
    a, b = x - x.mean(), y - y.mean()
    sum_KG = _sums([np.ones_like(a), a, b, a * a, b * b, a * b], group)

    def correlation(s: np.ndarray) -> np.ndarray:
        n, sa, sb, saa, sbb, sab = s
        variances = np.maximum(0.0, saa - sa**2 / n) * np.maximum(0.0, sbb - sb**2 / n)
        return np.asarray(np.clip((sab - sa * sb / n) / np.sqrt(variances), -1, 1))

    return over_groups(sum_KG, correlation, bounds=(-1, 1))


def _pair(first: ArrayLike, second: ArrayLike, groups: ArrayLike) -> tuple[Values, Values, Groups]:
    """Both measurements where both are finite, and the groups as 0, 1, 2, ... Raises ValueError: lengths differ."""
    x, y, group = np.asarray(first, np.float64), np.asarray(second, np.float64), np.asarray(groups)
    if x.ndim != 1 or x.shape != y.shape or x.shape != group.shape:
        raise ValueError(f"measurements and groups need one entry per item: {x.shape}, {y.shape}, {group.shape}.")
    known = np.isfinite(x) & np.isfinite(y)
    return x[known], y[known], codes(group[known])


def _centre(values: Values, group: Groups) -> Values:
    """Values minus their group's mean; exactly 0 if all values of the group are equal."""
    first = values[np.unique(group, return_index=True)[1]]
    origin = values - first[group]
    return np.asarray(origin - (np.bincount(group, weights=origin) / np.bincount(group))[group])


def _sums(columns: Sequence[Values], group: Groups) -> Float64[np.ndarray, " k g"]:
    return np.stack([np.bincount(group, weights=column) for column in columns])
