"""Intervals, the bootstrap for statistics that are not means (those are `flowrl.statistics.means`), and Student's T.

Intervals are percentile bootstraps (Efron, "Bootstrap methods: another look at the jackknife", 1979). Resampling n
units makes the spread of a statistic too small by sqrt((n-1)/n), so the intervals are widened by the inverse, within
the range of the values.

Letters: U units (prompts), K sums, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
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


_TINY = 1e-300  # stands for 0 where a continued fraction divides
_STEPS = 10_000


@lru_cache(4096)
def student_quantile(level: float, degrees: float) -> float:
    """The t with P(|T| <= t) = level for Student's T with `degrees` degrees of freedom, infinite for the normal's.
    Newton's method from the normal quantile, below the root; the density falls, so steps end short of it. Relative
    error 1e-12 up to a million degrees, 1e-9 beyond."""
    t, wanted = NormalDist().inv_cdf((1 + level) / 2), 1 - level
    if not math.isfinite(degrees):
        return t
    for _ in range(100):
        density = math.exp(_log_scale(degrees) - (degrees + 1) / 2 * math.log1p(t * t / degrees))
        step = (tails(t, degrees) - wanted) / (2 * density)
        t += step
        if abs(step) <= 1e-14 * t:
            break
    return t


def _log_scale(degrees: float) -> float:
    """The logarithm of the density of Student's T at 0: gamma((n + 1) / 2) / gamma(n / 2) / sqrt(pi n)."""
    half = degrees / 2
    if half < 50:
        ratio = math.lgamma(half + 0.5) - math.lgamma(half)
    else:  # Stirling's series of the difference, whose two terms are large and almost equal
        ratio = 0.5 * math.log(half) - 1 / (8 * half) + 1 / (192 * half**3) - 1 / (640 * half**5)
    return ratio - 0.5 * math.log(math.pi * degrees)


def tails(t: float, degrees: float) -> float:
    """P(|T| > t), the regularised incomplete beta function I_x(n / 2, 1 / 2) at x = n / (n + t²), by Lentz's method for
    its continued fraction (Numerical Recipes, "Incomplete Beta Function"); beyond the turning point x = (a + 1) / (a +
    b + 2) by that of I_{1 - x}(1 / 2, n / 2), which converges sooner."""
    a, b, square = degrees / 2, 0.5, t * t
    x, rest = degrees / (degrees + square), square / (degrees + square)
    # x^a (1 - x)^b / B(a, b), with 1 / B(a, 1 / 2) = sqrt(n) times the density at 0
    front = math.exp(_log_scale(degrees) + 0.5 * math.log(degrees) - a * math.log1p(square / degrees)) * math.sqrt(rest)
    if x < (a + 1) / (a + b + 2):
        return front / a * _fraction(x, a, b)
    return 1 - front / b * _fraction(rest, b, a)


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction 1 / (1 + d1 / (1 + d2 / ...)) of I_x(a, b)."""
    c = 1.0
    value = d = 1 / (1 - (a + b) * x / (a + 1) or _TINY)
    for m in range(1, _STEPS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or _TINY)
            c = 1 + term / c or _TINY
            value *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return value
