"""Coverage of what a page prints besides means over prompts; `interval_coverage.py` runs and writes it.

Costs to reach a score, differences of trainings that share no seeds, means over trainings, UniGenBench's scores, how
far a reward can be trusted, distances of images from real ones, and ranks. Each function draws what is known and gives
the share of its intervals that hold the truth, those without bounds left out and counted.

Letters: S seeds, P prompts, K images of a prompt, G groups.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from flowrl.benchmarks.unigenbench.point_scores import Row, score_intervals
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.crossed import (
    Curve,
    cost_ratio,
    cost_to_reach,
    crossed_estimate,
    independent_difference,
    mean_curve,
)
from flowrl.statistics.kernel_distance import kernel_interval
from flowrl.statistics.means import ScoreRow, over_seeds, stratified_score, weighted_score
from flowrl.statistics.rank_sets import family_factor
from flowrl.statistics.ranking import paired_changes, rank_lines
from flowrl.statistics.reliability import agreement, rank_correlation, retest, spread

SHARE = 0.9
"""Of the reference's gain: the target of a comparison (`flowrl.comparing.comparison_result.SHARES`)."""


Side = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """True mean curves of a reference and of a method: network evaluations, and the score at each.

    Attributes:
        share: of the reference's gain as its drawn mean shows it; the target.
    """

    name: str
    reference: Side
    method: Side
    share: float = SHARE


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
    Course(
        name="two evaluations",
        reference=((0.0, 20.0, 40.0), (0.554, 0.630, 0.667)),
        method=((0.0, 20.0, 40.0), (0.554, 0.667, 0.724)),
    ),
)


def drawn(course: Side, seeds: int, run_sd: float, rng: np.random.Generator) -> list[Curve]:
    """Curves of S trainings: each has a level of its own after the start, and 0.01 at every evaluation."""
    costs, score_N = course[0], np.array(course[1])
    error_SN = rng.normal(0, run_sd, (seeds, 1)) + rng.normal(0, 0.01, (seeds, len(costs)))
    error_SN[:, 0] = 0.0
    return [(costs, row) for row in (score_N + error_SN).tolist()]


def cost_coverage(
    asked: Course, seeds: int, run_sd: float, repetitions: int, rng: np.random.Generator
) -> dict[str, float]:
    """How often the ratio of costs holds that of the true means at the target that was drawn, and how wide it is.

    `open` is the share of ratios without an upper end, `none` that of drawn means that do not reach the target.
    """
    hits = bounded = missing = 0
    factors = []
    for _ in range(repetitions):
        reference, method = (drawn(side, seeds, run_sd, rng) for side in (asked.reference, asked.method))
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


def rows(value_PK: np.ndarray, task: str = "t") -> list[ScoreRow]:
    """Images of P prompts, K of each."""
    return [ScoreRow(task=task, prompt=p, sample=k, value=float(v)) for (p, k), v in np.ndenumerate(value_PK)]


def verdicts(latent_PK: np.ndarray) -> list[ScoreRow]:
    """Images that are right where a latent number is positive."""
    return rows((latent_PK > 0).astype(float))


def independent_rates(
    counts: tuple[int, int], run_sd: float, repetitions: int, rng: np.random.Generator
) -> dict[str, float]:
    """Methods that are one, of unlike seeds and 60 prompts: false positives at 5 %, and how often intervals hold 0."""
    found = np.zeros(3)
    for _ in range(repetitions):
        prompt = rng.normal(0, 0.7, (60, 1)) + rng.normal(0, 1, (60, 2))
        sides = [
            [verdicts(prompt + rng.normal(0, run_sd) + rng.normal(0, 0.7, prompt.shape)) for _ in range(own)]
            for own in counts
        ]
        difference = independent_difference(*sides)
        found += (difference.p < 0.05, holds(difference.seeds, 0.0), holds(difference.interval, 0.0))
    return dict(zip(("false positives", "over seeds", "over seeds and prompts"), found / repetitions, strict=True))


def holds(interval: Interval, truth: float) -> bool:
    """Whether an interval, which must be known, holds the truth."""
    assert interval.known
    return interval.low - 1e-12 <= truth <= interval.high + 1e-12


def training_coverage(level: float, seeds: int, repetitions: int, rng: np.random.Generator) -> float:
    """Means over trainings of a share that varies between them about `level`, drawn from a beta distribution."""
    draws = rng.beta(level * 60, (1 - level) * 60, (repetitions, seeds))
    return float(np.mean([holds(over_seeds(share_S, scores=True), level) for share_S in draws]))


def weighted_coverage(repetitions: int, rng: np.random.Generator) -> float:
    """The mean of three tasks' shares, weighing 1, 2 and 5."""
    means, weights = (0.9, 0.5, 0.2), {"a": 1.0, "b": 2.0, "c": 5.0}
    truth = sum(mean * weight for mean, weight in zip(means, weights.values(), strict=True)) / 8
    hits = 0
    for _ in range(repetitions):
        listed: list[ScoreRow] = []
        for name, mean in zip(weights, means, strict=True):
            share = rng.beta(mean * 4, (1 - mean) * 4, (15, 1))
            listed += rows((rng.random((15, 4)) < share).astype(float), name)
        hits += holds(weighted_score(listed, weights), truth)
    return hits / repetitions


def points_coverage(prompts: int, repetitions: int, rng: np.random.Generator) -> dict[str, float]:
    """UniGenBench's overall and its dimensions: each prompt has points of 3 of 10 dimensions, 4 images."""
    names = [f"Dimension{k}" for k in range(10)]
    level, hits, known = np.linspace(0.3, 0.9, 10), Counter[str](), Counter[str]()
    for _ in range(repetitions):
        listed: list[Row] = []
        units: list[int] = []
        for prompt in range(prompts):
            asked = rng.choice(10, 3, replace=False)
            share = rng.beta(level[asked] * 3, (1 - level[asked]) * 3)
            for _ in range(4):
                listed.append(([names[k] for k in asked], (rng.random(3) < share).astype(int).tolist()))
                units.append(prompt)
        for name, interval in score_intervals(listed, units).items():
            truth = float(level.mean()) if name == "overall" else level[names.index(name)]
            kind = "overall" if name == "overall" else "dimensions"
            if interval.known:
                known[kind] += 1
                hits[kind] += holds(interval, truth)
    return {kind: hits[kind] / known[kind] for kind in known}


def trust_coverage(groups: int, repetitions: int, rng: np.random.Generator) -> dict[str, float]:
    """Two measurements of G groups of six images: signal 1 within groups, 0.7 between them, noise 0.5."""
    truths = {
        "reliability": 1 / 1.25,
        "noise share": math.sqrt(0.25 / 1.25),
        "noise std": 0.5,
        "within std": math.sqrt(1.25),
        "between prompts": 0.49 / (0.49 + 1.25),
        "rank correlation": 6 / math.pi * math.asin(1.49 / 1.74 / 2),
        "mean distance": 1 / math.sqrt(math.pi),
    }
    label, hits = np.repeat(np.arange(groups), 6), Counter[str]()
    for _ in range(repetitions):
        signal = rng.normal(0, 0.7, groups)[label] + rng.normal(0, 1, len(label))
        x, y = (signal + rng.normal(0, 0.5, len(label)) for _ in range(2))
        agreed, again = agreement(x, y, label), retest(x, y, label)
        found = {
            "reliability": agreed.reliability,
            "noise share": agreed.noise_share,
            "noise std": again.noise_std,
            "within std": agreed.within_std,
            "between prompts": spread(x, label).between_prompts,
            "rank correlation": rank_correlation(x, y, label),
            "mean distance": again.mean,
        }
        hits.update(name for name, truth in truths.items() if holds(found[name], truth))
    return {name: hits[name] / repetitions for name in truths}


def distance_coverage(images: int, shift: float, repetitions: int, rng: np.random.Generator) -> float:
    """The kernel distance of sets of four features of unit variance, apart by `shift` in each.

    With k(x, y) = exp(-|x - y|² / (2 D)) and normals of variance 1 in D features apart by d in each, the mean of k is
    (1 + 2 / D)^(-D / 2) exp(-D d² / (2 D + 4)).
    """
    features, hits = 4, 0
    near = (1 + 2 / features) ** (-features / 2)
    truth = 2 * near * (1 - math.exp(-features * shift**2 / (2 * features + 4)))
    for _ in range(repetitions):
        sets = rng.normal(size=(2, images, features))
        sets[0] += shift
        hits += holds(kernel_interval(sets[0], sets[1], range(images), num_resamples=500), truth)
    return hits / repetitions


def rank_coverage(models: int, repetitions: int, rng: np.random.Generator) -> dict[str, float]:
    """How often the sets of ranks hold all true ranks at once, and those of methods of two trainings each."""
    level = np.linspace(0.0, 0.6, models)
    hits = np.zeros(2)
    for _ in range(repetitions):
        hard = rng.normal(0, 1, (40, 2))
        for place, trainings in enumerate((1, 2)):
            runs = {
                f"m{k}": [verdicts(hard + level[k] + rng.normal(0, 0.5, hard.shape)) for _ in range(trainings)]
                for k in range(models)
            }
            scores = {name: crossed_estimate(own).interval for name, own in runs.items()}
            changes, factor = paired_changes(runs, by_task=True)
            lines = rank_lines(scores, changes, factor)
            hits[place] += all(line.rank[0] <= models - int(line.name[1:]) <= line.rank[1] for line in lines)
    return dict(zip(("single trainings", "two trainings"), hits / repetitions, strict=True))


def pair_coverage(models: int, repetitions: int, rng: np.random.Generator) -> float:
    """How often the widened differences of all pairs of models that are one hold 0 together."""
    hits = 0
    for _ in range(repetitions):
        hard = rng.normal(0, 1, (40, 2))
        found = [verdicts(hard + rng.normal(0, 0.5, hard.shape)) for _ in range(models)]
        factor = family_factor(found, by_task=True)
        changes = [stratified_score(b, base=a) for i, a in enumerate(found) for b in found[i + 1 :]]
        hits += all(abs(one.mean) <= factor * (one.high - one.low) / 2 + 1e-12 for one in changes)
    return hits / repetitions
