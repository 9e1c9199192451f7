"""From run folders to the numbers of a comparison: scores, differences to the baseline, costs, KL and diversity.

Only finished runs count; the others are listed. Every interval is over training seeds and prompts together; p is over
training seeds (`flowrl.statistics.crossed`). If an image lacks a score in one evaluation, it is left out of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.comparing.question import BUDGETS, ComparisonQuestion, is_finished, run_name
from flowrl.config.spelling import closest
from flowrl.runs.evaluation_rows import GENEVAL, REWARD, SCORE, main_metric, score_rows
from flowrl.runs.run_data import RunData, read_run
from flowrl.runtime.files import read_json
from flowrl.statistics.bootstrap import Interval, point
from flowrl.statistics.crossed import (
    Curve,
    Estimate,
    cost_ratio,
    cost_to_reach,
    crossed_difference,
    crossed_estimate,
    holm,
    mean_curve,
)
from flowrl.statistics.means import ScoreRow, claim, partners

COSTS = ("nfe", "seconds")
SHARES = (1 / 3, 2 / 3, 0.9)
"""Shares of the baseline's gain whose cost is tabulated; the last lies below its plateau, where costs are arbitrary."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunResult:
    """A finished run. `before` and `after` are the images of its evaluation before training (None without one) and of
    the last; `start` is the run whose evaluation before training it shares."""

    method: str
    seed: int
    data: RunData
    start: RunData | None
    measured: Mapping[str, float]
    before: Sequence[ScoreRow] | None = None
    after: Sequence[ScoreRow] = ()

    @property
    def last(self) -> int:
        """Number of the last evaluation."""
        return max(self.data.image_rows)

    def evaluations(self) -> list[Mapping[str, Any]]:
        """Rows of the evaluations in order, the shared one before training first."""
        rows = list(self.data.evaluations)
        if rows and rows[0]["iteration"] != 0 and self.start is not None:
            first = [row for row in self.start.evaluations if row["iteration"] == 0]
            return [*first, *rows]
        return rows

    def spent(self, column: str) -> float:
        """Final value of a counter of the metrics."""
        return next((float(row[column]) for row in reversed(self.data.train) if column in row), math.nan)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MethodResult:
    """One row of the tables."""

    name: str
    runs: tuple[RunResult, ...]
    score: Estimate
    """Score at the end."""
    seed_scores: tuple[float, ...]
    gain: Estimate | None
    """Gain over the base; None without an evaluation before training."""
    difference: Estimate | None
    """Difference to the baseline, over the seeds that both finished; None for the baseline itself."""
    holm: float
    """p of the difference, adjusted for the number of methods; NaN if both share a single seed."""
    spent: Mapping[str, float]
    """Mean network evaluations ("nfe"), "images", "seconds" and "iterations"."""
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """By "nfe" or "seconds": (cost, score) at the evaluations, mean over seeds."""
    reach: Mapping[str, tuple[float, ...]]
    """By "nfe" or "seconds": cost of each target; infinite if it is not reached."""
    speed: Mapping[str, Interval]
    """The baseline's cost to reach the last target over this method's, by cost; NaN where unknown."""
    kl: float
    """`measure`'s distance from the base, mean over seeds."""
    diversity: float
    """`measure`'s spread of the images of a prompt, mean over seeds."""

    @staticmethod
    def of(
        name: str, runs: Sequence[RunResult], reference: Sequence[RunResult], metric: str, targets: Sequence[float]
    ) -> MethodResult:
        """A row of the tables, from a method's finished runs; `reference` are the baseline's runs."""
        by_task = metric == SCORE
        own = bool(reference) and reference[0].method == name
        befores = {run.seed: run.before for run in runs if run.before is not None}
        others = {} if own else {run.seed: run.after for run in reference}
        each = {cost: _curves(runs, cost, metric) for cost in COSTS}
        curves = {cost: mean_curve(found) for cost, found in each.items()}
        # The baseline shares every seed with itself: its ratio has no bounds.
        last = [math.nan, *targets][-1]
        ratios = {cost: cost_ratio(_curves(reference, cost, metric), each[cost], last) for cost in COSTS}
        return MethodResult(
            name=name,
            runs=tuple(runs),
            score=crossed_estimate([run.after for run in runs], by_task=by_task),
            seed_scores=tuple(crossed_estimate([run.after], by_task=by_task).mean for run in runs),
            gain=_difference(befores, runs, by_task=by_task),
            difference=_difference(others, runs, by_task=by_task),
            holm=math.nan,
            spent={
                **{unit: _mean(runs, methodcaller("spent", column)) for unit, column in BUDGETS.items()},
                "iterations": _mean(runs, lambda run: run.spent("iteration") + 1),
            },
            curves=curves,
            reach={cost: tuple(cost_to_reach(*curves[cost], target) for target in targets) for cost in COSTS},
            speed={cost: point(ratio.mean) if own else ratio for cost, ratio in ratios.items()},
            kl=_mean(runs, lambda run: run.measured.get("kl", math.nan)),
            diversity=_mean(runs, lambda run: run.measured.get("diversity", math.nan)),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Results:
    """A comparison in numbers; methods from the highest score to the lowest."""

    question: ComparisonQuestion
    journal: Mapping[str, Any]
    metric: str
    baseline: str
    base: Estimate | None
    base_diversity: float
    targets: tuple[float, ...]
    methods: tuple[MethodResult, ...]
    missing: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    claim: str  # the prompts that intervals speak of
    held_word: str  # what its prompts are called, as `RunData.held_word` says of each run

    def label(self, name: str) -> str:
        """A method's name without the words that all names begin with."""
        return short_names(list(self.question.methods))[name]


class NothingFinishedError(ValueError):
    """No run of a comparison has finished; `failed` are those that failed just now."""

    def __init__(self, folder: Path, failed: Sequence[str]) -> None:
        super().__init__(f"no run of {folder} is finished yet, so there is nothing to compare")
        self.failed = tuple(failed)


def read_results(
    folder: Path,
    question: ComparisonQuestion,
    *,
    baseline: str | None = None,
    metric: str | None = None,
    targets: str | None = None,
    failed: Sequence[str] = (),
) -> Results:
    """Reads the finished runs of a comparison.

    Args:
        baseline: method that the others are compared to; None takes the first.
        metric: key of the evaluation rows; None takes the GenEval score, or the first reward if there is none.
        targets: scores whose cost you want, such as "0.6,0.7"; None takes `SHARES` of the baseline's gain.
        failed: runs that failed just now; the error names them.

    Raises:
        NothingFinishedError: no run has finished.
        ValueError: the metric is unknown, or no image has a score in all evaluations.
    """
    journal = read_json(folder / "compare.json")
    runs, missing = _read_finished(folder, question, journal)
    if not runs:
        raise NothingFinishedError(folder, failed)
    baseline = baseline or next(iter(question.methods))
    metric = metric or main_metric(runs[0].data.evaluations[-1]) or SCORE
    runs, left_out = _with_shared_images(runs, metric)
    by_method: dict[str, list[RunResult]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    reference = by_method.get(baseline, [])
    alone = () if reference else (f"No run of the baseline {baseline} is finished: there are no differences to it.",)
    starts = [run.before for run in reference if run.before is not None]
    base = crossed_estimate(starts[:1], by_task=metric == SCORE) if starts else None
    wanted = _targets(targets, base, reference, metric)
    methods = [MethodResult.of(name, own, reference, metric, wanted) for name, own in by_method.items()]
    adjusted = holm({row.name: row.difference.p for row in methods if row.difference is not None})
    order = sorted(methods, key=lambda row: -row.score.mean)
    diversities = [run.measured["base_diversity"] for run in runs if "base_diversity" in run.measured]
    return Results(
        question=question, journal=journal, metric=metric, baseline=baseline, base=base,
        base_diversity=diversities[0] if diversities else math.nan, targets=wanted,
        methods=tuple(replace(row, holm=adjusted.get(row.name, math.nan)) for row in order),
        missing=tuple(missing), notes=(*alone, *left_out), claim=claim(runs[0].after),
        held_word=next((run.data.held_word for run in runs if run.data.held_word != "held-out"), "held-out"),
    )  # fmt: skip


def check_metric(metric: str, row: Mapping[str, Any], name: str) -> None:
    """Refuses a metric that a row of evaluation lacks."""
    keys = [key for key in row if key.startswith((GENEVAL, REWARD)) and not key.endswith(("_low", "_high"))]
    if metric not in keys:
        near = closest(metric, keys)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(keys)}"
        raise ValueError(f"`metric` {metric!r} is not in the evaluations of {name}: {hint}")


def _with_shared_images(runs: Sequence[RunResult], metric: str) -> tuple[list[RunResult], tuple[str, ...]]:
    """The runs with only the images that all evaluations scored, and a note. Raises ValueError: there are none."""
    for run in runs:
        check_metric(metric, run.data.evaluations[-1], run.data.name)
    found = [
        (
            score_rows(run.start.image_rows[0], metric) if run.start and 0 in run.start.image_rows else None,
            score_rows(run.data.image_rows[run.last], metric),
        )
        for run in runs
    ]
    sides = [side for pair in found for side in pair if side is not None]
    shared = partners(*sides)
    total = len({(row.task, row.prompt, row.sample) for side in sides for row in side})
    if not shared[0]:
        raise ValueError(
            f"no image has a value of {metric} in all {len(sides)} evaluations: were the runs evaluated on the same "
            "prompts and seeds, and did a reward fail everywhere in one of them?"
        )
    kept = iter(shared)
    joined = [
        replace(run, before=None if before is None else next(kept), after=next(kept))
        for run, (before, _) in zip(runs, found, strict=True)
    ]
    lost = total - len(shared[0])
    said = f"Left out everywhere: {lost} of {total} images, for which one evaluation or more has no score."
    return joined, (said,) if lost else ()


def short_names(methods: Sequence[str]) -> dict[str, str]:
    """Names without the words that all begin with: `tiny_nft`, `tiny_gspo` become `nft`, `gspo`."""
    first = next(iter(methods))
    cut = 0
    for index, letter in enumerate(first):
        if letter in "_-" and len(methods) > 1 and all(name.startswith(first[: index + 1]) for name in methods):
            cut = index + 1
    return {name: name[cut:] or name for name in methods}


def _read_finished(
    folder: Path, question: ComparisonQuestion, journal: Mapping[str, Any]
) -> tuple[list[RunResult], list[tuple[str, str]]]:
    read: dict[str, RunData] = {}
    missing: list[tuple[str, str]] = []
    entries = journal["runs"]
    for method, seed in question.runs:
        name = run_name(method, seed)
        if is_finished(folder / name):
            read[name] = read_run(folder / name)
        else:
            entry = entries.get(name, {})
            error = f": {entry['error']}" if "error" in entry else ""
            state = entry.get("state", "waiting")
            missing.append((name, ("its folder is gone" if state == "finished" else state) + error))
    donors: dict[Any, RunData] = {}
    for name, entry in entries.items():
        if (folder / name / "eval" / "iteration_000000.jsonl").is_file():
            donors.setdefault(entry.get("base"), read.get(name) or read_run(folder / name))
    runs = [
        RunResult(
            method=method,
            seed=seed,
            data=read[name],
            start=donors.get(entries.get(name, {}).get("base")),
            measured=read_json(path, "delete it, it is measured again")
            if (path := folder / name / "measure.json").is_file()
            else {},
        )
        for method, seed in question.runs
        if (name := run_name(method, seed)) in read and read[name].image_rows
    ]
    return runs, missing


def _targets(
    given: str | None, base: Estimate | None, reference: Sequence[RunResult], metric: str
) -> tuple[float, ...]:
    """Scores whose cost is tabulated; none if the baseline did not gain."""
    if given is not None:
        try:
            return tuple(float(part) for part in given.split(","))
        except ValueError as error:
            raise ValueError(f"`targets` {given!r}: give scores such as 0.6,0.7") from error
    if base is None or not reference:
        return ()
    _, score = mean_curve(_curves(reference, "nfe", metric))
    gain = float(score[-1]) - float(score[0])
    return tuple(float(score[0]) + share * gain for share in SHARES) if gain > 0 else ()


def _curves(runs: Sequence[RunResult], cost: str, metric: str) -> list[Curve]:
    """(cost, score) at the evaluations of each run."""
    curves, column = list[Curve](), BUDGETS[cost]
    for run in runs:
        rows = [row for row in run.evaluations() if metric in row and column in row]
        costs = [0.0 if row["iteration"] == 0 else float(row[column]) for row in rows]
        curves.append((costs, [float(row[metric]) for row in rows]))
    return curves


def _difference(
    others: Mapping[int, Sequence[ScoreRow]], runs: Sequence[RunResult], *, by_task: bool
) -> Estimate | None:
    """The difference of the last evaluations to those of `others`, over the seeds of both; None if they share none."""
    common = [run for run in runs if run.seed in others]
    if not common:
        return None
    before = {run.seed: others[run.seed] for run in common}
    return crossed_difference(before, {run.seed: run.after for run in common}, by_task=by_task)


def _mean(runs: Sequence[RunResult], value: Callable[[RunResult], float]) -> float:
    return float(np.mean([value(run) for run in runs]))
