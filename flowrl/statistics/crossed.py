"""Statistics of a comparison: intervals over training seeds and prompts together, and what many comparisons cost.

Every seed of a method answers the same prompts, so seeds and prompts cross. Both are drawn with replacement,
independently (Owen, "The pigeonhole bootstrap", 2007): a replicate is a mean under random weights of both.

Letters: S seeds, N images, U units (prompts or images of a task), R resamples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from flowrl.statistics.bootstrap import (
    DETECTABLE_ERRORS,
    Interval,
    ScoreRow,
    draw_counts,
    paired_rows,
    percentiles,
    strata,
)

RESAMPLES = 10_000

Images = Sequence[ScoreRow]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over seeds and prompts: its 95 % interval, standard error, and two-sided p against 0.

    Bounds, error and p are NaN where a single unit was seen.
    """

    interval: Interval
    error: float
    p: float

    @property
    def mean(self) -> float:
        """The mean itself."""
        return self.interval.mean

    @property
    def detectable(self) -> float:
        """The smallest true value that such data would tell from 0 with 80 % power at 5 %, two-sided."""
        return DETECTABLE_ERRORS * self.error


def crossed_estimate(runs: Sequence[Images], *, num_resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Mean over seeds of the macro score (mean over tasks of the mean over a task's images), with its uncertainty.

    A resample gives unit u of F drawn units of a factor the weight `1 + sqrt(F/(F-1)) (n_u - 1)`, with n_u how often it
    was drawn; the root undoes the shrinkage of a spread drawn from F units. One seed: over prompts only. Prompts are
    drawn within each task, or images in a task of fewer than `MIN_PROMPTS` prompts.

    The noise that belongs to neither factor is counted twice, which makes up for few seeds: with 3 seeds and 100
    prompts the interval covered 98 to 99 % in simulations where seeds spread no more than their images explain, 89 %
    at 2.5 times and 86 % at 5 times that spread.

    Args:
        runs: [S] the same images (task, prompt, sample) of every seed.
        num_resamples: R.
        seed: same seed, same interval.

    Returns:
        p is the smallest level at which the interval touches 0: `2 (1 + min(#<=0, #>=0)) / (R + 1)`, at most 1.

    Raises:
        ValueError: no runs, or runs with different images.
    """
    tasks = strata(runs)
    mean = float(np.mean([value_SN.mean() for value_SN, _ in tasks.values()]))
    seed_RS = _weights((seed, 0), len(runs), num_resamples) / len(runs)
    replicate_R = np.zeros(num_resamples)
    for index, (value_SN, unit_N) in enumerate(tasks.values()):
        replicate_RS = _unit_means(value_SN, unit_N, num_resamples, (seed, 1 + index))
        replicate_R += (seed_RS * replicate_RS).sum(axis=1) / len(tasks)
    interval = percentiles(mean, replicate_R)
    if not interval.known:
        return Estimate(interval=interval, error=math.nan, p=math.nan)
    beyond = min(int((replicate_R <= 0).sum()), int((replicate_R >= 0).sum()))
    p = min(1.0, 2 * (1 + beyond) / (num_resamples + 1))
    return Estimate(interval=interval, error=float(replicate_R.std()), p=p)


def crossed_difference(
    before: Sequence[Images], after: Sequence[Images], *, num_resamples: int = RESAMPLES
) -> Estimate:
    """`crossed_estimate` of after minus before, from the differences of the same seed and image.

    Raises:
        ValueError: unequal numbers of seeds, or an image without its partner.
    """
    pairs = [paired_rows(one, other) for one, other in zip(before, after, strict=True)]
    return crossed_estimate(pairs, num_resamples=num_resamples)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values: the k-th smallest of m is multiplied by m - k + 1, made monotone, at most 1.

    The chance of any false discovery among all comparisons then stays below the level (Holm 1979). NaN stays NaN and
    counts as no comparison.
    """
    known = sorted((value, name) for name, value in p.items() if math.isfinite(value))
    adjusted, highest = dict.fromkeys(p, math.nan), 0.0
    for rank, (value, name) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * value))
        adjusted[name] = highest
    return adjusted


def mean_curve(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Mean over seeds of curves (cost, score): point by point, mean of costs and of scores.

    Curves of unequal lengths are interpolated linearly at every cost that one of them has.
    """
    if len({len(cost) for cost, _ in curves}) == 1:
        return np.mean([cost for cost, _ in curves], axis=0), np.mean([score for _, score in curves], axis=0)
    costs = np.unique(np.concatenate([np.asarray(cost, dtype=np.float64) for cost, _ in curves]))
    return costs, np.mean([np.interp(costs, cost, score) for cost, score in curves], axis=0)


def cost_to_reach(cost: ArrayLike, score: ArrayLike, target: float) -> float:
    """The cost at which a curve first reaches a score, interpolated linearly; infinite where it never does."""
    costs, scores = np.asarray(cost, dtype=np.float64), np.asarray(score, dtype=np.float64)
    reached = np.flatnonzero(scores >= target - 1e-12)
    if not len(reached):
        return math.inf
    k = int(reached[0])
    if k == 0:
        return float(costs[0])
    share = (target - scores[k - 1]) / (scores[k] - scores[k - 1])
    return float(costs[k - 1] + min(share, 1.0) * (costs[k] - costs[k - 1]))


def _unit_means(
    value_SN: Float[np.ndarray, "s n"], unit_N: np.ndarray, num_resamples: int, stream: tuple[int, int]
) -> Float[np.ndarray, "resamples s"]:
    """Means of a task for each seed under resampled units; NaN for a single unit, unless it cannot vary."""
    size_U = np.bincount(unit_N).astype(np.float64)
    total_US = np.stack([np.bincount(unit_N, weights=values) for values in value_SN], axis=1)
    units = len(size_U)
    if units == 1:
        return np.full((num_resamples, len(value_SN)), math.nan)
    weight_RU = _weights(stream, units, num_resamples)
    means: Float[np.ndarray, "resamples s"] = (weight_RU @ total_US) / (weight_RU @ size_U)[:, None]
    return means


@functools.lru_cache(maxsize=8)  # methods share their draws: 8 tables of R x U numbers are held at once
def _weights(stream: tuple[int, int], number: int, num_resamples: int) -> Float[np.ndarray, "resamples n"]:
    """Weights of `number` units, mean 1, from as many draws with replacement; all 1 for a single unit."""
    counts = draw_counts(number, num_resamples, np.random.default_rng(stream))
    weights = np.asarray(1 + math.sqrt(number / max(number - 1, 1)) * (counts - 1.0))
    weights.setflags(write=False)
    return weights
