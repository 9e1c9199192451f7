"""Quantiles of Student's T, for every interval of a mean."""

from __future__ import annotations

import math
from statistics import NormalDist

_TINY = 1e-300  # stands for 0 where a continued fraction divides
_STEPS = 10_000


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
    value = c = 1.0
    d = 1 / (1 - (a + b) * x / (a + 1) or _TINY)
    value = d
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
