"""The table of a group: scores with intervals, ranks with what they may be, differences to the first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from flowrl.benchmarks.temporal import LESS_IS_BETTER
from flowrl.benchmarks.unigenbench.point_scores import OVERALL, Row, paired_intervals, score_intervals
from flowrl.evaluation.board.comparable import PROMPTS, SAMPLES, Group, conditions
from flowrl.evaluation.board.finished import Entry
from flowrl.evaluation.board.row_values import Values
from flowrl.statistics.bootstrap import Interval, point
from flowrl.statistics.crossed import crossed_difference, crossed_estimate
from flowrl.statistics.means import ScoreRow, over_seeds, partners
from flowrl.statistics.rank_sets import factor_of_pairs, family_factor, rank_sets, widen

Points = tuple[list[Row], list[int | str]]
_COMMON = "Scores and differences are of the {} samples that all of these results have."


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A line of the table."""

    name: str
    entries: tuple[Entry, ...]
    """One, or the trainings of a method."""
    score: Interval
    """Of one training over prompts; of several over trainings and prompts."""
    rank: tuple[int, int]
    """The least and the largest rank that it may have."""
    behind: Interval | None
    """Its score less that of the first; bounds hold for all pairs of the table together. None for the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """A table and what has to be said of it."""

    group: Group
    standings: tuple[Standing, ...]
    factor: float
    """By what intervals of differences were widened, to hold together; NaN without pairs."""
    images: int
    """That all entries share, on which differences are taken; 0 where rows do not say."""
    notes: tuple[str, ...]


def ranked(group: Group) -> Ranking:
    """The table of a group, the best score first: the highest, or the lowest where less is better."""
    names = dict.fromkeys(entry.pool or entry.label for entry in group.entries)
    lines = {name: [entry for entry in group.entries if (entry.pool or entry.label) == name] for name in names}
    metric = group.metric
    values = {id(entry): entry.values[metric] for entry in group.entries if metric in entry.values}
    notes = _notes(lines)
    if metric in LESS_IS_BETTER:
        notes.append(f"Less {metric} is better: the lowest is ranked first.")
    if len(values) < len(group.entries):
        scores = {name: _reported(part, metric) for name, part in lines.items()}
        changes: dict[tuple[str, str], Interval] = {}
        factor, images = math.nan, 0
        if len(lines) > 1:
            notes.append("Its rows do not give this number by samples: no differences, all ranks open.")
    elif any(found.points for found in values.values()):
        scores = {name: _reported(part, metric) for name, part in lines.items()}
        sides = _shared_points(values)
        changes, factor, images = {}, math.nan, len(next(iter(sides.values()))[0])
        if not all(any(met is not None for _, met in rows) for rows, _ in sides.values()):
            images = 0
            notes.append("These results have no samples in common that were judged: no differences, all ranks open.")
        else:
            changes, factor = _point_changes(lines, sides), factor_of_pairs(len(lines) * (len(lines) - 1) // 2)
            if not _same_images(group):
                scores = {name: _of_points([sides[id(entry)] for entry in part]) for name, part in lines.items()}
                notes.append(_COMMON.format(images))
    elif not (all(found.by_task for found in values.values()) or all(found.pooled for found in values.values())):
        scores = {name: _reported(part, metric) for name, part in lines.items()}
        changes, factor, images = {}, math.nan, 0
        notes.append("Some of these numbers are means over tasks and others over all samples: no differences, all "
                     "ranks open.")  # fmt: skip
    else:
        shared, left = _shared(values)
        by_task = all(found.by_task for found in values.values())
        runs = {name: [shared[id(entry)] for entry in part] for name, part in lines.items()}
        images, alike = len(next(iter(shared.values()))), _same_images(group)
        scores = {
            name: crossed_estimate(runs[name], by_task=by_task).interval
            if images and (len(part) > 1 or not alike)
            else _reported(part, metric)
            for name, part in lines.items()
        }
        changes = _changes(runs, by_task=by_task) if images else {}
        factor = family_factor([_mean(part) for part in runs.values()], by_task=by_task) if changes else math.nan
        if images and not alike:
            notes.append(_COMMON.format(images))
        elif left:
            notes.append(f"{left} of {images + left} samples have no value for one of the models, and count in no "
                         "difference.")  # fmt: skip
    return _ranking(group, lines, scores, changes, factor, images, notes)


def _same_images(group: Group) -> bool:
    """Whether all were asked the same prompts, so many times; otherwise that was allowed to differ."""
    known = [conditions(entry, group.metric) for entry in group.entries]
    return len({(one[PROMPTS], one[SAMPLES]) for one in known}) == 1


def _ranking(
    group: Group, lines: Mapping[str, Sequence[Entry]], scores: Mapping[str, Interval],
    changes: Mapping[tuple[str, str], Interval], factor: float, images: int, notes: Sequence[str],
) -> Ranking:  # fmt: skip
    less = group.metric in LESS_IS_BETTER
    order = sorted(lines, key=lambda name: (math.isnan(scores[name].mean), scores[name].mean * (1 if less else -1)))
    place = {name: number for number, name in enumerate(order)}
    wide = {pair: widen(change, factor) for pair, change in changes.items()}
    # Where less is better a pair is handed over the other way round: what lies above in score lies below in rank.
    ranks = rank_sets(len(order), {
        (place[other], place[one]) if less else (place[one], place[other]): change
        for (one, other), change in wide.items()
    })  # fmt: skip
    first = order[0]
    return Ranking(
        group=group, factor=factor, images=images, notes=tuple(notes),
        standings=tuple(
            Standing(name=name, entries=tuple(lines[name]), score=scores[name], rank=ranks[place[name]],
                     behind=_less(wide, name, first))
            for name in order
        ),
    )  # fmt: skip


def _less(changes: Mapping[tuple[str, str], Interval], name: str, first: str) -> Interval | None:
    """The change of that pair, whichever way round it is held."""
    if (name, first) in changes:
        return changes[name, first]
    if (first, name) in changes:
        found = changes[first, name]
        return Interval(mean=-found.mean, low=-found.high, high=-found.low)
    return None


def _reported(part: Sequence[Entry], metric: str) -> Interval:
    """The number and interval of a result; of several trainings Student's over them."""
    if len(part) == 1:
        return part[0].intervals.get(metric, point(part[0].metrics.get(metric, math.nan)))
    numbers = [entry.metrics.get(metric, math.nan) for entry in part]
    return over_seeds(numbers) if all(map(math.isfinite, numbers)) else point(math.nan)


def _shared(values: Mapping[int, Values]) -> tuple[dict[int, list[ScoreRow]], int]:
    """Rows of the images that all entries have a value for, and how many images others have."""
    shared = partners(*(found.rows for found in values.values()))
    every = {(row.task, row.prompt, row.sample) for found in values.values() for row in found.rows}
    return dict(zip(values, shared, strict=True)), len(every) - len(shared[0])


def _changes(runs: Mapping[str, Sequence[list[ScoreRow]]], *, by_task: bool) -> dict[tuple[str, str], Interval]:
    """Score of the one less that of the other, for each pair; none for methods of unequal numbers of trainings."""
    names, found = list(runs), {}
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            after, before = list(runs[one]), list(runs[other])
            count = max(len(after), len(before))
            after, before = (side * count if len(side) == 1 else side for side in (after, before))
            if len(after) == len(before):
                found[one, other] = crossed_difference(before, after, by_task=by_task).interval
    return found


def _shared_points(values: Mapping[int, Values]) -> dict[int, Points]:
    """Test points of the samples that all entries have, with their prompts."""
    tables: dict[int, dict[tuple[int | str, int], Row]] = {}
    for key, found in values.items():
        table, seen = tables.setdefault(key, {}), Counter[int | str]()
        for row, prompt in found.points:
            table[prompt, seen[prompt]] = row
            seen[prompt] += 1
    shared = [key for key in next(iter(tables.values())) if all(key in table for table in tables.values())]
    return {
        entry: ([table[key] for key in shared], [prompt for prompt, _ in shared]) for entry, table in tables.items()
    }


def _of_points(runs: Sequence[Points]) -> Interval:
    """UniGenBench's overall of these samples: of one training over prompts, of several Student's over them."""
    found = [score_intervals(*run)[OVERALL] for run in runs]
    return found[0] if len(found) == 1 else over_seeds([one.mean for one in found])


def _point_changes(
    lines: Mapping[str, Sequence[Entry]], sides: Mapping[int, Points]
) -> dict[tuple[str, str], Interval]:
    """The same of UniGenBench's overall, of single trainings."""
    names = [name for name, part in lines.items() if len(part) == 1]
    of = {name: sides[id(lines[name][0])] for name in names}
    return {
        (one, other): paired_intervals(of[other], of[one])[OVERALL]
        for place, one in enumerate(names) for other in names[place + 1 :]
    }  # fmt: skip


def _mean(runs: Sequence[list[ScoreRow]]) -> list[ScoreRow]:
    """Every image's mean over trainings."""
    return [
        ScoreRow(task=rows[0].task, prompt=rows[0].prompt, sample=rows[0].sample,
                 value=fmean(float(row.value) for row in rows))
        for rows in zip(*runs, strict=True)
    ]  # fmt: skip


def _notes(lines: Mapping[str, Sequence[Entry]]) -> list[str]:
    counts = {len(part) for part in lines.values()} - {1}
    if len(counts) < 2:
        return []
    return ["Methods of unequal numbers of trainings have no paired difference: their order is left open."]
