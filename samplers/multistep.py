"""DPM-Solver++ for flow models: multistep solvers of higher order at one network evaluation a step.

Lu et al., arXiv 2211.01095. With `lambda = log((1 - sigma) / sigma)` the ODE's exact step is

    x_next = (sigma_next / sigma) x + (1 - sigma_next) int_0^h exp(u - h) clean(u) du,   h = lambda_next - lambda,

and a solver of order n puts a polynomial through the last n predictions of the clean data in place of clean(u); order 1
is the Euler step. So every step is a weighted sum of the latent and those predictions, whose weights depend on the
noise levels alone and are found in float64. lambda is infinite at sigma 1 and 0. There the limits are taken: a
prediction made at sigma 1 is infinitely far away and adds nothing, and the step to sigma 0 returns the newest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.samplers.guidance import Velocity
from flowrl.samplers.parametrization import clean_from_velocity, working_dtype
from flowrl.samplers.transition import Transition
from flowrl.trajectory import Schedule

Variant = Literal["midpoint", "heun"]

# Below this many steps the last but one is of order 2 at most, as in diffusers and MixGRPO-Flash.
FEW_STEPS = 15


def solver_order(step: int, num_steps: int, order: int, first: int = 0) -> int:
    """The order in force at a step: the asked one, lowered where history is short and towards the end.

    Order 1 at the first and at the last step, at most 2 at the second, and at most 2 at the last but one where there
    are fewer than 15 steps.

    Args:
        step: Step index, first .. T-1.
        num_steps: T.
        order: 1, 2 or 3.
        first: Step the solver started at.

    Raises:
        ValueError: order is not 1, 2 or 3, or not 0 <= first <= step < T.
    """
    if order not in (1, 2, 3):
        raise ValueError(f"DPM-Solver++ has order 1, 2 or 3, got {order}")
    if not 0 <= first <= step < num_steps:
        raise ValueError(f"step must lie in {first} .. {num_steps - 1}, from the first step to the last, got {step}")
    if step == num_steps - 1:
        return 1
    highest = 2 if step == num_steps - 2 and num_steps < FEW_STEPS else 3
    return min(order, step - first + 1, highest)


def dpm_step(
    x: Float[Tensor, " b *latent"],
    cleans: Sequence[Tensor],
    sigma: Sequence[float] | Float[Tensor, " n1"],
    *,
    variant: Variant = "midpoint",
) -> Float[Tensor, " b *latent"]:
    """One deterministic step, of as high an order as predictions are given.

    With m_0 the newest prediction, r_i the earlier steps in lambda over this one and B = (1 - sigma_next)(1 - exp(-h)),
    `x_next = (sigma_next / sigma) x + B m_0 + ...`, where order 2 adds

        midpoint   B / 2 D1                                    D1 = (m_0 - m_1) / r_0
        heun       (1 - sigma_next)((exp(-h) - 1) / h + 1) D1, exact for predictions linear in lambda

    and order 3 is exact for quadratic ones. Released third-order code has half of that second-difference term, which
    makes it of order 2; here it is whole.

    Args:
        x: [b, *latent] at `sigma[-2]`, any float dtype.
        cleans: n predictions of clean data, oldest first, 1 to 3, each of the shape of x.
        sigma: [n+1] decreasing: the levels the predictions were made at, and the level after the step.
        variant: Rule of order 2; no effect at the others.

    Returns:
        x_next in the dtype of x, at least float32.

    Raises:
        ValueError: not 1 to 3 predictions with one sigma more; sigma does not decrease within [0, 1]; shapes differ.
    """
    levels = _check(x, cleans, sigma, highest=3)
    if variant not in ("midpoint", "heun"):
        raise ValueError(f"unknown variant {variant!r} of order 2: choose midpoint or heun")
    return _combine(x, cleans, *_weights(levels, variant))


def dpm_sde_step(
    x: Float[Tensor, " b *latent"], cleans: Sequence[Tensor], sigma: Sequence[float] | Float[Tensor, " n1"]
) -> Transition:
    """One step of SDE-DPM-Solver++: order 1 from one prediction (the `dpm_sde` kernel), 2M midpoint from two.

        mean = (sigma_next / sigma) exp(-h) x + (1 - sigma_next)(1 - exp(-2 h)) (m_0 + D1 / 2)
        std  = sigma_next sqrt(1 - exp(-2 h))

    The mean of order 2 depends on the previous prediction too, so a replay has to be given it. std is 0 on the step to
    sigma 0.

    Args:
        x: As `dpm_step`.
        cleans: One or two predictions, oldest first.
        sigma: As `dpm_step`.

    Raises:
        ValueError: as `dpm_step`; or more than two predictions were given.
    """
    levels = _check(x, cleans, sigma, highest=2)
    s, s_next = levels[-2:]
    kept = s_next * (1 - s) / (s * (1 - s_next))  # exp(-h)
    newest, *older = torch.eye(len(cleans), dtype=torch.float64).flip(0)
    total = (1 - s_next) * (1 - kept**2)
    weights = total * newest
    if older and s_next > 0:
        weights += total / 2 * (newest - older[0]) / _ratios(levels)[0]
    mean = _combine(x, cleans, s_next / s * kept, weights)
    return Transition(mean, torch.tensor(s_next * math.sqrt(1 - kept**2), dtype=mean.dtype, device=mean.device))


def solve(
    velocity: Velocity,
    x: Float[Tensor, " b *latent"],
    schedule: Schedule,
    *,
    order: int = 2,
    variant: Variant = "midpoint",
    first: int = 0,
    storage_dtype: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
) -> Float[Tensor, " b *latent"]:
    """Integrate the ODE from the state before step `first` to sigma 0.

    Predictions from before `first` are not used: after a stochastic step they belong to another path.

    Args:
        velocity: `velocity(x, sigma, timestep)`, the last two 0-d tensors of the schedule; asked once a step.
        x: [b, *latent] at `schedule.sigma[first]`.
        schedule: T steps.
        order: 1 (Euler), 2 or 3, lowered by `solver_order`.
        variant: Rule of order 2.
        first: First step to take, 0 .. T; at T x is finished already.
        storage_dtype: If given, each latent is rounded to it before anything else sees it.
        progress: Called with the step index after each step.

    Returns:
        The finished latent in the dtype of x, at least float32.

    Raises:
        ValueError: order, variant or first is out of range, or a velocity has the wrong shape.
    """
    if not 0 <= first <= schedule.num_steps:
        raise ValueError(f"first must lie in 0 .. {schedule.num_steps}, a state of the schedule, got {first}")
    dtype = working_dtype(x)
    x = x.to(storage_dtype or dtype).to(dtype)
    cleans: list[Tensor] = []
    for step in range(first, schedule.num_steps):
        used = solver_order(step, schedule.num_steps, order, first)
        predicted = velocity(x, schedule.sigma[step], schedule.timestep[step])
        cleans = [*cleans[-2:], clean_from_velocity(x, predicted, schedule.sigma[step])]
        x = dpm_step(x, cleans[-used:], schedule.sigma[step + 1 - used : step + 2], variant=variant)
        x = x.to(storage_dtype or dtype).to(dtype)
        if progress is not None:
            progress(step)
    return x


def _check(x: Tensor, cleans: Sequence[Tensor], sigma: Sequence[float] | Tensor, highest: int) -> list[float]:
    """The noise levels as numbers, with everything checked."""
    levels = [float(level) for level in sigma]
    if not 1 <= len(cleans) <= highest or len(levels) != len(cleans) + 1:
        raise ValueError(
            f"a step takes 1 to {highest} predictions of clean data and one sigma more, got {len(cleans)} and "
            f"{len(levels)}: give the levels of the predictions, oldest first, then the level after the step"
        )
    if not all(0 <= late < early <= 1 for early, late in pairwise(levels)):
        raise ValueError(f"sigma must decrease strictly within [0, 1], oldest first, got {levels}")
    shapes = [tuple(clean.shape) for clean in cleans]
    if any(shape != tuple(x.shape) for shape in shapes):
        raise ValueError(f"predictions must have the shape of x {tuple(x.shape)}, got {shapes}")
    return levels


def _combine(x: Tensor, cleans: Sequence[Tensor], share: float, weights: Tensor) -> Tensor:
    """`share * x + sum_j weights_j * clean_j` in the working dtype of x."""
    dtype = working_dtype(x)
    result = share * x.to(dtype)
    for weight, clean in zip(weights.tolist(), cleans, strict=True):
        result = result + weight * clean.to(dtype)
    return result


def _lambda(sigma: float) -> float:
    """Half the logarithm of the signal-to-noise ratio; -inf at 1 and inf at 0."""
    if sigma in (0.0, 1.0):
        return math.inf if sigma == 0 else -math.inf
    return math.log((1 - sigma) / sigma)


def _ratios(levels: list[float]) -> list[float]:
    """r_0, r_1, ...: the earlier steps in lambda over the present one, newest first."""
    values = [_lambda(level) for level in reversed(levels)]
    steps = [late - early for late, early in pairwise(values)]
    return [step / steps[0] for step in steps[1:]]


def _weights(levels: list[float], variant: Variant) -> tuple[float, Tensor]:
    """Weight of the latent and [n] float64 weights of the predictions, oldest first."""
    s, s_next = levels[-2:]
    newest, *older = torch.eye(len(levels) - 1, dtype=torch.float64).flip(0)
    # (1 - sigma_next)(1 - exp(-h)) in a form that has no limit to take at either end.
    base = 1 - s_next / s
    weights = base * newest
    if older and s_next > 0:
        h, ratios = _lambda(s_next) - _lambda(s), _ratios(levels)
        slope = (newest - older[0]) / ratios[0]
        linear = (1 - s_next) * (math.expm1(-h) / h + 1)
        if len(older) == 1:
            weights += (base / 2 if variant == "midpoint" else linear) * slope
        else:
            change = slope - (older[0] - older[1]) / ratios[1]
            reach = ratios[0] + ratios[1]
            weights += linear * (slope + ratios[0] / reach * change)
            weights += (1 - s_next) * (1 - 2 * (math.expm1(-h) + h) / h**2) * change / reach
    return s_next / s, weights
