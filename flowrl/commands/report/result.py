"""What the run achieved: held-out scores before and after, and whether their difference is established."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.commands.report.run_data import Row, RunData, column, keys_below
from flowrl.statistics.bootstrap import (
    Interval,
    ScoreRow,
    paired_difference,
    paired_rows,
    stratified_score,
    task_scores,
)

SCORE = "eval/geneval/score"
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Held-out results of the first evaluation and, once there is a second, of the last."""

    metric: str  # the metric's name in metrics.jsonl
    label: str  # the same for readers
    first: int
    last: int  # iterations finished at either evaluation
    before: Interval
    after: Interval | None
    difference: Interval | None  # paired; None without image rows on both sides
    tasks_before: Mapping[str, Interval]
    tasks_after: Mapping[str, Interval]
    task_differences: Mapping[str, Interval]
    num_pairs: int
    num_unpaired: int  # image rows left out of the pairing: no verdict, or no partner

    @property
    def change(self) -> float:
        """After minus before, NaN before the second evaluation."""
        if self.difference is not None:
            return self.difference.mean
        return math.nan if self.after is None else self.after.mean - self.before.mean


def primary_metric(run: RunData) -> str | None:
    """GenEval's score where it was measured, else the first held-out reward; None for a run without evaluation."""
    keys = keys_below(run.evaluations, "eval/")
    rewards = [key for key in keys if key.startswith("eval/reward/")]
    return SCORE if SCORE in keys else rewards[0] if rewards else None


def held_out(run: RunData) -> Outcome | None:
    """Collect the outcome; None for a run without (readable) evaluation.

    Scores come from the metrics, differences and what the metrics lack from the image rows.
    """
    metric = primary_metric(run)
    rows = [row for row in run.evaluations if metric is not None and column([row], metric)[0].size]
    if metric is None or not rows:
        return None
    first, last = int(rows[0]["iteration"]), int(rows[-1]["iteration"])
    before_rows = score_rows(run.image_rows.get(first, ()), metric)
    after_rows = score_rows(run.image_rows.get(last, ()), metric) if last > first else []
    paired_before, paired_after = partners(before_rows, after_rows)
    is_score = metric == SCORE
    return Outcome(
        metric=metric,
        label="GenEval score" if is_score else f"reward {metric.removeprefix('eval/reward/')}",
        first=first,
        last=last,
        before=_interval(rows[0], metric, before_rows),
        after=_interval(rows[-1], metric, after_rows) if last > first else None,
        difference=paired_difference(paired_before, paired_after) if paired_before else None,
        tasks_before=_ordered(_tasks(rows[0], before_rows)) if is_score else {},
        tasks_after=_ordered(_tasks(rows[-1], after_rows)) if is_score and last > first else {},
        task_differences=task_scores(paired_rows(paired_before, paired_after)) if is_score and paired_before else {},
        num_pairs=len(paired_before),
        num_unpaired=max(len(run.image_rows.get(first, ())), len(run.image_rows.get(last, ()))) - len(paired_before),
    )


def verdict(outcome: Outcome) -> str:
    """A plain word on the difference: does its 95 % interval exclude zero?"""
    difference = outcome.difference
    if outcome.after is None:
        return "not measured yet"
    if difference is None or not difference.known:
        return "not testable"
    if not difference.excludes(0.0):
        return "not established"
    return "established improvement" if difference.mean > 0 else "established loss"


def score_rows(rows: Sequence[Row], metric: str) -> list[ScoreRow]:
    """Image rows with a value as score rows: the verdict for GenEval, else the named reward in one stratum."""
    found = {}
    for row in rows:
        rewards = row.get("rewards")
        if metric == SCORE:
            task, value = str(row.get("task")), row.get("correct")
        else:
            task, value = "all", rewards.get(metric.removeprefix("eval/reward/")) if isinstance(rewards, dict) else None
        prompt, sample = row.get("prompt_id", row.get("prompt")), row.get("sample", 0)
        if isinstance(value, int | float) and math.isfinite(value) and isinstance(prompt, int | str):
            key = (task, prompt, int(sample))
            found[key] = ScoreRow(task=task, prompt=prompt, sample=int(sample), value=float(value))
    return list(found.values())


def partners(before: Sequence[ScoreRow], after: Sequence[ScoreRow]) -> tuple[list[ScoreRow], list[ScoreRow]]:
    """The rows that both sides have."""

    def keys(rows: Sequence[ScoreRow]) -> set[tuple[str, int | str, int]]:
        return {(row.task, row.prompt, row.sample) for row in rows}

    shared = keys(before) & keys(after)
    left = [row for row in before if (row.task, row.prompt, row.sample) in shared]
    right = [row for row in after if (row.task, row.prompt, row.sample) in shared]
    return left, right


def _interval(row: Row, metric: str, rows: Sequence[ScoreRow]) -> Interval:
    """The logged value, with the logged bounds or else those of the image rows."""
    low, high = row.get(f"{metric}_low"), row.get(f"{metric}_high")
    if low is None or high is None:
        known = stratified_score(rows) if rows else None
        low, high = (known.low, known.high) if known else (math.nan, math.nan)
    return Interval(mean=float(row[metric]), low=float(low), high=float(high))


def _tasks(row: Row, rows: Sequence[ScoreRow]) -> dict[str, Interval]:
    """Scores of the tasks: from the image rows, else the logged means without bounds."""
    if rows:
        return task_scores(rows)
    prefix = "eval/geneval/"
    names = [key.removeprefix(prefix) for key in row if key.startswith(prefix)]
    return {
        name: Interval(mean=float(row[prefix + name]), low=math.nan, high=math.nan)
        for name in names
        if name in TASKS and column([row], prefix + name)[0].size
    }


def _ordered(tasks: Mapping[str, Interval]) -> dict[str, Interval]:
    """GenEval's own order, easy to hard; other tasks behind it."""
    names = [name for name in TASKS if name in tasks] + [name for name in tasks if name not in TASKS]
    return {name: tasks[name] for name in names}
