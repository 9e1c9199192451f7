"""The table of a group: scores with intervals, ranks with their bounds, differences to the first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowrl.benchmarks.temporal import LESS_IS_BETTER
from flowrl.benchmarks.unigenbench.point_scores import OVERALL, Row, paired_intervals, score_intervals
from flowrl.evaluation.benchmark import are_shares
from flowrl.evaluation.board.comparable import PROMPTS, SAMPLES, Group, conditions
from flowrl.evaluation.board.finished import BoardEntry, Values
from flowrl.statistics.bootstrap import Interval, point
from flowrl.statistics.crossed import crossed_estimate
from flowrl.statistics.means import SHARE_CHANGES, Range, ends_of, over_seeds, partners
from flowrl.statistics.rank_sets import factor_of_pairs
from flowrl.statistics.ranking import Changes, paired_changes, rank_lines

Points = tuple[list[Row], list[int | str]]
NO_SAMPLES = "Its rows do not give this number by samples: no differences, all ranks open."
NONE_JUDGED = "These results have no samples in common that were judged: no differences, all ranks open."
TWO_MEANS = "Some of these numbers are means over tasks and others over all samples: no differences, all ranks open."
_COMMON = "Scores and differences are of the {} samples that all of these results have."


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A line of the table."""

    name: str
    entries: tuple[BoardEntry, ...]
    """One entry, or the trainings of a method."""
    score: Interval
    """Over prompts for one training; over trainings and prompts for several."""
    rank: tuple[int, int]
    """The best and the worst rank that it may have."""
    behind: Interval | None
    """Its score minus that of the first; bounds hold for all pairs of the table together. None for the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """A table and its notes."""

    group: Group
    standings: tuple[Standing, ...]
    factor: float
    """Factor that widened the intervals of differences so that they hold together; NaN without pairs."""
    images: int
    """Number of images that all entries share and differences are taken over; 0 if rows do not say."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Basis:
    """The scores and differences that rank a table."""

    scores: Mapping[str, Interval]
    changes: Changes = field(default_factory=dict)
    factor: float = math.nan
    images: int = 0
    notes: tuple[str, ...] = ()
    ends: Range | None = None


def rank(group: Group) -> Ranking:
    """The table of a group, the best score first: the highest, or the lowest if less is better."""
    lines: dict[str, list[BoardEntry]] = {}
    for entry in group.entries:
        lines.setdefault(entry.pool or entry.label, []).append(entry)
    metric = group.metric
    values = {id(entry): entry.values[metric] for entry in group.entries if metric in entry.values}
    reported = {name: _reported(part, metric) for name, part in lines.items()}
    if len(values) < len(group.entries):
        basis = Basis(scores=reported, notes=(NO_SAMPLES,) if len(lines) > 1 else ())
    elif any(found.points for found in values.values()):
        basis = _by_points(group, lines, values, reported)
    else:
        basis = _by_images(group, lines, values, reported)
    less = metric in LESS_IS_BETTER
    notes = [f"Less {metric} is better: the lowest is ranked first."] if less else []
    ranked = rank_lines(basis.scores, basis.changes, basis.factor, less_is_better=less, ends=basis.ends)
    return Ranking(
        group=group,
        factor=basis.factor,
        images=basis.images,
        notes=(*notes, *basis.notes),
        standings=tuple(
            Standing(
                name=line.name, entries=tuple(lines[line.name]), score=line.score, rank=line.rank, behind=line.behind
            )
            for line in ranked
        ),
    )


def _by_images(
    group: Group,
    lines: Mapping[str, Sequence[BoardEntry]],
    values: Mapping[int, Values],
    reported: Mapping[str, Interval],
) -> Basis:
    """Ranks by scores that are means over images, paired over images with a value in all entries."""
    by_task = all(found.by_task for found in values.values())
    if not by_task and not all(found.pooled for found in values.values()):
        return Basis(scores=reported, notes=(TWO_MEANS,))
    shared = dict(zip(values, partners(*(found.rows for found in values.values())), strict=True))
    images, alike = len(next(iter(shared.values()))), _same_images(group)
    notes = _notes_of_common(values, images, alike=alike)
    if not images:
        return Basis(scores=reported, notes=notes)
    runs = {name: [shared[id(entry)] for entry in part] for name, part in lines.items()}
    scores = {
        name: crossed_estimate(runs[name], by_task=by_task).interval if len(part) > 1 or not alike else reported[name]
        for name, part in lines.items()
    }
    changes, factor = paired_changes(runs, by_task=by_task)
    ends = ends_of(*([row.value for row in rows] for rows in shared.values()), changes=True)
    return Basis(scores=scores, changes=changes, factor=factor, images=images, notes=notes, ends=ends)


def _notes_of_common(values: Mapping[int, Values], images: int, *, alike: bool) -> tuple[str, ...]:
    """Notes on samples that some entries lack."""
    if images and not alike:
        return (_COMMON.format(images),)
    left = len({(row.task, row.prompt, row.sample) for found in values.values() for row in found.rows}) - images
    if left:
        return (f"{left} of {images + left} samples have no value for one of the models, and count in no difference.",)
    return ()


def _by_points(
    group: Group,
    lines: Mapping[str, Sequence[BoardEntry]],
    values: Mapping[int, Values],
    reported: Mapping[str, Interval],
) -> Basis:
    """Ranks by UniGenBench's overall, which pools test points of images."""
    sides = _shared_points(values)
    if not all(any(met is not None for _, met in rows) for rows, _ in sides.values()):
        return Basis(scores=reported, notes=(NONE_JUDGED,))
    images = len(next(iter(sides.values()))[0])
    single = {name: sides[id(part[0])] for name, part in lines.items() if len(part) == 1}
    names = list(single)
    changes = {
        (one, other): paired_intervals(single[other], single[one])[OVERALL]
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    }
    scores, notes = dict(reported), []
    if not _same_images(group):
        scores = {}
        for name, part in lines.items():  # of one training over prompts, of several Student's over them
            found = [score_intervals(*sides[id(entry)])[OVERALL] for entry in part]
            scores[name] = found[0] if len(found) == 1 else over_seeds([one.mean for one in found], shares=True)
        notes.append(_COMMON.format(images))
    factor = factor_of_pairs(len(lines) * (len(lines) - 1) // 2)
    return Basis(scores=scores, changes=changes, factor=factor, images=images, notes=tuple(notes), ends=SHARE_CHANGES)


def _same_images(group: Group) -> bool:
    """Whether all entries have the same prompts and samples; otherwise `across` allowed them to differ."""
    known = [conditions(entry, group.metric) for entry in group.entries]
    return len({(one[PROMPTS], one[SAMPLES]) for one in known}) == 1


def _reported(part: Sequence[BoardEntry], metric: str) -> Interval:
    """The number and interval of a result; for several trainings, Student's interval over them."""
    if len(part) == 1:
        return part[0].intervals.get(metric, point(part[0].metrics.get(metric, math.nan)))
    numbers = [entry.metrics.get(metric, math.nan) for entry in part]
    known = all(map(math.isfinite, numbers))
    return over_seeds(numbers, shares=are_shares([f"eval/{part[0].benchmark}/"])) if known else point(math.nan)


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
