"""One denoising step as every sampling loop takes it: along the ODE, or drawn and with its density."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flowrl.runtime.placement import sent
from flowrl.runtime.shapes import Float
from flowrl.samplers.kernels import KERNELS, Kernel
from flowrl.samplers.parametrization import Sigma
from flowrl.samplers.transition import positive_std


class Moved(NamedTuple):
    """A drawn latent."""

    x_next: Tensor
    """[b, *latent] in the dtype of x, at least float32: the value that is stored, met by the network and scored."""
    log_prob: Tensor
    """[b] log-density of x_next, summed over latent dimensions."""
    mean: Tensor
    """[b, *latent] of the transition."""


def check_steps(steps: Sequence[int], num_steps: int, name: str, *, least: int = 1) -> tuple[int, ...]:
    """The steps in ascending order. Raises ValueError: fewer than `least`, one twice, or one outside the schedule."""
    ordered = tuple(sorted(steps))
    if len(ordered) < least or len(set(ordered)) != len(ordered) or not set(ordered) <= set(range(num_steps)):
        count = "" if least == 0 else ", at least one,"
        raise ValueError(f"{name} must be distinct{count} and in 0 .. {num_steps - 1}, got {list(steps)}")
    return ordered


def euler(
    x: Float[Tensor, " b *latent"], velocity: Float[Tensor, " b *latent"], sigma: Sigma, sigma_next: Sigma
) -> Float[Tensor, " b *latent"]:
    """The latent after a step along the ODE; arguments as a kernel's."""
    return KERNELS["ode"](x, velocity, sigma, sigma_next).mean


def advance(
    kernel: Kernel,
    x: Float[Tensor, " b *latent"],
    velocity: Float[Tensor, " b *latent"],
    sigma: Sigma,
    sigma_next: Sigma,
    noise: Tensor,
) -> Moved:
    """Draw the next latent, `mean + std * noise`, and score the value that is stored.

    Args:
        kernel: With noise_level and sigma_max bound.
        noise: [b, *latent] standard normal, on any device.

    Raises ValueError: as the kernel; the step has std 0, or the noise has not the shape of x.
    """
    transition = kernel(x, velocity, sigma, sigma_next)
    mean, std = transition.mean, positive_std(transition)
    if noise.shape != mean.shape:
        raise ValueError(f"step noise must have the shape of x {tuple(mean.shape)}, got {tuple(noise.shape)}")
    x_next = mean + std * sent(noise, mean.device).to(mean.dtype)
    return Moved(x_next, kernel.log_prob(x_next, transition), mean)
