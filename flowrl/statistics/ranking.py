"""Scores in order, with the possible ranks of each, from intervals of paired differences.

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
"""(one, other) -> score of the one minus that of the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLine:
    """A score among others."""

    name: str
    """Of the model or method."""
    score: Interval
    """With its interval."""
    rank: tuple[int, int]
    """The best and the worst rank that it may have."""
    behind: Interval | None
    """Its score minus the first one's; bounds hold for all pairs together. None if unknown, and for the first."""


def paired_changes(runs: Mapping[str, Sequence[Rows]], *, by_task: bool) -> tuple[Changes, float]:
    """The difference of each pair of methods, and the factor that widens their intervals to hold together.

    Prompts are paired. Trainings are not, because no training of one method belongs to one of another.

    Args:
        runs: method -> rows of the same images (task, prompt, sample) for each of its runs.
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
    """Sorts scores from the best to the worst, unknown ones last.

    Args:
        scores: by name.
        changes: differences of pairs; if one is missing, the order of its two is open.
        factor: factor by which the differences are widened.
        less_is_better: whether the lowest score is the best.
        ends: the smallest and the largest possible difference, if known.
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
