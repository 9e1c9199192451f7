"""UniGenBench's numbers from the scores of many images, and their intervals.

A row is one image: its test points and a judge's score for each, or None if no answer could be read.

Letters: U prompts, D primary dimensions, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.benchmarks.unigenbench.items import primary_of
from flowrl.runtime.shapes import Float
from flowrl.statistics.bootstrap import Interval, draw_counts, percentiles, point

OVERALL = "overall"
_RESAMPLES = 2000  # R

Row = tuple[Sequence[str], Sequence[Any] | None]


@dataclass(frozen=True, slots=True)
class Tally:
    """Test points that are met, of all that were judged."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Share that is met; NaN of none."""
        return self.correct / self.total if self.total else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """An evaluation in numbers."""

    primary: dict[str, Tally]
    """The primary dimensions that occur. Each pools its test points, as the published code and tables do; the paper's
    text speaks of a mean over sub-dimensions, which is another number."""
    sub: dict[str, Tally]
    """The labels that occur, those without a hyphen among them."""
    overall: float
    """The unweighted mean of the primary accuracies, as on the leaderboards, in [0, 1]; NaN if none was judged."""
    skipped: int
    """Images without scores. They are in no total."""


def aggregate(rows: Iterable[Row]) -> Scores:
    """Counts test points of (test points, scores) rows, one per image. One is met if its score equals 1: 1.0 and True
    do, "1" and 0.5 do not. A row without one score per point is skipped. Raises ValueError: no rows."""
    sub: dict[str, list[bool]] = {}
    count = skipped = 0
    for points, scores in rows:
        count += 1
        met = _met(points, scores)
        if met is None:
            skipped += 1
            continue
        for label, hit in zip(points, met, strict=True):
            sub.setdefault(label.strip(), []).append(hit)
    if not count:
        raise ValueError("aggregate needs one row (test points, scores) per image, got none.")
    primary: dict[str, list[bool]] = {}
    for label, hits in sub.items():
        primary.setdefault(primary_of(label), []).extend(hits)
    tallies = {name: Tally(sum(hits), len(hits)) for name, hits in primary.items()}
    return Scores(
        primary=tallies,
        sub={label: Tally(sum(hits), len(hits)) for label, hits in sub.items()},
        overall=math.fsum(tally.accuracy for tally in tallies.values()) / len(tallies) if tallies else math.nan,
        skipped=skipped,
    )


def _met(points: Sequence[str], scores: Sequence[Any] | None) -> list[bool] | None:
    if scores is None or len(scores) != len(points):
        return None
    return [isinstance(score, int | float) and score == 1 for score in scores]


def score_intervals(rows: Sequence[Row], prompts: Sequence[Hashable], *, seed: int = 0) -> dict[str, Interval]:
    """`overall` and every primary dimension with its 95 % bootstrap interval, prompts drawn with replacement.

    Images of a prompt stay together, and all dimensions see the same draws, since a prompt has points in several.
    Intervals are widened as in `flowrl.statistics.bootstrap`; a dimension that a single prompt has gets NaN bounds.
    Rows are one per image; `prompts` [N] are their prompts. Raises ValueError: no judged row, or not as many prompts.
    """
    counts = _counts(rows, prompts)
    return _as_intervals(_point(counts), _replicates(counts, seed))


def paired_intervals(
    before: tuple[Sequence[Row], Sequence[Hashable]], after: tuple[Sequence[Row], Sequence[Hashable]], *, seed: int = 0
) -> dict[str, Interval]:
    """After minus before, for `overall` and the primary dimensions that both have; the same prompts are drawn in both.
    Both are (rows, prompts), as `score_intervals` takes them. Raises ValueError: other prompts."""
    found = [_counts(*side) for side in (before, after)]
    if set(found[0].prompts) != set(found[1].prompts):
        lonely = set(found[0].prompts) ^ set(found[1].prompts)
        raise ValueError(
            f"{len(lonely)} prompts were judged on one side only, such as {min(lonely, key=str)!r}: compare "
            f"evaluations of the same prompts."
        )
    first, second = found[0], found[1].ordered(found[0].prompts)
    points = [_point(counts) for counts in (first, second)]
    replicates = [_replicates(counts, seed) for counts in (first, second)]
    shared = [name for name in points[0] if name in points[1]]
    return _as_intervals(
        {name: points[1][name] - points[0][name] for name in shared},
        {name: replicates[1][name] - replicates[0][name] for name in shared},
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Counts:
    """Test points met and judged, float64 [U, D] each, of the prompts in their order and of these dimensions."""

    prompts: list[Hashable]
    names: list[str]
    correct: Float[np.ndarray, " u d"]
    total: Float[np.ndarray, " u d"]

    def ordered(self, prompts: Sequence[Hashable]) -> _Counts:
        place = {prompt: i for i, prompt in enumerate(self.prompts)}
        rows = [place[prompt] for prompt in prompts]
        return _Counts(prompts=list(prompts), names=self.names, correct=self.correct[rows], total=self.total[rows])


def _counts(rows: Sequence[Row], prompts: Sequence[Hashable]) -> _Counts:
    if len(rows) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts were given for {len(rows)} rows: give one for each.")
    codes: dict[Hashable, int] = {}
    names: dict[str, int] = {}
    hits: list[tuple[int, int, bool]] = []
    for (points, scores), prompt in zip(rows, prompts, strict=True):
        unit = codes.setdefault(prompt, len(codes))
        for label, met in zip(points, _met(points, scores) or (), strict=False):
            hits.append((unit, names.setdefault(primary_of(label), len(names)), met))
    if not hits:
        raise ValueError("no image was judged, so there is no score: look at why the judge's answers were skipped.")
    correct, total = (np.zeros((len(codes), len(names))) for _ in range(2))
    for unit, name, met in hits:
        correct[unit, name] += met
        total[unit, name] += 1
    return _Counts(prompts=list(codes), names=list(names), correct=correct, total=total)


def _point(counts: _Counts) -> dict[str, float]:
    accuracy = counts.correct.sum(axis=0) / counts.total.sum(axis=0)
    return {OVERALL: float(accuracy.mean())} | dict(zip(counts.names, accuracy.tolist(), strict=True))


def _replicates(counts: _Counts, seed: int) -> dict[str, Float[np.ndarray, " r"]]:
    """Accuracies of R draws of the prompts, widened by sqrt(U/(U-1)); a draw that misses a dimension has NaN there."""
    units = len(counts.prompts)
    weight_RU = draw_counts(units, _RESAMPLES, np.random.default_rng(seed))
    total = weight_RU @ counts.total
    accuracy = np.divide(weight_RU @ counts.correct, total, out=np.full_like(total, math.nan), where=total > 0)
    members = (counts.total > 0).sum(axis=0)
    # A draw without a rare dimension has its overall from the others.
    known = ~np.isnan(accuracy)
    overall = np.where(known, accuracy, 0.0).sum(axis=1) / known.sum(axis=1)
    columns = [(OVERALL, overall, units)]
    columns += [(name, accuracy[:, i], int(members[i])) for i, name in enumerate(counts.names)]
    centre = _point(counts)
    widened = {}
    for name, values, number in columns:
        factor = math.sqrt(number / (number - 1)) if number > 1 else math.nan
        widened[name] = np.clip(centre[name] + factor * (values - centre[name]), 0.0, 1.0)
    return widened


def _as_intervals(
    points: Mapping[str, float], replicates: Mapping[str, Float[np.ndarray, " r"]]
) -> dict[str, Interval]:
    found = {name: replicates[name][~np.isnan(replicates[name])] for name in points}
    return {name: percentiles(mean, found[name]) if len(found[name]) else point(mean) for name, mean in points.items()}
