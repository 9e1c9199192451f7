"""Scores in their order, with the ranks that each may have: from intervals of paired differences.

changes, factor = paired_changes(runs)        each pair's difference, and by what all are widen to hold together
lines = rank_lines(scores, changes, factor)   the best first, with rank and difference to the first
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.crossed import independent_difference
from flowrl.statistics.means import Range, Rows
from flowrl.statistics.rank_sets import family_factor, rank_sets, widen

Changes = Mapping[tuple[str, str], Interval]
"""(one, other) -> score of the one less that of the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLine:
    """A score among others."""

    name: str
    """Of the model or method."""
    score: Interval
    """With its interval."""
    rank: tuple[int, int]
    """The least and the largest rank that it may have."""
    behind: Interval | None
    """Its score less that of the first; bounds hold for all pairs together. None where it is not known, and for the
    first itself."""


def paired_changes(runs: Mapping[str, Sequence[Rows]], *, by_task: bool) -> tuple[Changes, float]:
    """The difference of each pair of methods, and by what their intervals are widen to hold for all pairs together.

    Prompts are paired, trainings are not: nothing says which of one method's belongs to which of another's.

    Args:
        runs: method -> the same images (task, prompt, sample) of each of its runs.
        by_task: the score is the mean over tasks of the mean over a task's images; else over all images.

    Raises ValueError: rows of different images.
    """
    found = {
        (one, other): independent_difference(runs[other], runs[one], by_task=by_task).interval
        for one, other in combinations(runs, 2)
    }
    if not found:
        return found, math.nan
    means = [
        [replace(rows[0], value=fmean(float(row.value) for row in rows)) for rows in zip(*part, strict=True)]
        for part in runs.values()
    ]
    return found, family_factor(means, by_task=by_task)


def rank_lines(
    scores: Mapping[str, Interval], changes: Changes, factor: float, *, less_is_better: bool = False, ends: Range | None
) -> list[RankLine]:
    """Scores from the best to the worst, those that are not known last.

    Args:
        scores: by name.
        changes: differences of pairs; one that is missing leaves the order of the two open.
        factor: by what the differences are widen.
        less_is_better: whether the lowest score is the best.
        ends: the least and the largest difference that there can be, if known.
    """
    sign = 1 if less_is_better else -1
    order = sorted(scores, key=lambda name: (math.isnan(scores[name].mean), sign * scores[name].mean))
    place = {name: number for number, name in enumerate(order)}
    wide = {pair: widen(change, factor, ends) for pair, change in changes.items()}
    # Where less is better a pair is handed over the other way round: what lies above in score lies below in rank.
    ranks = rank_sets(
        len(order),
        {
            (place[other], place[one]) if less_is_better else (place[one], place[other]): change
            for (one, other), change in wide.items()
        },
    )
    wide |= {
        (other, one): Interval(mean=-change.mean, low=-change.high, high=-change.low)
        for (one, other), change in wide.items()
    }
    return [
        RankLine(name=name, score=scores[name], rank=ranks[place[name]], behind=wide.get((name, order[0])))
        for name in order
    ]
