"""Finds the values behind an evaluation's numbers in its rows.

Benchmarks write different rows. Each column is tried, and kept only if its mean is the reported number. If no column
fits, or the number is not a mean, the benchmark is compared only by its reported numbers and intervals.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowrl.benchmarks.unigenbench import point_scores
from flowrl.statistics.means import ScoreRow, pooled, stratified_score

SAME = 1e-6
"""Largest relative difference of the rows' mean from the reported number, which JSON rounds."""
UNITS = ("correct", "score")
"""Columns of rows with one value per image."""
SCORES = "scores"
COLUMNS = (SCORES, "values")
"""Columns of rows with values by name."""
DIVERSITY = "diversity"


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """The values whose mean a number is."""

    rows: tuple[ScoreRow, ...] = ()
    by_task: bool = False
    """Whether the number is the mean over tasks of the mean over a task's images."""
    pooled: bool = True
    """Whether it is the mean over all images; both hold if all tasks have equally many images."""
    files: Mapping[tuple[str, int | str, int], str] = field(default_factory=dict)
    """(task, prompt, sample) -> the image's file."""
    part: bool = False
    """Whether this is one task of another score in the result."""
    points: tuple[tuple[point_scores.Row, int | str], ...] = ()
    """Test points of every image with its prompt, for a score that is not a mean over images (UniGenBench)."""


def values_of(rows: Sequence[Mapping[str, Any]], metrics: Mapping[str, float]) -> dict[str, Values]:
    """Values by metric, only for metrics whose number they give."""
    found = {}
    for names, values in _candidates(rows):
        for name in names:
            if name in metrics and name not in found and (fitting := _fitting(values, metrics[name])) is not None:
                found[name] = fitting
    return found


def _candidates(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Sequence[str], Values]]:
    """Possible names of a metric, and its possible values."""
    first = rows[0] if rows else {}
    for key in COLUMNS:
        names = dict.fromkeys(name for row in rows if isinstance(row.get(key), Mapping) for name in row[key])
        for name in names:
            column = _column(rows, lambda row, key=key, name=name: (row.get(key) or {}).get(name))
            yield (name, name.replace(" ", "_")), column
            if key == SCORES and name == next(iter(names)):  # its tasks have no name of their own before them
                yield from _tasks(column)
    if any(DIVERSITY in row for row in rows):
        spread = _column(rows, lambda row: row.get(DIVERSITY))
        yield (DIVERSITY,), Values(rows=spread.rows)  # of all images of a prompt: no single one shows it
    for key in UNITS:
        if key in first:
            column = _column(rows, lambda row, key=key: row.get(key))
            yield ("score", "overall"), column
            yield from _tasks(column)
    if {"points", "met", "index"} <= first.keys():
        points = tuple(((tuple(row["points"]), row["met"]), prompt_of(row)) for row in rows)
        yield (point_scores.OVERALL,), Values(points=points, files=_files(rows))


def _tasks(column: Values) -> Iterator[tuple[Sequence[str], Values]]:
    for task in dict.fromkeys(row.task for row in column.rows if row.task):
        rows = tuple(row for row in column.rows if row.task == task)
        files = {key: file for key, file in column.files.items() if key[0] == task}
        yield (task, task.replace(" ", "_")), Values(rows=rows, part=True, files=files)


def _column(rows: Sequence[Mapping[str, Any]], read: Any) -> Values:
    """One value per row; rows without one (failed images) are left out, and the others keep their number."""
    found = {
        key: ScoreRow(task=key[0], prompt=key[1], sample=key[2], value=float(value))
        for key, row in _keyed(rows)
        if isinstance(value := read(row), int | float) and math.isfinite(value)
    }
    return Values(rows=tuple(found.values()), files={key: f for key, f in _files(rows).items() if key in found})


def _files(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int | str, int], str]:
    return {key: row["file"] for key, row in _keyed(rows) if isinstance(row.get("file"), str)}


def _keyed(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, int | str, int], Mapping[str, Any]]]:
    """Numbers rows within task and prompt, because folders made row by row repeat a prompt."""
    seen: Counter[tuple[str, str]] = Counter()
    for row in rows:
        prompt = (str(row.get("task", "")), prompt_of(row))
        yield (*prompt, seen[prompt]), row
        seen[prompt] += 1


def prompt_of(row: Mapping[str, Any]) -> str:
    """The key of a row's prompt: its text, and the case if one text belongs to several."""
    text = str(row.get("prompt", row.get("index", "")))
    return f"{text} ({row['key']})" if "key" in row else text


def _fitting(values: Values, reported: float) -> Values | None:
    """The values with the kind of mean that gives the reported number; None if neither does."""
    if values.points:
        score = point_scores.aggregate(row for row, _ in values.points).overall
        return values if _is_same(score, reported) else None
    if not values.rows:
        return None
    by_task = _is_same(stratified_score(values.rows).mean, reported)
    over_all = _is_same(pooled(values.rows).mean, reported)
    return replace(values, by_task=by_task, pooled=over_all) if by_task or over_all else None


def _is_same(found: float, reported: float) -> bool:
    return math.isclose(found, reported, rel_tol=SAME, abs_tol=SAME)
