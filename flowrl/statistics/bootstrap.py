"""Intervals, and the bootstrap for statistics that are not means (those are `flowrl.statistics.means`).

Intervals are percentile bootstraps (Efron, "Bootstrap methods: another look at the jackknife", 1979). Resampling n
units makes the spread of a statistic too small by sqrt((n-1)/n), so the intervals are widened by the inverse, within
the range of the values.

Letters: U units (prompts), K sums, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from flowrl.runtime.shapes import Float, Int

LEVEL = 0.95
POWER = 0.8
DETECTABLE_ERRORS = NormalDist().inv_cdf((1 + LEVEL) / 2) + NormalDist().inv_cdf(POWER)
"""Size, in standard errors, of a true difference that a test finds with 80 % power at 5 %, two-sided: 2.80."""
MAX_DRAWS = 4_000_000  # resampled indexes held at once: bounds memory, not accuracy


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean with its confidence bounds; NaN if the spread is unknown: for one unit, or for equal units."""

    mean: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether the bounds are numbers; False if a single unit left the spread unknown."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside the bounds; False if they are unknown."""
        return self.known and not self.low <= value <= self.high


def point(value: float) -> Interval:
    """A number with unknown bounds."""
    return Interval(mean=value, low=math.nan, high=math.nan)


UNKNOWN = point(math.nan)

Statistic = Callable[[Float[np.ndarray, " k r"]], Float[np.ndarray, " r"]]
"""Maps K sums of R resamples to the statistic of each, NaN if it is undefined."""


def codes(labels: Iterable[Hashable]) -> Int[np.ndarray, " n"]:
    """Numbers labels 0, 1, 2, … in the order of their first appearance."""
    code_of: dict[Hashable, int] = {}
    return np.array([code_of.setdefault(label, len(code_of)) for label in labels], dtype=np.int64)


def resample(
    sum_KU: Float[np.ndarray, " k u"], statistic: Statistic, estimate: float, *,
    bounds: tuple[float, float] = (-math.inf, math.inf), num_resamples: int, rng: np.random.Generator,
) -> Float[np.ndarray, " r"]:  # fmt: skip
    """A statistic of the sums of units drawn with replacement, R times; widened about `estimate` by sqrt(U/(U-1)),
    within `bounds`; NaN for a single unit."""
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


def percentiles(mean: float, replicate_R: Float[np.ndarray, " r"]) -> Interval:
    """The interval of replicates, wide enough to hold the mean; unknown if a replicate is unknown or all agree."""
    if not np.isfinite(replicate_R).all() or np.ptp(replicate_R) <= 1e-12 * abs(mean):
        return point(mean)
    # min, max: the mean of equal values can lie one rounding away from them.
    low, high = np.quantile(replicate_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean=mean, low=min(float(low), mean), high=max(float(high), mean))
