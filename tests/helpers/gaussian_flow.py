"""A flow whose velocity is known: scalar Gaussian data, every element alike."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import build_schedule
from flowrl.trajectory import Schedule

MEAN, SPREAD = 1.5, 0.5  # of the data; the variance a perfect sampler ends with is .25


def exact_velocity(x: Tensor, sigma: Tensor, spread: float = SPREAD) -> Tensor:
    """E[noise - clean | x] for data N(MEAN, spread^2)."""
    variance = (1 - sigma) ** 2 * spread**2 + sigma**2
    return -MEAN + (sigma - (1 - sigma) * spread**2) / variance * (x - (1 - sigma) * MEAN)


def velocity(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
    """The same as sampling loops call it."""
    return exact_velocity(x, sigma)


def uniform_schedule(num_steps: int) -> Schedule:
    """Evenly spaced noise levels from 1 to 0."""
    return build_schedule({"shift": 1.0}, num_steps, grid="linspace")


def noise_of(shape: tuple[int, ...], seed: int = 0) -> Callable[[int], Tensor]:
    """The noise of a step."""
    return lambda step: counter_normal(shape, seed, "step", step)
