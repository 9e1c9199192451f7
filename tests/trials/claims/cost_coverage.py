"""Curves of scores over costs whose truth is known, and how often the ratio of costs to a score holds it: a part of
`interval_coverage.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flowrl.statistics.crossed import Curve, cost_ratio, cost_to_reach, mean_curve

SHARE = 0.9
"""Of the reference's gain: the target of a comparison (`flowrl.comparing.comparison_result.SHARES`)."""


Side = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """True mean curves of a reference and of a method: network evaluations, and the score at each; the target is a
    share of the gain that the reference's drawn mean shows."""

    name: str
    reference: Side
    method: Side
    share: float = SHARE
    cost_sd: float = 0.0
    """Spread of the costs of trainings, such as seconds, as a part of them."""


AT = (0.0, 41.0, 83.0, 124.0, 165.0)
PLATEAU = (0.554, 0.650, 0.685, 0.704, 0.704)
RISING = (0.554, 0.604, 0.654, 0.704, 0.754)
FAST = ((0.0, 27.0, 54.0, 82.0, 109.0), (0.550, 0.755, 0.802, 0.828, 0.835))
COURSES = (
    Course(name="plateau, a faster method", reference=(AT, PLATEAU), method=FAST),
    Course(name="plateau, the same method", reference=(AT, PLATEAU), method=(AT, PLATEAU)),
    Course(name="plateau, to its end", reference=(AT, PLATEAU), method=FAST, share=1.0),
    Course(name="still rising, a faster method", reference=(AT, RISING), method=FAST),
    Course(name="still rising, the same method", reference=(AT, RISING), method=(AT, RISING)),
    Course(name="plateau, a faster method, by time", reference=(AT, PLATEAU), method=FAST, cost_sd=0.1),
    Course(name="plateau, the same method, by time", reference=(AT, PLATEAU), method=(AT, PLATEAU), cost_sd=0.1),
    Course(name="still rising, the same method, by time", reference=(AT, RISING), method=(AT, RISING), cost_sd=0.1),
    Course(
        name="two evaluations",
        reference=((0.0, 20.0, 40.0), (0.554, 0.630, 0.667)),
        method=((0.0, 20.0, 40.0), (0.554, 0.667, 0.724)),
    ),
)


def drawn(course: Side, seeds: int, run_sd: float, rng: np.random.Generator, cost_sd: float = 0.0) -> list[Curve]:
    """Curves of S trainings: each has a level of its own after the start, 0.01 at every evaluation, and its pace."""
    costs, score_N = course[0], np.array(course[1])
    error_SN = rng.normal(0, run_sd, (seeds, 1)) + rng.normal(0, 0.01, (seeds, len(costs)))
    error_SN[:, 0] = 0.0
    paces = np.exp(rng.normal(0, cost_sd, seeds)) if cost_sd else np.ones(seeds)
    return [(np.array(costs) * pace, row) for pace, row in zip(paces, (score_N + error_SN).tolist(), strict=True)]


def cost_coverage(
    asked: Course, seeds: int, run_sd: float, repetitions: int, rng: np.random.Generator
) -> dict[str, float]:
    """How often the ratio of costs holds that of the true means at the target that was drawn, and how wide it is.

    `open` is the share of ratios without an upper end, `none` that of drawn means that do not reach the target.
    """
    hits = bounded = missing = 0
    factors = []
    for _ in range(repetitions):
        sides = (asked.reference, asked.method)
        reference, method = (drawn(side, seeds, run_sd, rng, asked.cost_sd) for side in sides)
        _, score_N = mean_curve(reference)
        target = score_N[0] + asked.share * (score_N[-1] - score_N[0])
        found = cost_ratio(reference, method, target)
        if math.isnan(found.low):
            missing += 1
            continue
        true, own = cost_to_reach(*asked.reference, target), cost_to_reach(*asked.method, target)
        hits += found.low <= (true / own if math.isfinite(own) else 0.0) <= found.high
        bounded += math.isfinite(found.high)
        factors.append(found.mean / found.low if found.low > 0 else math.inf)
    counted = repetitions - missing
    return {
        "holds": hits / counted,
        "open": 1 - bounded / counted,
        "none": missing / repetitions,
        "median mean over low": float(np.median(factors)),
    }
