"""Confidence sets for the ranks of all models together, from paired differences of their scores.

A model surely lies above another if the interval of their difference excludes 0. Many intervals are read at once, so
all are widened by one factor, with which they hold together in 95 % of cases:

    factor = max(1, q / z(0.95)),   q the 95 % quantile over resamples of   max over pairs |D* - D| / sd(D*)

with D* the difference of two models on prompts drawn with replacement, the same draw for all models. Then a model's
rank is at least 1 + the number of models surely above it, and at most the number of all less those surely below it
(Mogstad, Romano, Shaikh and Wilhelm, "Inference for ranks", Review of Economic Studies 2024).

Letters: M models, N images, U units (prompts), R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np

from flowrl.runtime.shapes import Float
from flowrl.statistics.bootstrap import LEVEL, MAX_DRAWS, Interval, draw_counts
from flowrl.statistics.means import Range, Rows, Units, bound, strata, weights_of

RESAMPLES = 2000
_NORMAL = NormalDist().inv_cdf((1 + LEVEL) / 2)


def family_factor(models: Sequence[Rows], *, by_task: bool) -> float:
    """The factor that widens 95 % intervals of all pairs' differences of [M] models, rows of the same images (task,
    prompt, sample), to hold together; 1 for a single pair. `by_task`: the score is the mean over tasks of the mean over
    a task's images, else over all images."""
    parts, _ = strata(models)
    if len(models) < 3:
        return 1.0
    weights, _ = weights_of(parts, by_task=by_task)
    rng = np.random.default_rng(0)
    score_RM = np.zeros((RESAMPLES, len(models)))
    for weight, (value_MN, unit_N) in zip(weights, parts.values(), strict=True):
        score_RM += weight * _resampled_means(value_MN, unit_N, rng)
    largest_R = np.zeros(RESAMPLES)
    for first in range(len(models) - 1):
        change_RK = score_RM[:, first + 1 :] - score_RM[:, first : first + 1]
        change_RK = change_RK - change_RK.mean(axis=0)
        spread_K = change_RK.std(axis=0)
        moving = spread_K > 1e-12
        if moving.any():
            largest_R = np.maximum(largest_R, (np.abs(change_RK[:, moving]) / spread_K[moving]).max(axis=1))
    return max(1.0, float(np.quantile(largest_R, LEVEL)) / _NORMAL)


def factor_of_pairs(pairs: int) -> float:
    """The factor from the number of pairs alone (Bonferroni), without resamples; never too small."""
    return NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / max(1, pairs)) / _NORMAL


def widen(interval: Interval, factor: float, ends: Range | None = None) -> Interval:
    """The interval with both arms longer by the factor, cut to `ends`."""
    mean, low, high = interval.mean, interval.low, interval.high
    return bound(mean, mean - factor * (mean - low), mean + factor * (high - mean), ends)


def rank_sets(count: int, differences: Mapping[tuple[int, int], Interval]) -> list[tuple[int, int]]:
    """The best and the worst possible rank of each model; 1 is the highest score.

    Args:
        differences: score of the first minus that of the second, with bounds that hold for all pairs together. The
            order of a pair is open if it is missing or its bounds are unknown.
    """
    above, below = [0] * count, [0] * count
    for (first, second), change in differences.items():
        if change.excludes(0.0):
            winner, loser = (first, second) if change.mean > 0 else (second, first)
            below[winner] += 1
            above[loser] += 1
    return [(1 + above[model], count - below[model]) for model in range(count)]


def _resampled_means(
    value_MN: Float[np.ndarray, " m n"], unit_N: Units, rng: np.random.Generator
) -> Float[np.ndarray, " r m"]:
    """Means of a task's images over resampled prompts, minus the observed mean, widened by sqrt(U/(U-1))."""
    unit_N = unit_N if unit_N.max() > 0 else np.arange(len(unit_N))
    units = int(unit_N.max()) + 1
    if units == 1:  # a single image, whose spread is unknown
        return np.zeros((RESAMPLES, len(value_MN)))
    size_U = np.bincount(unit_N).astype(np.float64)
    sum_UM = np.stack([np.bincount(unit_N, weights=value_N) for value_N in value_MN], axis=1)
    found, chunk = [], max(1, MAX_DRAWS // units)
    for start in range(0, RESAMPLES, chunk):
        count_RU = draw_counts(units, min(chunk, RESAMPLES - start), rng)
        found.append((count_RU @ sum_UM) / (count_RU @ size_U)[:, None])
    mean_M = value_MN.mean(axis=1)
    return np.asarray(math.sqrt(units / (units - 1)) * (np.concatenate(found) - mean_M))
