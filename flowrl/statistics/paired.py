"""Intervals for the numbers of an evaluation, and the comparison of two models.

Intervals (`flowrl.statistics.means`) cover other prompts of the same kind. None of them covers another training run:
for that, evaluate several runs; `over_runs` takes their means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from flowrl.statistics.bootstrap import DETECTABLE_ERRORS, LEVEL, Interval
from flowrl.statistics.means import Rows, ScoreRow, over_seeds, paired_rows, pooled, stratified_score, task_scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Scores of one subject: `macro` the mean of the task means, `micro` the mean over images, `any_correct` the share
    of prompts with a positive value among their images (pass@samples); `tasks` in the order asked for."""

    macro: Interval
    micro: Interval
    any_correct: Interval
    tasks: dict[str, Interval]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Summary):
    """Subject minus base, over pairs with the same prompt and sample; `gained` and `lost` count changed pairs."""

    gained: int
    lost: int
    pairs: int


def summarise(rows: Rows, *, order: Sequence[str] = ()) -> Summary:
    """Means of values with 95 % intervals; tasks of `order` first, others after them by name."""
    return Summary(**_numbers(list(rows), None, order))


def compare(base: Rows, subject: Rows, *, order: Sequence[str] = ()) -> Comparison:
    """Compares a subject with its base. Raises ValueError: a row has no partner with its prompt and sample."""
    before, after = list(base), list(subject)
    changes = [row.value for row in paired_rows(before, after)]
    gained, lost = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    return Comparison(**_numbers(after, before, order), gained=gained, lost=lost, pairs=len(changes))


def _numbers(rows: Sequence[ScoreRow], base: Sequence[ScoreRow] | None, order: Sequence[str]) -> dict[str, Any]:
    """The fields of a `Summary`, from rows or from their differences to a base."""
    rank = defaultdict(lambda: len(order), {name: place for place, name in enumerate(order)})
    tasks = task_scores(rows, base=base)
    return {
        "macro": stratified_score(rows, base=base),
        "micro": pooled(rows, base=base),
        "any_correct": pooled(best_of_prompt(rows), base=None if base is None else best_of_prompt(base)),
        "tasks": {name: tasks[name] for name in sorted(tasks, key=lambda name: (rank[name], name))},
    }


def best_of_prompt(rows: Rows) -> list[ScoreRow]:
    """One row per prompt: the largest value of its images."""
    best: dict[tuple[str, int | str], float] = {}
    for row in rows:
        key = (row.task, row.prompt)
        best[key] = max(best.get(key, -np.inf), float(row.value))
    return [ScoreRow(task=task, prompt=prompt, sample=0, value=value) for (task, prompt), value in best.items()]


def detectable(interval: Interval, *, paired: bool) -> float:
    """The smallest true difference that a comparison like this one would find with 80 % power at 5 %, two-sided.

    This is `DETECTABLE_ERRORS` standard errors; the error is the interval's half width over z(0.95). `interval` belongs
    to a paired difference, or to one model if `paired` is false: the error between two such models with independent
    noise is then sqrt(2) larger, and sharing noise can only help. NaN if the interval is unknown.
    """
    error = (interval.high - interval.low) / 2 / NormalDist().inv_cdf((1 + LEVEL) / 2)
    return DETECTABLE_ERRORS * error * (1.0 if paired else 2.0**0.5)


def over_runs(metrics: Sequence[Mapping[str, float]], *, shares: bool = False) -> dict[str, Interval]:
    """Mean of every metric over trainings of one method, with Student's t interval (`over_seeds`), without metrics that
    a run lacks or has not finite; with `shares`, those from 0 to 1 get bounds within this."""
    shared = [name for name in metrics[0] if all(name in row and np.isfinite(row[name]) for row in metrics)]
    found = {name: [row[name] for row in metrics] for name in shared}
    return {name: over_seeds(values, shares=shares) for name, values in found.items()}
