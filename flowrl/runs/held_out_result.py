"""The result of a run: held-out scores before and after, and whether their difference is established."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.benchmarks.geneval.metadata import TASKS
from flowrl.config.rewards import told_apart
from flowrl.runs.evaluation_rows import GENEVAL, REWARD, SCORE, main_metric, score_interval, score_rows
from flowrl.runs.run_data import Row, RunData, column, keys_below
from flowrl.statistics.bootstrap import Interval, point
from flowrl.statistics.means import ScoreRow, claim, partners, task_scores, unknown_because


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Held-out scores of the first evaluation and, once there is a second, of the last."""

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
    claim: str  # what the intervals speak of
    untold: str  # why the difference has no interval; "" where it has

    @property
    def change(self) -> float:
        """After minus before, NaN before the second evaluation."""
        if self.difference is not None:
            return self.difference.mean
        return math.nan if self.after is None else self.after.mean - self.before.mean


def held_out(run: RunData) -> HeldOut | None:
    """Collects the held-out result: scores from the metrics, differences and missing scores from the image rows. None
    for a run without (readable) evaluation."""
    metric = main_metric(keys_below(run.evaluations, "eval/"))
    rows = [row for row in run.evaluations if metric is not None and column([row], metric)[0].size]
    if metric is None or not rows:
        return None
    first, last = int(rows[0]["iteration"]), int(rows[-1]["iteration"])
    images = [run.image_rows.get(first, ()), run.image_rows.get(last, ()) if last > first else ()]
    before, after = (score_rows(found, metric) for found in images)
    pair = partners(before, after)
    is_score, again, name = metric == SCORE, last > first, metric.removeprefix(REWARD)
    tasks: list[Mapping[str, Interval]] = [{}, {}, {}]
    if is_score:
        tasks[0], tasks[1] = _tasks(rows[0], before), _tasks(rows[-1], after) if again else {}
        tasks[2] = task_scores(pair[1], base=pair[0]) if pair[0] else {}
    return HeldOut(
        metric=metric,
        label="GenEval score" if is_score else f"reward {told_apart(run.config).get(name, name)}",
        first=first,
        last=last,
        before=_interval(rows[0], metric, before),
        after=_interval(rows[-1], metric, after) if again else None,
        difference=score_interval(pair[1], metric, base=pair[0]) if pair[0] else None,
        tasks_before=tasks[0],
        tasks_after=tasks[1],
        task_differences=tasks[2],
        num_pairs=len(pair[0]),
        num_unpaired=max(map(len, images)) - len(pair[0]),
        claim=claim(pair[0] or before),
        untold=untold(*pair),
    )


def untold(before: Sequence[ScoreRow], after: Sequence[ScoreRow]) -> str:
    """Why the paired difference of these rows has no interval; "" if it has one."""
    return unknown_because(after, base=before) if before else "there are no image rows of both evaluations to pair"


def conclusion(difference: Interval | None) -> str:
    """A plain statement on a paired difference, if there is one: whether its 95 % interval excludes zero."""
    if difference is None or not difference.known:
        return "not testable"
    if not difference.excludes(0.0):
        return "not established"
    return "established improvement" if difference.mean > 0 else "established loss"


def _interval(row: Row, metric: str, rows: Sequence[ScoreRow]) -> Interval:
    """The logged value, with the logged bounds or else those of the image rows."""
    low, high = row.get(f"{metric}_low"), row.get(f"{metric}_high")
    if low is None or high is None:
        known = score_interval(rows, metric) if rows else None
        low, high = (known.low, known.high) if known else (math.nan, math.nan)
    return Interval(mean=float(row[metric]), low=float(low), high=float(high))


def _tasks(row: Row, rows: Sequence[ScoreRow]) -> dict[str, Interval]:
    """Scores of the tasks, GenEval's own first, from easy to hard: from the image rows, or else the logged means."""
    found = (
        task_scores(rows)
        if rows
        else {task: point(float(row[GENEVAL + task])) for task in TASKS if column([row], GENEVAL + task)[0].size}
    )
    return {task: found[task] for task in (*TASKS, *(name for name in found if name not in TASKS)) if task in found}
