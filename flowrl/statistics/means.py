"""Means of scores, with the intervals in every page and table; differences are paired by prompt and sample.

Images of one prompt resemble each other, so the unit is the prompt: an interval covers other prompts of the same tasks
and other start noise. If a task has a single prompt, its images are the units, and the interval covers that prompt
only. Tasks are fixed strata. For other training seeds see `over_seeds` and `flowrl.statistics.crossed`.

With w_u the share of unit u in its task's images and d_u its mean less the task's,

    variance of a task's mean   v = sum_u w_u² d_u² / (1 - 2 w_u + sum w²)         s²/U where units are of one size
    degrees of freedom          (tr A)² / tr A² of v = m' A m for units that vary alike   U - 1 where of one size
    mean of task means          V = sum c_t² v_t, degrees V² / sum((c_t² v_t)² / degrees_t)

and the interval is Student's: mean ± t(degrees) sqrt(V) (Bell and McCaffrey 2002; Satterthwaite 1946).

Verdicts (values that are all 0 or 1) have a spread even if all of them agree. A single task then has Wilson's interval
(1927), with the number of images divided by the design effect of the prompts. A mean over T tasks adds 2/T right and
2/T wrong images to each task before it takes centre and variance (Price and Bonett 2004); differences of verdicts add
1/(2T) at +1 and at -1. The printed mean is that of the images themselves. Tasks with one image each form one stratum,
with the images that are added to all of them.

Letters: N values, U units (prompts, or the images of a task's only one), T tasks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from flowrl.runtime.shapes import Float, Int
from flowrl.statistics.bootstrap import LEVEL, Interval, codes, point, student_quantile


class Range(NamedTuple):
    """The smallest and the largest possible value, and whether no value but 0 can lie between them."""

    least: float
    most: float
    verdicts: bool = False


VERDICTS, CHANGES = Range(0.0, 1.0, True), Range(-1.0, 1.0, True)
SHARES, SHARE_CHANGES = Range(0.0, 1.0), Range(-1.0, 1.0)
PRIOR = 0.5  # degrees of freedom that speak for a design effect of 1
SINGLE = "\0single images"
"""Name of the stratum of all tasks that have one image each; no task can have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRow:
    """The score of one image: the task and prompt it answers, its sample number under that prompt, and its value."""

    task: str
    prompt: int | str
    sample: int
    value: float | int


Rows = Iterable[ScoreRow]
Key = tuple[str, int | str, int]
Values = Float[np.ndarray, " n"]
Units = Int[np.ndarray, " n"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A mean; `centre` and `variance` belong to its interval and include the images that verdicts add."""

    mean: float
    centre: float
    variance: float
    degrees: float


def mean_interval(
    values: ArrayLike,
    clusters: Sequence[Hashable] | np.ndarray | None = None,
    *,
    ends: Range | None = VERDICTS,
    level: float = LEVEL,
) -> Interval:
    """Mean of `values` [N] (booleans count as 0 and 1) with its interval of coverage `level`.

    Args:
        clusters: [N] labels; values that share a label are one unit; None makes each value a unit. A single unit has
            NaN bounds: for the images of one prompt, give None.
        ends: the kind of the values: VERDICTS if all are 0 or 1, CHANGES if all are -1, 0 or 1 (`ends_of` says whether
            differences are those of verdicts), None for numbers that may agree. Bounds are cut to these ends, and to
            those that numbers between them reach.
        level: in (0, 1).

    Raises ValueError: no values, a value that is not finite, a wrong number of clusters, or a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}: write 95 % as 0.95")
    value_N = _check(values)
    unit_N = np.arange(len(value_N)) if clusters is None else codes(clusters)
    if len(unit_N) != len(value_N):
        raise ValueError(f"clusters has {len(unit_N)} labels for {len(value_N)} values: give one for each")
    if clusters is not None and unit_N.max() == 0:
        return point(float(value_N.mean()))
    if ends is not None and ends.verdicts and not np.isin(value_N, (*ends[:2], 0.0)).all():
        ends = ends_of(value_N, changes=False) if ends == VERDICTS else None
    return _interval([(value_N, unit_N)], [1.0], [1], ends, level)


def ends_of(*sides: ArrayLike, changes: bool) -> Range | None:
    """The ends of values: those of verdicts, or of their changes, if all known values are such. For numbers from 0 to
    1, such as graded credits, both ends if some lie at 1, or 0 alone if some lie there; None for other numbers."""
    listed = np.concatenate([[], *(np.ravel(np.asarray(side, dtype=np.float64)) for side in sides)])
    known = listed[~np.isnan(listed)]
    if np.isin(known, VERDICTS[:2]).all():
        return CHANGES if changes else VERDICTS
    if range_of(known) is None or (known.max() < 1 and (changes or known.min() > 0)):
        return None
    if changes:
        return SHARE_CHANGES
    return SHARES if known.max() == 1 else Range(0.0, math.inf)


def range_of(values: ArrayLike) -> Range | None:
    """The ends of shares if all values lie from 0 to 1, else None. Not for differences, which may do so by chance."""
    return SHARES if ((np.asarray(values) >= 0) & (np.asarray(values) <= 1)).all() else None


def stratified_score(rows: Rows, *, base: Rows | None = None) -> Interval:
    """GenEval's overall score: the mean over tasks of the mean over a task's images ("macro"), with its interval.

    Args:
        base: rows of another model; the score is then the mean difference to it, image by image.

    Raises ValueError: no rows, a (task, prompt, sample) twice, a value not finite, or a row of one side alone.
    """
    return score_of(*strata([rows], None if base is None else [base]), by_task=True)


def pooled(rows: Rows, *, base: Rows | None = None) -> Interval:
    """The mean over all images of all tasks ("micro"), with tasks as strata; otherwise as `stratified_score`."""
    return score_of(*strata([rows], None if base is None else [base]), by_task=False)


def weighted_score(rows: Rows, weights: Mapping[str, float], *, base: Rows | None = None) -> Interval:
    """The mean of task means with given weights, scaled to the tasks that have images; otherwise as `stratified_score`.
    Raises ValueError: as `stratified_score`, or a task without a weight above 0."""
    parts, ends = strata([rows], None if base is None else [base], join=False)
    if lacking := [task for task in parts if not weights.get(task, 0.0) > 0]:
        raise ValueError(f"the task {lacking[0]!r} has no weight above 0: give one to each of {', '.join(parts)}")
    total = sum(weights[task] for task in parts)
    shares = [weights[task] / total for task in parts]
    listed = [(value_SN[0], unit_N) for value_SN, unit_N in parts.values()]
    return _interval(listed, shares, [1] * len(shares), ends)


def task_scores(rows: Rows, *, base: Rows | None = None) -> dict[str, Interval]:
    """The mean of every task with its interval, tasks in alphabetical order; otherwise as `stratified_score`."""
    parts, ends = strata([rows], None if base is None else [base], join=False)
    return {name: _interval([(value_SN[0], unit_N)], [1.0], [1], ends) for name, (value_SN, unit_N) in parts.items()}


def claim(rows: Rows) -> str:
    """Says what the intervals of these rows cover, to follow "the interval covers"."""
    prompts: dict[str, set[int | str]] = {}
    images: dict[str, int] = {}
    for row in rows:
        prompts.setdefault(row.task, set()).add(row.prompt)
        images[row.task] = images.get(row.task, 0) + 1
    alone = [task for task, found in prompts.items() if len(found) == 1 and images[task] > 1]
    if not alone:
        return "prompts of this kind"
    if len(alone) == len(prompts):
        return "these prompts"
    its = "its only prompt" if len(alone) == 1 else "their only prompts"
    return f"prompts of this kind; for {', '.join(sorted(alone))}, {its}"


def unknown_because(rows: Sequence[ScoreRow], *, base: Sequence[ScoreRow] | None = None) -> str:
    """Why `stratified_score` and `pooled` have no bounds for these rows; "" if they have bounds."""
    parts, _ = strata([rows], None if base is None else [base])
    if all(len(unit_N) > 1 for _, unit_N in parts.values()):
        known = stratified_score(rows, base=base).known
        return "" if known else "all values of a task agree, which leaves their spread unknown"
    tasks = {row.task for row in rows}
    return "there is a single image" if len(tasks) == 1 else "one task has a single image, whose spread is unknown"


def paired_rows(before: Rows, after: Rows) -> list[ScoreRow]:
    """One row for each (task, prompt, sample), its value the difference after - before. Raises ValueError: the same key
    twice on one side, or a key that only one side has."""
    before_of, after_of = by_key(before), by_key(after)
    lonely = before_of.keys() ^ after_of.keys()
    if lonely:
        example = min(lonely, key=str)
        raise ValueError(
            f"{len(lonely)} rows have no partner, such as (task, prompt, sample) = {example} "
            f"({'before' if example in before_of else 'after'} only): score the same prompts and samples on both "
            "sides, or drop what one side lacks before pairing"
        )
    return [
        ScoreRow(
            task=row.task, prompt=row.prompt, sample=row.sample, value=float(after_of[key].value) - float(row.value)
        )
        for key, row in before_of.items()
    ]


def partners(*sides: Rows) -> list[list[ScoreRow]]:
    """The rows of every side whose (task, prompt, sample) all other sides have too, in the first one's order."""
    tables = [by_key(side) for side in sides]
    shared = [key for key in tables[0] if all(key in table for table in tables)]
    return [[table[key] for key in shared] for table in tables]


def over_seeds(score_of_seed: ArrayLike, *, shares: bool = False) -> Interval:
    """Mean over S independent training runs with Student's t interval: mean ± t(0.95, S-1) · s / sqrt(S).

    `score_of_seed` holds one number per seed: a score, or a difference to the run's own start. With `shares`, bounds
    are kept from 0 to 1 if all numbers lie there. The interval covers other trainings, judged with the same prompts and
    start noise. NaN bounds for one seed, or if all agree. Raises ValueError: no seeds, or a number that is not finite.
    """
    value_S = _check(score_of_seed)
    mean, count = float(value_S.mean()), len(value_S)
    variance = float(value_S.var(ddof=1)) / count if count > 1 else math.nan
    ends = range_of(value_S) if shares else None
    return student(Part(mean=mean, centre=mean, variance=variance, degrees=count - 1), ends)


def wilson(mean: float, count: float, quantile: float) -> tuple[float, float]:
    """Wilson's bounds of a share of `count` > 0 verdicts, whole or not: (mean - p)² = quantile² p (1 - p) / count."""
    square = quantile**2
    centre = (count * mean + square / 2) / (count + square)
    half = quantile * math.sqrt(count * mean * (1 - mean) + square / 4) / (count + square)
    return centre - half, centre + half


Stratum = tuple[Float[np.ndarray, " s n"], Units]
"""Values of a task's images in every run, and the prompt of each image."""


def strata(
    runs: Sequence[Rows], base: Sequence[Rows] | None = None, *, join: bool = True
) -> tuple[dict[str, Stratum], Range | None]:
    """Values and prompts of each task, in alphabetical order, and the ends of verdicts or of their changes.

    Args:
        runs: [S] the same images (task, prompt, sample).
        base: [S] images of another model; the values are then the differences to it.
        join: make one stratum of all tasks with a single image; their spread then includes the spread between tasks.

    Raises ValueError: no rows, the same key twice, runs of different images, a value that is not finite.
    """
    listed, before = [list(run) for run in runs], [list(run) for run in base or ()]
    ends = ends_of(*([row.value for row in run] for run in (*listed, *before)), changes=base is not None)
    if base is not None:
        listed = [paired_rows(one, other) for one, other in zip(before, listed, strict=True)]
    tables = [by_key(run) for run in listed]
    if not any(tables[:1]):
        raise ValueError("no rows to score: give at least one row (task, prompt, sample, value)")
    if any(table.keys() != tables[0].keys() for table in tables):
        raise ValueError("the runs were evaluated on different images: give them the same prompts and samples")
    return _by_task(tables, join=join), ends


def _by_task(tables: Sequence[Mapping[Key, ScoreRow]], *, join: bool) -> dict[str, Stratum]:
    """The strata of runs of the same images, their images in alphabetical order; `join` as of `strata`."""
    members: dict[str, list[Key]] = {}
    for key in sorted(tables[0], key=lambda key: (key[0], str(key[1]), key[2])):
        members.setdefault(key[0], []).append(key)
    single = [task for task, own in members.items() if len(own) == 1]
    if join and len(single) > 1:
        members[SINGLE] = [members.pop(task)[0] for task in single]
    found: dict[str, Stratum] = {}
    for task, keys in members.items():
        values = [_check([float(table[key].value) for key in keys]) for table in tables]
        found[task] = np.stack(values), codes(key[:2] for key in keys)
    return found


def score_of(parts: Mapping[str, Stratum], ends: Range | None, *, by_task: bool) -> Interval:
    """The interval of the first run's mean over tasks, or over images, from `strata`."""
    weights, held = weights_of(parts, by_task=by_task)
    return _interval([(value_SN[0], unit_N) for value_SN, unit_N in parts.values()], weights, held, ends)


def weights_of(parts: Mapping[str, Stratum], *, by_task: bool) -> tuple[list[float], list[int]]:
    """Weight of each stratum in the mean over tasks, or over images, and how many tasks it holds."""
    images = [len(unit_N) for _, unit_N in parts.values()]
    tasks = [count if name == SINGLE else 1 for name, count in zip(parts, images, strict=True)]
    counts = tasks if by_task else images
    return [count / sum(counts) for count in counts], tasks


def added_images(ends: Range | None, held: Sequence[int]) -> list[float]:
    """How many images are added at each end to strata that hold so many tasks each."""
    whole = {VERDICTS: 2.0, CHANGES: 0.5}.get(ends, 0.0) if ends else 0.0
    return [whole * count / sum(held) for count in held]


def part_of(value_N: Values, unit_N: Units, ends: Range | None, extra: float) -> Part:
    """Mean and variance of a task; NaN variance for a single image.

    Args:
        unit_N: unit of each image, as 0, 1, 2, …; if there is one unit, the images are the units.
        ends: those of verdicts or their changes add images; others, and None, add none.
        extra: images that are added at each end.
    """
    mean, count = float(value_N.mean()), len(value_N)
    unit_N = unit_N if unit_N.max() > 0 else np.arange(count)
    size_U = np.bincount(unit_N).astype(np.float64)
    units = len(size_U)
    if units == 1:
        return Part(mean=mean, centre=mean, variance=math.nan, degrees=math.nan)
    ends = ends if ends is not None and ends.verdicts else None
    added = extra if ends is not None else 0.0
    whole = count + 2 * added
    centre = mean if ends is None else (count * mean + added * sum(ends[:2])) / whole
    offset_U = np.bincount(unit_N, weights=value_N - centre) / size_U
    variance = float((_scale(size_U / whole) * offset_U**2).sum())
    if ends is not None:
        variance += added * sum((end - centre) ** 2 for end in ends[:2]) / whole**2
    if ends == VERDICTS:  # units whose images all agree vary most
        variance = min(variance, centre * (1 - centre) * float((size_U**2).sum()) / (count * whole))
    return Part(mean=mean, centre=centre, variance=variance, degrees=_degrees(size_U / count) + 2 * added)


def combine(parts: Sequence[Part], weights: Sequence[float]) -> Part:
    """The weighted mean of independent parts."""
    shares = [weight**2 * part.variance for weight, part in zip(weights, parts, strict=True)]
    squares = sum(share**2 / part.degrees for share, part in zip(shares, parts, strict=True))
    return Part(
        mean=sum(weight * part.mean for weight, part in zip(weights, parts, strict=True)),
        centre=sum(weight * part.centre for weight, part in zip(weights, parts, strict=True)),
        variance=sum(shares),
        degrees=sum(shares) ** 2 / squares if squares > 0 else math.inf,
    )


def student(part: Part, ends: Range | None = None, level: float = LEVEL) -> Interval:
    """Student's interval; NaN bounds for one value, and if all agree: their spread was not seen but is not 0."""
    if not part.variance > (1e-12 * part.mean) ** 2:
        return point(part.mean)
    half = student_quantile(level, part.degrees) * math.sqrt(part.variance)
    return bound(part.mean, part.centre - half, part.centre + half, ends)


def bound(mean: float, low: float, high: float, ends: Range | None) -> Interval:
    """An interval within `ends` that holds its mean."""
    if ends is not None:
        low, high = max(low, ends.least), min(high, ends.most)
    return Interval(mean=mean, low=min(low, mean), high=max(high, mean))


def by_key(rows: Rows) -> dict[Key, ScoreRow]:
    """Rows by (task, prompt, sample). Raises ValueError: a key appears twice."""
    keyed: dict[Key, ScoreRow] = {}
    for row in rows:
        key = (row.task, row.prompt, row.sample)
        if key in keyed:
            raise ValueError(f"(task, prompt, sample) = {key} appears twice: number the samples of a prompt 0, 1, 2, …")
        keyed[key] = row
    return keyed


def _interval(
    tasks: Sequence[tuple[Values, Units]],
    weights: Sequence[float],
    held: Sequence[int],
    ends: Range | None,
    level: float = LEVEL,
) -> Interval:
    if sum(held) == 1 and ends == VERDICTS:
        return _share(*tasks[0], level)
    parts = [part_of(*task, ends, extra) for task, extra in zip(tasks, added_images(ends, held), strict=True)]
    return student(combine(parts, weights), ends, level)


def _share(value_N: Values, unit_N: Units, level: float) -> Interval:
    """The share of right images of one task with Wilson's interval, images divided by the design effect: the variance
    between prompts over that of independent images, drawn to 1 by half a degree of freedom, because agreement by chance
    does not show that there is no spread."""
    part, count = part_of(value_N, unit_N, None, 0.0), float(len(value_N))
    if not math.isfinite(part.variance):
        return point(part.mean)
    if unit_N.max() == 0 or int(np.bincount(unit_N).max()) == 1:  # images alone: their share says all of their spread
        return bound(part.mean, *wilson(part.mean, count, student_quantile(level, math.inf)), VERDICTS)
    independent = part.mean * (1 - part.mean) / count
    effect = part.variance / independent if independent > 0 else 1.0
    degrees = part.degrees + PRIOR
    effect += (1.0 - effect) * PRIOR / degrees
    return bound(part.mean, *wilson(part.mean, count / effect, student_quantile(level, degrees)), VERDICTS)


def _scale(share_U: Values) -> Values:
    """Factors for the squared offsets of units that make the variance unbiased if all units vary alike."""
    return np.asarray(share_U**2 / (1 - 2 * share_U + (share_U**2).sum()))


def _degrees(share_U: Values) -> float:
    """(tr A)² / tr A² with A = (1 - w e') D (1 - e w'), D the diagonal of `_scale`, w the shares and e ones."""
    scale_U = _scale(share_U)
    total, squares, cross = float(scale_U.sum()), float((share_U**2).sum()), float((scale_U * share_U).sum())
    trace = total - 2 * cross + total * squares
    own = float((scale_U**2).sum()) + 2 * float((scale_U * (total * share_U**2 - 2 * scale_U * share_U)).sum())
    mixed = (
        2 * float((scale_U**2).sum()) * squares + 2 * cross**2 + (total * squares) ** 2 - 4 * total * squares * cross
    )
    return trace**2 / (own + mixed)


def _check(values: ArrayLike) -> Values:
    value_N = np.asarray(values, dtype=np.float64)
    if value_N.ndim != 1 or len(value_N) == 0:
        raise ValueError(f"values must be one list of at least one number, got the shape {value_N.shape}")
    if not np.isfinite(value_N).all():
        index = int(np.flatnonzero(~np.isfinite(value_N))[0])
        raise ValueError(f"values must be finite, but number {index} is {value_N[index]}: drop failed items first")
    return value_N
