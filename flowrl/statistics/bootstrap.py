"""Scores with their uncertainty: bootstrap intervals, stratified by task, paired before and after.

Intervals are percentile bootstraps (Efron, "Bootstrap methods: another look at the jackknife", 1979). Drawing n units
makes the spread of the mean too small by sqrt((n-1)/n): they are widened by the inverse, within the values' range.

Images of one prompt resemble each other, so prompts are drawn where a task has enough of them, and images otherwise.
None of these intervals covers another training seed; `over_seeds` does, and so does `flowrl.statistics.crossed`.

Letters: N values, U units (clusters, prompts or images), K sums, R resamples, S runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

LEVEL = 0.95
POWER = 0.8
DETECTABLE_ERRORS = NormalDist().inv_cdf((1 + LEVEL) / 2) + NormalDist().inv_cdf(POWER)
"""Standard errors that a true difference must measure to be found with 80 % power at 5 %, two-sided: 2.80."""
MIN_PROMPTS = 20  # below this many distinct prompts in a task, images are resampled instead of prompts
MAX_DRAWS = 4_000_000  # resampled indexes held at once: bounds memory, not accuracy


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean with its confidence bounds; NaN bounds where one unit alone was seen, whose spread cannot be known."""

    mean: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether the bounds are numbers; False where a single unit left the spread unknown."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside the bounds; False where they are unknown."""
        return self.known and not self.low <= value <= self.high


def point(value: float) -> Interval:
    """A number whose bounds are not known."""
    return Interval(mean=value, low=math.nan, high=math.nan)


UNKNOWN = point(math.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRow:
    """The score of one image: the task and prompt it answers, its sample number under that prompt, and its value."""

    task: str
    prompt: int | str
    sample: int
    value: float | int


Rows = Iterable[ScoreRow]
Statistic = Callable[[Float[np.ndarray, " k r"]], Float[np.ndarray, " r"]]
"""K sums of R resamples to the statistic of each, NaN where it is not defined."""
Stratum = tuple[Float[np.ndarray, " s n"], Int[np.ndarray, " n"]]
"""Values of a task's images in every run, and the unit that is drawn of each image."""


def bootstrap_mean(
    values: ArrayLike,
    clusters: Sequence[Hashable] | np.ndarray | None = None,
    *,
    level: float = LEVEL,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Mean of `values` [N] (booleans count as 0 and 1) with the interval of coverage `level` from R = `num_resamples`.

    Values that share a label in `clusters` [N] are drawn together; None: each is its own unit. Same seed, same
    interval.

    Raises:
        ValueError: no values, a value that is not finite, a wrong number of clusters, or a level outside (0, 1).
    """
    _check_options(level, num_resamples)
    value_N = _checked_values(values)
    unit_N = np.arange(len(value_N)) if clusters is None else codes(clusters)
    if len(unit_N) != len(value_N):
        raise ValueError(f"clusters has {len(unit_N)} labels for {len(value_N)} values: give one for each")
    replicate_R = _means(value_N, unit_N, num_resamples, np.random.default_rng(seed))
    return percentiles(float(value_N.mean()), replicate_R, level)


def stratified_score(rows: Rows, *, level: float = LEVEL, num_resamples: int = 2000, seed: int = 0) -> Interval:
    """GenEval's overall score: the mean over tasks of the mean over a task's images ("macro"), with its interval.

    Within a task prompts are resampled, or images where it has fewer than `MIN_PROMPTS` distinct prompts.

    Raises:
        ValueError: no rows, the same (task, prompt, sample) twice, or a value that is not finite.
    """
    _check_options(level, num_resamples)
    means, replicates = _by_task(rows, num_resamples, seed)
    return percentiles(float(np.mean(list(means.values()))), np.mean(list(replicates.values()), axis=0), level)


def task_scores(rows: Rows, *, level: float = LEVEL, num_resamples: int = 2000, seed: int = 0) -> dict[str, Interval]:
    """The mean of every task with its interval, tasks in alphabetical order; otherwise as `stratified_score`."""
    _check_options(level, num_resamples)
    means, replicates = _by_task(rows, num_resamples, seed)
    return {task: percentiles(mean, replicates[task], level) for task, mean in means.items()}


def paired_difference(before: Rows, after: Rows, *, seed: int = 0) -> Interval:
    """`stratified_score` after minus before, from the differences of the same (task, prompt, sample).

    What both share (a hard prompt, an easy seed) cancels: narrower than the interval of two independent scores.

    Raises:
        ValueError: a row without its partner, and whatever `stratified_score` refuses.
    """
    return stratified_score(paired_rows(before, after), seed=seed)


def paired_rows(before: Rows, after: Rows) -> list[ScoreRow]:
    """One row for each (task, prompt, sample), its value the difference after - before.

    Raises:
        ValueError: the same key twice on one side, or a key that only one side has.
    """
    before_of, after_of = _by_key(before), _by_key(after)
    lonely = before_of.keys() ^ after_of.keys()
    if lonely:
        example = min(lonely, key=str)
        raise ValueError(
            f"{len(lonely)} rows have no partner, such as (task, prompt, sample) = {example} "
            f"({'before' if example in before_of else 'after'} only): score the same prompts and samples on both "
            "sides, or drop what one side lacks before pairing"
        )
    return [replace(row, value=float(after_of[key].value) - float(row.value)) for key, row in before_of.items()]


def partners(before: Rows, after: Rows) -> tuple[list[ScoreRow], list[ScoreRow]]:
    """The rows of both sides whose (task, prompt, sample) the other side has too."""
    before_of, after_of = _by_key(before), _by_key(after)
    shared = [key for key in before_of if key in after_of]
    return [before_of[key] for key in shared], [after_of[key] for key in shared]


def over_seeds(score_of_seed: ArrayLike) -> Interval:
    """Mean over S independent training runs with Student's t interval: mean ± t(0.95, S-1) · s / sqrt(S).

    `score_of_seed` holds one number per seed: a score, or a difference to the run's own start. A handful of seeds is
    too few to resample, hence the closed form (it takes the seeds as normally distributed). One seed: NaN bounds.

    Raises:
        ValueError: no seeds, or a number that is not finite.
    """
    value_S = _checked_values(score_of_seed)
    mean, count = float(value_S.mean()), len(value_S)
    half = math.nan
    if count > 1:
        half = student_quantile(LEVEL, count - 1) * float(value_S.std(ddof=1)) / math.sqrt(count)
    return Interval(mean=mean, low=mean - half, high=mean + half)


def student_quantile(level: float, degrees: int) -> float:
    """The t with P(|T| <= t) = level for Student's T with `degrees` degrees of freedom.

    With t = sqrt(degrees) · tan(angle) the probability is the normalised integral of cos(angle)^(degrees-1) from 0,
    taken by the trapezoid rule and inverted by interpolation (relative error below 1e-5 for levels up to 0.99).
    """
    angle = np.linspace(0.0, math.pi / 2, 20_001)
    density = np.cos(angle) ** (degrees - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(degrees) * math.tan(float(np.interp(level, mass / mass[-1], angle)))


# ---- what every bootstrap of the project is made of ------------------------------------------------------------------


def codes(labels: Iterable[Hashable]) -> Int[np.ndarray, " n"]:
    """Labels as 0, 1, 2, … in the order of their first appearance."""
    code_of: dict[Hashable, int] = {}
    return np.array([code_of.setdefault(label, len(code_of)) for label in labels], dtype=np.int64)


def strata(runs: Sequence[Rows]) -> dict[str, Stratum]:
    """Task, in alphabetical order -> the values [S, N] of its images and their units [N], images in one order.

    Units are prompts, or images where a task has fewer than `MIN_PROMPTS` distinct prompts.

    Raises:
        ValueError: no rows, the same (task, prompt, sample) twice, runs of different images, a value not finite.
    """
    tables = [_by_key(run) for run in runs]
    if not tables or not tables[0]:
        raise ValueError("no rows to score: give at least one row (task, prompt, sample, value)")
    if any(table.keys() != tables[0].keys() for table in tables):
        raise ValueError("the runs were evaluated on different images: give them the same prompts and samples")
    members: dict[str, list[Key]] = {}
    for key in sorted(tables[0], key=lambda key: (key[0], str(key[1]), key[2])):
        members.setdefault(key[0], []).append(key)
    found = {}
    for task, keys in members.items():
        value_SN = np.stack([_checked_values([float(table[key].value) for key in keys]) for table in tables])
        unit_N = codes(key[1] for key in keys)
        found[task] = (value_SN, unit_N if unit_N.max() + 1 >= MIN_PROMPTS else np.arange(len(keys)))
    return found


def resampled(
    sum_KU: Float[np.ndarray, " k u"], statistic: Statistic, estimate: float, *,
    bounds: tuple[float, float] = (-math.inf, math.inf), num_resamples: int, rng: np.random.Generator,
) -> Float[np.ndarray, " r"]:  # fmt: skip
    """A statistic of the sums over units drawn with replacement, R times.

    Widened about its `estimate` by sqrt(U/(U-1)), within `bounds`; NaN for a single unit.
    """
    units = sum_KU.shape[1]
    if units == 1:
        return np.full(num_resamples, math.nan)
    found, chunk = [], max(1, MAX_DRAWS // sum_KU.size)
    for start in range(0, num_resamples, chunk):
        draw = rng.integers(units, size=(min(chunk, num_resamples - start), units))
        found.append(statistic(np.stack([sum_U[draw].sum(axis=1) for sum_U in sum_KU])))
    widened_R = estimate + math.sqrt(units / (units - 1)) * (np.concatenate(found) - estimate)
    return np.asarray(np.clip(widened_R, *bounds))


def draw_counts(units: int, num_resamples: int, rng: np.random.Generator) -> Float[np.ndarray, " r u"]:
    """How often each of U units is drawn in R draws of U with replacement."""
    return rng.multinomial(units, np.full(units, 1 / units), size=num_resamples).astype(np.float64)


def percentiles(mean: float, replicate_R: Float[np.ndarray, " r"], level: float = LEVEL) -> Interval:
    """The interval of replicates, wide enough to hold the mean; unknown where a replicate is."""
    if not np.isfinite(replicate_R).all():
        return point(mean)
    # min, max: the mean of equal values can lie one rounding away from them.
    low, high = np.quantile(replicate_R, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean=mean, low=min(float(low), mean), high=max(float(high), mean))


def _by_task(rows: Rows, num_resamples: int, seed: int) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Mean and bootstrap replicates of every task; each task has a generator of its own."""
    means, replicates = {}, {}
    for index, (task, ((value_N,), unit_N)) in enumerate(strata([rows]).items()):
        means[task] = float(value_N.mean())
        replicates[task] = _means(value_N, unit_N, num_resamples, np.random.default_rng([seed, index]))
    return means, replicates


def _means(
    value_N: Float[np.ndarray, " n"], unit_N: Int[np.ndarray, " n"], num_resamples: int, rng: np.random.Generator
) -> Float[np.ndarray, " r"]:
    """Means of values whose units are resampled."""
    sum_KU = np.stack([np.bincount(unit_N, weights=value_N), np.bincount(unit_N).astype(np.float64)])
    return resampled(
        sum_KU, lambda s: s[0] / s[1], float(value_N.mean()), bounds=(value_N.min(), value_N.max()),
        num_resamples=num_resamples, rng=rng,
    )  # fmt: skip


Key = tuple[str, int | str, int]


def _by_key(rows: Rows) -> dict[Key, ScoreRow]:
    keyed: dict[Key, ScoreRow] = {}
    for row in rows:
        key = (row.task, row.prompt, row.sample)
        if key in keyed:
            raise ValueError(f"(task, prompt, sample) = {key} appears twice: number the samples of a prompt 0, 1, 2, …")
        keyed[key] = row
    return keyed


def _checked_values(values: ArrayLike) -> Float[np.ndarray, " n"]:
    value_N = np.asarray(values, dtype=np.float64)
    if value_N.ndim != 1 or len(value_N) == 0:
        raise ValueError(f"values must be one list of at least one number, got the shape {value_N.shape}")
    if not np.isfinite(value_N).all():
        index = int(np.flatnonzero(~np.isfinite(value_N))[0])
        raise ValueError(f"values must be finite, but number {index} is {value_N[index]}: drop failed items first")
    return value_N


def _check_options(level: float, num_resamples: int) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}: write 95 % as 0.95")
    if num_resamples < 1:
        raise ValueError(f"num_resamples must be at least 1, got {num_resamples}: 2000 is the default")
