"""Statistics of a comparison: intervals over training seeds and prompts together, and what many comparisons cost.

Every seed of a method answers the same prompts, so seeds and prompts cross. With

    A   variance of the mean over seeds, from the spread of the seeds' scores: s² / S
    B   variance of the mean over prompts, of every image its mean over seeds (`flowrl.statistics.means`)
    C   what A and B both hold: the same of each seed's deviations from those means, over S (S - 1)

the variance of the mean over seeds and prompts is A + max(B - C, 0), and its interval Student's with Satterthwaite's
degrees of freedom. The p of a difference is that of Student's t over the seeds' differences: it asks whether training
again would find a difference on these prompts, and needs no assumption about how much seeds spread. Shares of verdicts
move in steps of one image, so that few seeds can agree by chance: their standard deviation counts for no less than that
of rounding to such steps, step / sqrt(12) (Sheppard 1898).

Letters: S seeds, N images, T tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flowrl.runtime.shapes import Float
from flowrl.statistics.bootstrap import LEVEL, POWER, Interval, point
from flowrl.statistics.means import (
    VERDICTS,
    Ends,
    Part,
    Rows,
    Stratum,
    added_images,
    combine,
    part_of,
    score_of,
    strata,
    student,
    weights_of,
)
from flowrl.statistics.student import student_quantile

ROUNDING = 12**-0.5  # standard deviation of what rounding to whole steps leaves, in steps

Curve = tuple[Sequence[float], Sequence[float]]
"""Costs in ascending order, and the score at each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over seeds and prompts.

    Attributes:
        interval: over training seeds and prompts; of a single seed over prompts alone.
        seeds: Student's interval over the seeds' means, on these prompts; NaN bounds for a single seed.
        p: of `seeds` against 0, two-sided; NaN for a single seed.
        detectable: the smallest true value that Student's test over so many seeds would find with 80 % power at 5 %,
            two-sided, were their spread the one seen (noncentral t); NaN for a single seed.
    """

    interval: Interval
    seeds: Interval
    p: float
    detectable: float

    @property
    def mean(self) -> float:
        """The mean itself."""
        return self.interval.mean


def crossed_estimate(runs: Sequence[Rows], *, by_task: bool = True) -> Estimate:
    """Mean over seeds of a score, with its uncertainty.

    Args:
        runs: [S] the same images (task, prompt, sample) of every seed.
        by_task: the score is the mean over tasks of the mean over a task's images ("macro"); else over all images.

    Raises ValueError: no runs, or runs with different images.
    """
    return estimate_of(*strata(runs), by_task=by_task)


def crossed_difference(before: Sequence[Rows], after: Sequence[Rows], *, by_task: bool = True) -> Estimate:
    """`crossed_estimate` of after minus before, from the differences of the same seed and image. Raises ValueError:
    unequal numbers of seeds, or an image without its partner."""
    return estimate_of(*strata(after, before), by_task=by_task)


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


def mean_curve(curves: Sequence[Curve]) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
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


def speed_up(reference: Sequence[Curve], method: Sequence[Curve]) -> Interval:
    """How many times less a method costs to the reference's final score: the mean curves' costs, one over the other.

    Both sides are curves (cost, score), one for each seed. The interval speaks of other seeds: the jackknife's variance
    of the logarithm (Efron 1982, chapter 3), each side's seeds left out in turn, and Student's t with Satterthwaite's
    degrees of freedom. NaN where the mean does not reach that score or the reference gained nothing; NaN bounds for a
    single seed on either side, and where the mean without one seed does not reach it.
    """
    ratio = _cost_ratio(reference, method)
    if not math.isfinite(ratio) or min(len(reference), len(method)) < 2:
        return point(ratio)
    sides = [
        [_cost_ratio([*reference[:seed], *reference[seed + 1 :]], method) for seed in range(len(reference))],
        [_cost_ratio(reference, [*method[:seed], *method[seed + 1 :]]) for seed in range(len(method))],
    ]
    variances = [(len(side) - 1) ** 2 / len(side) * float(np.var(np.log(side), ddof=1)) for side in sides]
    squares = sum(variance**2 / (len(side) - 1) for variance, side in zip(variances, sides, strict=True))
    degrees = sum(variances) ** 2 / squares if squares > 0 else math.inf
    half = student_quantile(LEVEL, degrees) * math.sqrt(sum(variances))
    return Interval(mean=ratio, low=ratio * math.exp(-half), high=ratio * math.exp(half))


def _cost_ratio(reference: Sequence[Curve], method: Sequence[Curve]) -> float:
    cost, score = mean_curve(reference)
    if score[-1] <= score[0]:  # nothing was gained that could be reached
        return math.nan
    here = cost_to_reach(*mean_curve(method), float(score[-1]))
    return cost_to_reach(cost, score, float(score[-1])) / here if math.isfinite(here) and here > 0 else math.nan


def estimate_of(parts: Mapping[str, Stratum], ends: Ends | None, *, by_task: bool) -> Estimate:
    """The estimate of scores, or of differences, from what `strata` gives of S runs."""
    weights, held = weights_of(parts, by_task=by_task)
    score_S = sum(weight * value_SN.mean(axis=1) for weight, (value_SN, _) in zip(weights, parts.values(), strict=True))
    mean, count = float(np.mean(score_S)), len(np.asarray(score_S))
    if count == 1:
        return Estimate(
            interval=score_of(parts, ends, by_task=by_task), seeds=point(mean), p=math.nan, detectable=math.nan
        )
    spread = float(np.std(score_S, ddof=1))
    if ends is not None:
        spread = max(spread, ROUNDING / sum(len(unit_N) for _, unit_N in parts.values()))
    from scipy.special import nctdtrinc, stdtr  # of the extra `compare`, which trainings do without

    error = spread / math.sqrt(count)
    total = _crossed(list(parts.values()), weights, held, ends, error)
    return Estimate(
        interval=student(total, ends),
        seeds=student(Part(mean=mean, centre=mean, variance=error**2, degrees=count - 1)),
        p=2 * float(stdtr(count - 1, -abs(mean) / error)) if error else float(mean == 0),
        # Standard errors at which the test at 5 % has 80 % power: 5.65 for 2 degrees, 2.80 for many.
        detectable=error * float(nctdtrinc(count - 1, 1 - POWER, student_quantile(LEVEL, count - 1))),
    )


def _crossed(
    tasks: Sequence[Stratum], weights: Sequence[float], held: Sequence[int], ends: Ends | None, error: float
) -> Part:
    """The mean over seeds and prompts, from the standard error over seeds and the spread of prompts."""
    seeds = len(tasks[0][0])
    # The images that verdicts add are spread over the seeds; of differences the seeds themselves show the spread.
    verdicts = ends if ends == VERDICTS else None
    mean_N = [value_SN.mean(axis=0) for value_SN, _ in tasks]
    prompts = combine([part_of(mean, unit_N, verdicts, extra / seeds) for mean, (_, unit_N), extra
                        in zip(mean_N, tasks, added_images(verdicts, held), strict=True)], weights)  # fmt: skip
    deviations = [
        combine([part_of(value_SN[seed] - mean, unit_N, None, 0.0)
                  for mean, (value_SN, unit_N) in zip(mean_N, tasks, strict=True)], weights)
        for seed in range(seeds)
    ]  # fmt: skip
    shared = sum(part.variance for part in deviations) / (seeds * (seeds - 1))
    variance, degrees = error**2, float(seeds - 1)
    if math.isnan(prompts.variance):
        variance = math.nan
    elif prompts.variance > shared:
        squares = error**4 / degrees + prompts.variance**2 / prompts.degrees
        squares += shared**2 / (degrees * min(part.degrees for part in deviations))
        variance += prompts.variance - shared
        degrees = variance**2 / squares
    return Part(mean=prompts.mean, centre=prompts.centre, variance=variance, degrees=degrees)
