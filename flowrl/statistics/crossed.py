"""Statistics of a comparison: intervals over training seeds and prompts together, and the cost of many comparisons.

Every seed of a method answers the same prompts, so seeds and prompts cross. With

    A   variance of the mean over seeds, from the spread of the seeds' scores: s² / S
    B   variance of the mean over prompts, each image taken as its mean over seeds (`flowrl.statistics.means`)
    C   the part in both A and B: the same for each seed's deviations from those means, over S (S - 1)

the variance of the mean over seeds and prompts is A + max(B - C, 0), and its interval Student's with Satterthwaite's
degrees of freedom. The p of a difference comes from Student's t over the seeds' differences. It asks whether training
again would find a difference on these prompts, and assumes nothing about the spread of seeds. Shares of verdicts move
in steps of one image, so a few seeds can agree by chance. Their standard deviation is therefore taken as at least that
of rounding to such steps, step / sqrt(12) (Sheppard 1898). If other numbers agree in all seeds, their spread is
unknown, and bounds and p are NaN.

Trainings are paired only by seed. Trainings with different seeds share nothing, so any pairing would be arbitrary: A
and C are then the sums over both sides (Welch 1947), and only prompts are paired.

Letters: S seeds, N images, T tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from flowrl.runtime.shapes import Float
from flowrl.statistics.bootstrap import LEVEL, POWER, Interval, point, student_quantile
from flowrl.statistics.means import (
    CHANGES,
    SHARE_CHANGES,
    SHARES,
    VERDICTS,
    Part,
    Range,
    Rows,
    Stratum,
    added_images,
    bound,
    combine,
    part_of,
    score_of,
    strata,
    student,
    weights_of,
)

ROUNDING = 12**-0.5  # standard deviation of what rounding to whole steps leaves, in steps
STEPS = 256  # places between two points of a curve at which its bounds are looked for

Curve = tuple[Sequence[float], Sequence[float]]
"""Costs in ascending order, and the score at each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over seeds and prompts."""

    interval: Interval
    """Over training seeds and prompts; for a single seed, over prompts only."""
    seeds: Interval
    """Student's interval over the seeds' means, on these prompts; NaN bounds for a single seed."""
    p: float
    """Of `seeds` against 0, two-sided; NaN for a single seed."""
    detectable: float
    """The smallest true value that Student's test over as many seeds finds with 80 % power at 5 %, two-sided, if their
    spread is the observed one (noncentral t); NaN for a single seed."""

    @property
    def mean(self) -> float:
        """The mean itself."""
        return self.interval.mean


def crossed_estimate(runs: Sequence[Rows], *, by_task: bool = True) -> Estimate:
    """Mean over seeds of a score, with its uncertainty.

    Args:
        runs: [S] rows of the same images (task, prompt, sample) for every seed.
        by_task: the score is the mean over tasks of the mean over a task's images ("macro"); else over all images.

    Raises ValueError: no runs, or runs with different images.
    """
    return estimate_of(*strata(runs), by_task=by_task)


def crossed_difference(before: Mapping[int, Rows], after: Mapping[int, Rows], *, by_task: bool = True) -> Estimate:
    """The `crossed_estimate` of after minus before, from the differences of the same seed and image; both map a seed to
    its images. Raises ValueError: only one side has a seed, or an image."""
    if lonely := before.keys() ^ after.keys():
        raise ValueError(
            f"seed {min(lonely, key=str)} was trained on one side only: trainings are paired by their seed, and in no "
            "other order. Leave it out, or take `independent_difference` (Welch's), which pairs no trainings"
        )
    return estimate_of(*strata([after[seed] for seed in before], list(before.values())), by_task=by_task)


def independent_difference(before: Sequence[Rows], after: Sequence[Rows], *, by_task: bool = True) -> Estimate:
    """The mean of after minus the mean of before if their trainings share no seeds: Welch's, with paired prompts. A
    side with a single training adds no spread: the result is for it only. Errors: `crossed_estimate`."""
    parts, ends = strata([*after, *before])
    changed = {VERDICTS: CHANGES, SHARES: SHARE_CHANGES}.get(ends) if ends else None
    return estimate_of(parts, changed, by_task=by_task, against=len(before))


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values: the k-th smallest of m is multiplied by m - k + 1, made monotone, at most 1.

    The chance of any false discovery then stays below the level (Holm 1979). NaN stays and counts as no comparison.
    """
    known = sorted((value, name) for name, value in p.items() if math.isfinite(value))
    adjusted, highest = dict.fromkeys(p, math.nan), 0.0
    for rank, (value, name) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * value))
        adjusted[name] = highest
    return adjusted


def aligned(curves: Sequence[Curve]) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " s n"]]:
    """Interpolates curves linearly at every cost of any curve, as far as all curves reach, so that their spread
    includes how costs differ between seeds."""
    costs = np.unique(np.concatenate([np.asarray(cost, dtype=np.float64) for cost, _ in curves]))
    costs = costs[costs <= min(max(cost) for cost, _ in curves)]
    return costs, np.stack([np.interp(costs, cost, score) for cost, score in curves])


def mean_curve(curves: Sequence[Curve]) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Mean over seeds of `aligned` curves."""
    costs, score_SN = aligned(curves)
    return costs, score_SN.mean(axis=0)


def cost_to_reach(cost: ArrayLike, score: ArrayLike, target: float) -> float:
    """The cost at which a curve first reaches a score, interpolated linearly; infinite if it never does."""
    costs, scores = np.asarray(cost, dtype=np.float64), np.asarray(score, dtype=np.float64)
    reached = np.flatnonzero(scores >= target - 1e-12)
    if not len(reached):
        return math.inf
    last = slice(max(int(reached[0]) - 1, 0), int(reached[0]) + 1)
    return float(np.interp(target, scores[last], costs[last]))


def cost_interval(curves: Sequence[Curve], target: float) -> Interval:
    """The cost at which the mean of the seeds' curves reaches `target`, with bounds over other seeds.

    The bounds hold every cost at which Student's test over the seeds cannot tell their interpolated scores from the
    target, up to where they have passed it (the inversion of Fieller 1954). If this includes the last cost, `high` is
    infinite: the mean of other seeds might never reach the target. The bounds are NaN for one seed, if all seeds agree,
    or if the mean does not reach the target.
    """
    costs, score_SN = aligned(curves)
    mean = cost_to_reach(costs, score_SN.mean(axis=0), target)
    if len(curves) < 2 or not math.isfinite(mean):
        return point(mean)
    place = np.linspace(0, len(costs) - 1, STEPS * (len(costs) - 1) + 1)
    score_SP = np.stack([np.interp(place, np.arange(len(costs)), score) for score in score_SN])
    half_P = student_quantile(LEVEL, len(curves) - 1) * score_SP.std(axis=0, ddof=1) / math.sqrt(len(curves))
    near = np.flatnonzero(np.abs(score_SP.mean(axis=0) - target) <= half_P)
    if not len(near) or half_P[near].max() < 1e-12:
        return point(mean)
    costs_P = np.interp(place, np.arange(len(costs)), costs)
    ends = [part[-1] for part in np.split(near, np.flatnonzero(np.diff(near) > 1) + 1)]
    last = next((end for end in ends if costs_P[end] >= mean), near[-1])
    return bound(mean, float(costs_P[near[0]]), math.inf if last == len(place) - 1 else float(costs_P[last]), None)


def cost_ratio(reference: Sequence[Curve], method: Sequence[Curve], target: float) -> Interval:
    """How many times less a method costs to reach a score: t / u, with t the reference's `cost_interval` and u its own.

    Sides are curves (cost, score), one for each seed. The bounds are joined on the logarithm (Zou and Donner 2008):

        low  = t / u exp(-sqrt(ln²(t / t_low) + ln²(u_high / u)))
        high = t / u exp(+sqrt(ln²(t_high / t) + ln²(u / u_low)))

    `high` is infinite if the reference might never reach the score; `low` is 0 if the method might never reach it.
    Choose a target below the reference's plateau, where costs are arbitrary. NaN if a mean does not reach it.
    """
    sides = [cost_interval(curves, target) for curves in (reference, method) if curves]
    if len(sides) < 2 or not all(0 < side.mean < math.inf for side in sides):
        return point(math.nan)
    with np.errstate(divide="ignore"):
        (t, t_low, t_high), (u, u_low, u_high) = (np.log([side.mean, side.low, side.high]) for side in sides)
    low, high = t - u - np.hypot(t - t_low, u_high - u), t - u + np.hypot(t_high - t, u - u_low)
    return Interval(mean=float(np.exp(t - u)), low=float(np.exp(low)), high=float(np.exp(high)))


def estimate_of(parts: Mapping[str, Stratum], ends: Range | None, *, by_task: bool, against: int = 0) -> Estimate:
    """The estimate of scores, or of differences, from the `strata` of S runs.

    Args:
        parts: values of all runs.
        ends: ends of the values, or of their differences.
        by_task: as for `crossed_estimate`.
        against: number of last runs that belong to another method with seeds of its own, and are subtracted.
    """
    weights, held = weights_of(parts, by_task=by_task)
    count = len(next(iter(parts.values()))[0])
    sides = [(1.0, slice(count - against)), (-1.0, slice(count - against, count))][: 2 if against else 1]
    means = {
        task: (np.array([sum(sign * value_SN[runs].mean(axis=0) for sign, runs in sides)]), unit_N)
        for task, (value_SN, unit_N) in parts.items()
    }
    several = [runs for _, runs in sides if len(range(count)[runs]) > 1]
    if not several:
        interval = score_of(means, ends, by_task=by_task)
        return Estimate(interval=interval, seeds=point(interval.mean), p=math.nan, detectable=math.nan)
    # The images that verdicts add are spread over the seeds; of differences the seeds themselves show the spread.
    verdicts = ends if ends == VERDICTS else None
    prompts = combine([part_of(mean_1N[0], unit_N, verdicts, extra / count) for (mean_1N, unit_N), extra
                        in zip(means.values(), added_images(verdicts, held), strict=True)], weights)  # fmt: skip
    found = zip(*(_spread(parts, weights, runs, ends) for runs in several), strict=True)
    seeds, shared = (combine(over, [1.0] * len(several)) for over in found)
    total, mean = replace(seeds, mean=prompts.mean, centre=prompts.centre), prompts.mean
    if not prompts.variance <= shared.variance:
        variance = seeds.variance + prompts.variance - shared.variance  # NaN where that of prompts is unknown
        squares = sum(part.variance**2 / part.degrees for part in (seeds, prompts, shared))
        least = min(seeds.degrees, prompts.degrees)  # of a sum; what is subtracted may take it to nearly nothing
        total = replace(total, variance=variance, degrees=max(variance**2 / squares, least))
    over_seeds = student(replace(seeds, mean=mean, centre=mean), ends)
    if not over_seeds.known:
        return Estimate(interval=student(total, ends), seeds=over_seeds, p=math.nan, detectable=math.nan)
    from scipy.special import nctdtrinc, stdtr  # of the extra `compare`, which trainings do without

    error = math.sqrt(seeds.variance)
    return Estimate(
        interval=student(total, ends),
        seeds=over_seeds,
        p=2 * float(stdtr(seeds.degrees, -abs(mean) / error)),
        # Standard errors at which the test at 5 % has 80 % power: 5.65 for 2 degrees, 2.80 for many.
        detectable=error * float(nctdtrinc(seeds.degrees, 1 - POWER, student_quantile(LEVEL, seeds.degrees))),
    )


def _spread(
    parts: Mapping[str, Stratum], weights: Sequence[float], runs: slice, ends: Range | None
) -> tuple[Part, Part]:
    """The variances A and C of the seeds of one side, as means of 0."""
    values = [(value_SN[runs], unit_N) for value_SN, unit_N in parts.values()]
    means = [weight * value_SN.mean(axis=1) for weight, (value_SN, _) in zip(weights, values, strict=True)]
    seeds, variance = len(means[0]), float(np.var(sum(means), ddof=1))
    if ends is not None and ends.verdicts:
        variance = max(variance, (ROUNDING / sum(len(unit_N) for _, unit_N in values)) ** 2)
    rest = [(value_SN - value_SN.mean(axis=0), unit_N) for value_SN, unit_N in values]
    each = [combine([part_of(rest_SN[seed], unit_N, None, 0.0) for rest_SN, unit_N in rest], weights)
            for seed in range(seeds)]  # fmt: skip
    shared, free = sum(part.variance for part in each), min(part.degrees for part in each)
    found = (variance / seeds, seeds - 1), (shared / (seeds * (seeds - 1)), (seeds - 1) * free)
    over_seeds, common = (Part(mean=0.0, centre=0.0, variance=part, degrees=degrees) for part, degrees in found)
    return over_seeds, common
