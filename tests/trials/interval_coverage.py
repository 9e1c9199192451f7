"""How often 95 % intervals hold the truth, and how often `compare` finds a difference between methods that are one.

    python tests/trials/interval_coverage.py --out docs/research/trials/interval_coverage.json

Evaluations are drawn whose truth is known; their intervals are those of the pages and tables. A share of verdicts has
steps: with ten images of one prompt each, no interval holds 0.98 in 95 of 100 evaluations, some do in 82 and the next
in 98. Costs to reach a score, trainings that share no seeds, UniGenBench's scores, how far a reward can be trusted,
distances from real images and ranks follow; `outside` lists every rate out of 0.93 to 0.97.

Letters: T tasks, P prompts, K images of a prompt, S seeds, G groups.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "claims"))

import numpy as np
from cost_coverage import COURSES, cost_coverage
from origin import origin

from flowrl.benchmarks.unigenbench.point_scores import Row, score_intervals
from flowrl.runtime.progress import progress
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.crossed import (
    crossed_estimate,
    estimate_of,
    independent_difference,
)
from flowrl.statistics.kernel_distance import kernel_interval
from flowrl.statistics.means import (
    CHANGES,
    SHARE_CHANGES,
    SINGLE,
    VERDICTS,
    ScoreRow,
    Stratum,
    over_seeds,
    score_of,
    stratified_score,
    weighted_score,
)
from flowrl.statistics.rank_sets import family_factor
from flowrl.statistics.ranking import paired_changes, rank_lines
from flowrl.statistics.reliability import agreement, rank_correlation, retest, spread

MIXED = (0.97, 0.75, 0.6, 0.8, 0.3, 0.35)
WORLD = ((3, 27), (2, 40), (9, 9), (4, 20), (8, 10), (24, 3))
"""Prompts of each task of the embedded world's held-out list, and about the images of each."""
LATENT = (1.9, 0.7, 0.25, 0.85, -0.5, -0.4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """An evaluation: prompts and images of each task, shares of right images, and how alike a prompt's images are.

    Attributes:
        layout: (P, K) of each task.
        means: share of right images of each task.
        icc: correlation of two verdicts of one prompt, of prompts drawn from a beta distribution; 0 where alike.
    """

    name: str
    layout: tuple[tuple[int, int], ...]
    means: tuple[float, ...] = MIXED
    icc: float = 0.0


def design(prompts: int, images: int, icc: float, means: tuple[float, ...] = MIXED) -> Design:
    """Six tasks of one size."""
    shown = "" if means == MIXED else f", p {means[0]}"
    return Design(name=f"{prompts} x {images}, icc {icc:g}{shown}", layout=((prompts, images),) * 6, means=means,
                  icc=icc)  # fmt: skip


def single_images(tasks: int, mean: float) -> Design:
    """Tasks of one image each, all of one share."""
    return Design(name=f"{tasks} tasks of one image, p {mean}", layout=((1, 1),) * tasks, means=(mean,) * tasks)


DESIGNS = (
    design(92, 4, 0.5), design(40, 1, 0.3), design(20, 4, 0.3), design(19, 4, 0.3), design(10, 4, 0.0),
    design(10, 4, 0.3), design(10, 4, 0.5), design(5, 4, 0.3), design(40, 1, 0.0, (0.98,) * 6),
    design(10, 1, 0.0, (0.98,) * 6), design(10, 1, 0.0, (0.5,) * 6),
    *(Design(name=f"3 to 24 prompts a task, icc {icc:g}", layout=WORLD, icc=icc) for icc in (0.0, 0.1, 0.3)),
    design(1, 40, 0.0), design(10, 4, 0.3, (0.98,) * 6), design(5, 40, 0.3),
    *(single_images(tasks, mean) for tasks in (10, 20, 50) for mean in (0.5, 0.8, 0.95)),
)  # fmt: skip


def parts_of(*runs: Sequence[np.ndarray]) -> dict[str, Stratum]:
    """Strata of runs, each a table [P, K] for every task; tasks of one image each are joined."""
    if all(table.size == 1 for table in runs[0]):
        value_SN = np.array([[table.item() for table in tables] for tables in runs], dtype=np.float64)
        return {SINGLE: (value_SN, np.arange(value_SN.shape[1]))}
    return {
        f"task {task}": (
            np.stack([table.ravel().astype(np.float64) for table in tables]),
            np.repeat(np.arange(len(tables[0])), tables[0].shape[1]),
        )
        for task, tables in enumerate(zip(*runs, strict=True))
    }


def score_coverage(asked: Design, repetitions: int, rng: np.random.Generator) -> dict[str, float]:
    """Coverage of the score, of its tasks (their mean, least and largest), of the mean over images, and of a change.

    The change is that to a second model with the same true shares, whose verdicts agree with the first one's in half of
    the images but for chance. Tasks of one image each have no intervals of their own.
    """
    sizes = np.array([prompts * images for prompts, images in asked.layout])
    truth, micro = float(np.mean(asked.means)), float(np.dot(sizes, asked.means) / sizes.sum())
    hits, tasks = np.zeros(3), np.zeros(len(asked.layout))
    for _ in range(repetitions):
        before, after = [], []
        for (prompts, images), mean in zip(asked.layout, asked.means, strict=True):
            share = np.full((prompts, 1), mean)
            if asked.icc:
                whole = 1 / asked.icc - 1
                share = rng.beta(mean * whole, (1 - mean) * whole, size=(prompts, 1))
            drawn = rng.random((2, prompts, images))
            drawn[1] = np.where(rng.random((prompts, images)) < 0.5, drawn[0], drawn[1])
            before.append(drawn[0] < share)
            after.append(drawn[1] < share)
        first = parts_of(before)
        change = parts_of([np.subtract(b, a, dtype=np.float64) for a, b in zip(before, after, strict=True)])
        hits += (holds(score_of(first, VERDICTS, by_task=True), truth),
                 holds(score_of(first, VERDICTS, by_task=False), micro),
                 holds(score_of(change, CHANGES, by_task=True), 0.0))  # fmt: skip
        if SINGLE not in first:
            tasks += [
                holds(score_of({name: part}, VERDICTS, by_task=True), mean)
                for (name, part), mean in zip(first.items(), asked.means, strict=True)
            ]
    tasks /= repetitions
    named = dict(zip(("score", "mean over images", "change"), hits / repetitions, strict=True))
    if SINGLE in first:
        return named
    return named | {"tasks": tasks.mean(), "least task": tasks.min(), "largest task": tasks.max()}


def reward_coverage(layout: Sequence[tuple[int, int]], repetitions: int, rng: np.random.Generator) -> float:
    """Coverage of the mean over images of a reward whose level and prompts differ between tasks of unequal sizes."""
    sizes = np.array([prompts * images for prompts, images in layout])
    level = np.arange(len(layout), dtype=np.float64)
    truth, hits = float(sizes @ level / sizes.sum()), 0
    for _ in range(repetitions):
        found = [
            mean + rng.normal(0, 0.5, (prompts, 1)) + rng.normal(0, 0.5, (prompts, images))
            for mean, (prompts, images) in zip(level, layout, strict=True)
        ]
        hits += holds(score_of(parts_of(found), None, by_task=False), truth)
    return hits / repetitions


def trainings(
    layout: Sequence[tuple[int, int]], methods: int, seeds: int, run_sd: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """Verdicts [methods, seeds, P, K] of each task: trainings of methods that are one, on the same prompts and noise.

    An image is right where its latent number is positive: the task's level, the prompt (standard deviation 0.7), the
    start noise (1), the training (run_sd), the training's way with the prompt (0.3) and with the image (0.7).
    """
    training = rng.normal(0, run_sd, (methods, seeds, 1, 1))
    return [
        level + rng.normal(0, 0.7, (prompts, 1)) + rng.normal(0, 1, (prompts, images)) + training
        + rng.normal(0, 0.3, (methods, seeds, prompts, 1)) + rng.normal(0, 0.7, (methods, seeds, prompts, images)) > 0
        for level, (prompts, images) in zip(LATENT, layout, strict=True)
    ]  # fmt: skip


def comparison_rates(
    layout: Sequence[tuple[int, int]], seeds: int, run_sd: float, repetitions: int, rng: np.random.Generator
) -> dict[str, float]:
    """False positives at 5 % of two methods that are one, and how often the intervals hold 0."""
    found = np.zeros(3)
    spread = []
    for _ in range(repetitions):
        tables = [
            np.subtract(after, before, dtype=np.float64) for before, after in trainings(layout, 2, seeds, run_sd, rng)
        ]
        difference = estimate_of(parts_of(*zip(*tables, strict=True)), CHANGES, by_task=True)
        found += (difference.p < 0.05, holds(difference.seeds, 0.0), holds(difference.interval, 0.0))
        half = difference.seeds.high - difference.mean
        spread.append(half)
    named = dict(zip(("false positives", "over seeds", "over seeds and prompts"), found / repetitions, strict=True))
    return named | {"mean half width of seeds": float(np.mean(spread))}


def score_over_seeds_coverage(
    layout: Sequence[tuple[int, int]], seeds: int, run_sd: float, repetitions: int, rng: np.random.Generator
) -> float:
    """Coverage of the score of other trainings on other prompts."""
    # Standard normal levels: the share of right images is that of the sum of all effects.
    total = (0.7**2 + 1 + run_sd**2 + 0.3**2 + 0.7**2) ** 0.5
    draws = rng.normal(size=1_000_000)
    truth = float(np.mean([np.mean(draws < level / total) for level in LATENT]))
    hits = 0
    for _ in range(repetitions):
        tables = [one for (one,) in trainings(layout, 1, seeds, run_sd, rng)]
        hits += holds(estimate_of(parts_of(*zip(*tables, strict=True)), VERDICTS, by_task=True).interval, truth)
    return hits / repetitions


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
    return float(np.mean([holds(over_seeds(share_S, shares=True), level) for share_S in draws]))


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


TRUST = (
    "reliability",
    "noise share",
    "noise std",
    "within std",
    "between prompts",
    "rank correlation",
    "mean distance",
)


def trust_coverage(groups: int, repetitions: int, rng: np.random.Generator) -> dict[str, float]:
    """Two measurements of G groups of six images: signal 1 within groups, 0.7 between them, noise 0.5."""
    between, apart = 0.49 / (0.49 + 1.25), 6 / math.pi * math.asin(1.49 / 1.74 / 2)
    truths = (0.8, math.sqrt(0.2), 0.5, math.sqrt(1.25), between, apart, 1 / math.sqrt(math.pi))
    label, (hits, known) = np.repeat(np.arange(groups), 6), np.zeros((2, len(TRUST)))
    for _ in range(repetitions):
        signal = rng.normal(0, 0.7, groups)[label] + rng.normal(0, 1, len(label))
        x, y = (signal + rng.normal(0, 0.5, len(label)) for _ in range(2))
        agreed, again, whole = agreement(x, y, label), retest(x, y, label), spread(x, label)
        found = [agreed.reliability, agreed.noise_share, again.noise_std, agreed.within_std, whole.between_prompts]
        found += [rank_correlation(x, y, label), again.mean]
        known += [interval.known for interval in found]
        hits += [one.known and holds(one, truth) for one, truth in zip(found, truths, strict=True)]
    return dict(zip(TRUST, hits / known, strict=True))


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
            lines = rank_lines(scores, changes, factor, ends=SHARE_CHANGES)
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


def further(repetitions: int, seed: int) -> Iterator[tuple[str, Any]]:
    """What else pages print, by name, each from random numbers of its own."""

    def rng(*place: int) -> np.random.Generator:
        return np.random.default_rng([seed, 3, *place])

    yield (
        "costs",
        [
            {"course": course.name, "seeds": seeds, "run_sd": run_sd}
            | rounded(cost_coverage(course, seeds, run_sd, repetitions, rng(0, place, seeds, round(1000 * run_sd))))
            for place, course in enumerate(COURSES)
            for seeds in (3, 5)
            for run_sd in (0.01, 0.024)
        ],
    )
    yield (
        "unlike seeds",
        [
            {"trainings": counts, "run_sd": run_sd}
            | rounded(independent_rates(counts, run_sd, repetitions // 4, rng(1, *counts, round(100 * run_sd))))
            for counts in ((2, 2), (3, 3), (3, 5), (5, 5), (1, 3))
            for run_sd in (0.0, 0.1, 0.2)
        ],
    )
    yield (
        "trainings",
        [
            {
                "share": share,
                "trainings": seeds,
                "holds": round(training_coverage(share, seeds, repetitions, rng(2)), 4),
            }
            for share in (0.5, 0.9, 0.97)
            for seeds in (2, 3, 5)
        ],
    )
    yield "weighted tasks", {"holds": round(weighted_coverage(repetitions // 2, rng(3)), 4)}
    yield (
        "test points",
        [
            {"prompts": prompts} | rounded(points_coverage(prompts, repetitions // 10, rng(4, prompts)))
            for prompts in (30, 60, 150)
        ],
    )
    yield (
        "trust",
        [
            {"groups": groups} | rounded(trust_coverage(groups, repetitions // 4, rng(5, groups)))
            for groups in (8, 24, 64)
        ],
    )
    yield (
        "distances",
        [
            {
                "images": images,
                "shift": shift,
                "holds": round(distance_coverage(images, shift, repetitions // 20, rng(6, images)), 4),
            }
            for images in (40, 100)
            for shift in (0.3, 0.8)
        ],
    )
    yield (
        "ranks",
        [{"models": models} | rounded(rank_coverage(models, repetitions // 20, rng(7, models))) for models in (3, 6)],
    )
    yield (
        "all pairs",
        [
            {"models": models, "holds": round(pair_coverage(models, repetitions // 20, rng(8, models)), 4)}
            for models in (3, 6)
        ],
    )


def rounded(rates: Mapping[str, float]) -> dict[str, float | None]:
    """To four digits; null for an infinite one."""
    return {name: round(float(rate), 4) if np.isfinite(rate) else None for name, rate in rates.items()}


RATES = {
    *TRUST,
    "score",
    "mean over images",
    "change",
    "tasks",
    "over seeds",
    "over seeds and prompts",
    "holds",
    "overall",
    "dimensions",
    "single trainings",
    "two trainings",
}
"""Names of rates that should be 0.95."""


def outside(found: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Every rate below 0.93 or above 0.97, with where it is from."""
    if isinstance(found, list):
        for one in found:
            yield from outside(one, words)
    elif isinstance(found, dict):
        what = [str(value) for key, value in found.items() if key in ("name", "course", "layout")]
        what += [
            f"{key} {found[key]}"
            for key in ("seeds", "trainings", "run_sd", "share", "prompts", "groups", "images", "shift", "models")
            if key in found
        ]
        for key, value in found.items():
            if key in RATES and isinstance(value, float) and not 0.93 <= value <= 0.97:
                yield ", ".join((*words, *what, key)) + f": {value}"
            elif isinstance(value, list | dict):
                yield from outside(value, (*words, key))


def main() -> None:
    """Measures everything and writes it."""
    parser = argparse.ArgumentParser(description="Coverage of intervals and false positives of comparisons.")
    parser.add_argument(
        "--out", type=Path, default=Path("interval_coverage.json"), metavar="PATH", help="file to write"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--repetitions", type=int, default=2000, metavar="N", help="evaluations of a design")
    parser.add_argument("--comparisons", type=int, default=1000, metavar="N", help="comparisons of a design")
    parser.add_argument("--costs", action="store_true", help="measure the part of costs again, and leave the others")
    asked = parser.parse_args()
    if asked.costs:
        found = json.loads(asked.out.read_text(encoding="utf-8"))
        found["costs"] = next(further(asked.repetitions, asked.seed))[1]
        found["origin of costs"], found["outside"] = origin(), list(outside(found))
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    layouts = {"5 x 1": ((5, 1),) * 6, "10 x 2": ((10, 2),) * 6, "5 x 4": ((5, 4),) * 6,
               "3 to 24 prompts a task": WORLD}  # fmt: skip
    pairs = [(name, seeds, run_sd) for name in layouts for seeds in (2, 3, 5) for run_sd in (0.0, 0.05, 0.1, 0.2)]
    found = {"origin": origin(), "asked": {k: v for k, v in vars(asked).items() if k != "out"}}
    with progress("designs", len(DESIGNS) + 1 + len(pairs) + 9) as advance:
        scores = []
        for number, one in enumerate(DESIGNS):
            rates = score_coverage(one, asked.repetitions, np.random.default_rng([asked.seed, 0, number]))
            scores.append(asdict(one) | {name: round(float(rate), 4) for name, rate in rates.items()})
            advance(one.name)
        found["evaluations"] = scores
        rng = np.random.default_rng([asked.seed, 1])
        found["rewards"] = {
            name: {"holds": round(reward_coverage(layout, asked.repetitions, rng), 4)}
            for name, layout in (("3 to 24 prompts a task", WORLD), ("5 to 40 prompts a task", ((5, 16), (40, 2))))
        }
        advance("rewards")
        compared = []
        for number, (name, seeds, run_sd) in enumerate(pairs):
            rng = np.random.default_rng([asked.seed, 2, number])
            rates = comparison_rates(layouts[name], seeds, run_sd, asked.comparisons, rng)
            rates["score"] = score_over_seeds_coverage(layouts[name], seeds, run_sd, asked.comparisons, rng)
            compared.append({"layout": name, "seeds": seeds, "run_sd": run_sd}
                            | {key: round(float(rate), 4) for key, rate in rates.items()})  # fmt: skip
            advance(f"{name}, {seeds} seeds, {run_sd:g}")
        found["comparisons"] = compared
        for name, rates in further(asked.repetitions, asked.seed):
            found[name] = rates
            advance(name)
    found["outside"] = list(outside(found))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
