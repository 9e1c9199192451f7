"""DPM-Solver++(2M) for flow models: a multistep solver of order 2 at one network evaluation per step.

Lu et al., arXiv 2211.01095. With `lambda = log((1 - sigma) / sigma)` the ODE's exact step is

    x_next = (sigma_next / sigma) x + (1 - sigma_next) int_0^h exp(u - h) clean(u) du,   h = lambda_next - lambda,

and the solver puts a line through the last two predictions of the clean data in place of clean(u); one prediction alone
is the Euler step. So every step is a weighted sum of the latent and those predictions, whose weights depend on the
noise levels alone and are found in float64. lambda is infinite at sigma 1 and 0. There the limits are taken: a
prediction made at sigma 1 is infinitely far away and adds nothing, and the step to sigma 0 returns the newest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from flowrl.runtime.shapes import Float
from flowrl.samplers.guidance import Velocity
from flowrl.samplers.parametrization import clean_from_velocity, working_dtype
from flowrl.trajectory import Schedule


def dpm_step(
    x: Float[Tensor, " b *latent"], cleans: Sequence[Tensor], sigma: Sequence[float] | Float[Tensor, " n1"]
) -> Float[Tensor, " b *latent"]:
    """One deterministic step, of order 1 (Euler) from one prediction and of order 2 from two.

    With m_0 the newest prediction, m_1 the one before, r the earlier step in lambda over this one and
    B = (1 - sigma_next)(1 - exp(-h)), the midpoint rule `x_next = (sigma_next / sigma) x + B m_0 + B / (2 r) (m_0 -
    m_1)`.

    Args:
        x: [b, *latent] at `sigma[-2]`, any float dtype.
        cleans: n predictions of clean data, oldest first, 1 or 2, each of the shape of x.
        sigma: [n+1] decreasing: the levels the predictions were made at, and the level after the step.

    Returns x_next in the dtype of x, at least float32. Raises ValueError: not 1 or 2 predictions with one sigma more;
    sigma does not decrease within [0, 1]; shapes differ.
    """
    levels = [float(level) for level in sigma]
    if len(cleans) not in (1, 2) or len(levels) != len(cleans) + 1:
        raise ValueError(
            f"a step takes 1 or 2 predictions of clean data and one sigma more, got {len(cleans)} and {len(levels)}: "
            "give the levels of the predictions, oldest first, then the level after the step"
        )
    if not all(0 <= late < early <= 1 for early, late in pairwise(levels)):
        raise ValueError(f"sigma must decrease strictly within [0, 1], oldest first, got {levels}")
    shapes = [tuple(clean.shape) for clean in cleans]
    if any(shape != tuple(x.shape) for shape in shapes):
        raise ValueError(f"predictions must have the shape of x {tuple(x.shape)}, got {shapes}")
    *_, s, s_next = levels
    base = 1 - s_next / s  # (1 - sigma_next)(1 - exp(-h)) in a form that has no limit to take at either end
    weights = [base]
    if len(cleans) == 2:
        change = 0.0
        if s_next > 0:  # times 1 / r, which is 0 if the previous step came from sigma 1
            before, now, after = (-math.inf if sigma == 1 else math.log((1 - sigma) / sigma) for sigma in levels)
            change = base / 2 * (1 / ((now - before) / (after - now)))
        weights = [-change, base + change]
    dtype = working_dtype(x)
    result = s_next / s * x.to(dtype)
    for weight, clean in zip(weights, cleans, strict=True):
        result = result + weight * clean.to(dtype)
    return result


def solve(
    velocity: Velocity, x: Float[Tensor, " b *latent"], schedule: Schedule, *, first: int = 0
) -> Float[Tensor, " b *latent"]:
    """Integrate the ODE from the state before step `first` to sigma 0; the first step and the last one are of order 1.

    Predictions from before `first` are not used: after a stochastic step they belong to another path.

    Args:
        velocity: `velocity(x, sigma, timestep)`, the last two 0-d tensors of the schedule; asked once per step.
        x: [b, *latent] at `schedule.sigma[first]`.
        first: First step to take, 0 .. T; at T x is finished already.

    Returns the finished latent in the dtype of x, at least float32.
    """
    if not 0 <= first <= schedule.num_steps:
        raise ValueError(f"first must lie in 0 .. {schedule.num_steps}, a state of the schedule, got {first}")
    x = x.to(working_dtype(x))
    cleans: list[Tensor] = []
    for step in range(first, schedule.num_steps):
        order = 1 if step in (first, schedule.num_steps - 1) else 2
        predicted = velocity(x, schedule.sigma[step], schedule.timestep[step])
        cleans = [*cleans[-1:], clean_from_velocity(x, predicted, schedule.sigma[step])]
        x = dpm_step(x, cleans[-order:], schedule.sigma[step + 1 - order : step + 2])
    return x
