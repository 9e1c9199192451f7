"""One denoising step of a flow model as a Gaussian transition.

Every sampler is `x_next = (1 - sigma_next) * clean + k * noise + std * xi` with the network's predicted clean data and
noise, `xi ~ N(0, I)`. A sampler is a rule for `(k, std)`; h = sigma - sigma_next is the size of the step.

| kernel | k | std |
|---|---|---|
| ode | sigma_next | 0 |
| flow_sde | sigma_next - g^2 h / (2 sigma), g = a sqrt(sigma / (1 - sigma)) | g sqrt(h) |
| dance_sde | sigma_next - a^2 h / (2 sigma) | a sqrt(h) |
| cps | sigma_next cos(a pi / 2) | sigma_next sin(a pi / 2) |
| ddim_flow | sqrt(sigma_next^2 - std^2) | a sigma_next sqrt(1 - q^2) |
| wan_sde | sigma_next - g^2 h / (2 sigma), g = a sigma_max sigma | g sqrt(h) |
| dpm_sde | sigma_next q^(a^2) | sigma_next sqrt(1 - q^(2 a^2)) |

with q = sigma_next (1 - sigma) / (sigma (1 - sigma_next)), what survives of the noise-to-signal ratio.

Arithmetic is in the dtype of x raised to float32; (k, std) are found in float64 and rounded once, which makes a step
the same to the bit whether sigma comes as a number of the schedule or as one value a sample. Sigma is checked where it
lives: keep schedules on the CPU and no step waits for a GPU.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.samplers.parametrization import Sigma, column, raise_pair
from flowrl.samplers.transition import Transition

# Sigmas this close to 1 count as the start: UniPC grids begin at .9997 instead of 1.
START = 1 - 1e-3

Latent = Float[Tensor, " b *latent"]


@runtime_checkable
class Kernel(Protocol):
    """A sampler with its noise level and sigma_max bound."""

    def __call__(self, x: Tensor, velocity: Tensor, sigma: Sigma, sigma_next: Sigma) -> Transition: ...


def _levels(sigma: Sigma, sigma_next: Sigma) -> tuple[Tensor, Tensor]:
    """Both noise levels in float64, checked."""
    # A GPU tensor stays where it is; two devices would mean that one of them is a plain number or on the CPU.
    s, s_next = torch.as_tensor(sigma, dtype=torch.float64), torch.as_tensor(sigma_next, dtype=torch.float64)
    if s.device != s_next.device:
        s, s_next = s.cpu(), s_next.cpu()
    if not bool(((s_next >= 0) & (s_next < s) & (s <= 1)).all()):
        raise ValueError(
            f"a step needs 0 <= sigma_next < sigma <= 1, got sigma {s.tolist()} and sigma_next {s_next.tolist()}: "
            "sigma is the noise fraction and decreases during sampling"
        )
    return s, s_next


def _level(noise_level: float, kernel: str, highest: float = math.inf) -> float:
    """The noise level, checked."""
    if not 0 <= noise_level <= highest or math.isinf(noise_level):
        allowed = f"in [0, {highest:g}]" if math.isfinite(highest) else "finite and not negative"
        raise ValueError(f"noise_level of {kernel} must be {allowed}, got {noise_level}; 0 is the ODE")
    return float(noise_level)


def _bound(sigma_max: Sigma, device: torch.device) -> Tensor:
    """The schedule's second sigma in float64, checked."""
    highest = torch.as_tensor(sigma_max, dtype=torch.float64).to(device)
    if not bool(((highest >= 0) & (highest < 1)).all()):
        raise ValueError(f"sigma_max must lie in [0, 1), got {sigma_max}: pass the second sigma of the schedule")
    return highest


def _survival(s: Tensor, s_next: Tensor) -> Tensor:
    """q = exp(-h_lambda), the share of the noise-to-signal ratio that survives a step; 0 at both ends of the path."""
    return s_next * (1 - s) / (s * (1 - s_next))


def _transition(x: Tensor, velocity: Tensor, levels: tuple[Tensor, Tensor], k: Tensor, std: Tensor) -> Transition:
    """Assemble `mean = (1 - sigma_next) * clean + k * noise` from the network's velocity.

    This form has no cancelling coefficients near sigma = 1, unlike the expanded one of the Flow-GRPO paper.
    """
    x, velocity = raise_pair(x, velocity, "velocity")
    s, s_next = levels
    clean = x - column(s, x) * velocity
    noise = x + column(1 - s, x) * velocity
    mean = column(1 - s_next, x, "sigma_next") * clean + column(k, x) * noise
    return Transition(mean, column(std, x))


def ode(
    x: Latent,
    velocity: Latent,
    sigma: Sigma,
    sigma_next: Sigma,
    noise_level: float = 0.0,
    sigma_max: Sigma = 0.96,
) -> Transition:
    """Euler step of the probability-flow ODE, `mean = x - h * velocity`, std 0.

    Args:
        x: [b, *latent] at sigma, any float dtype.
        velocity: [b, *latent], the (guided) network output at x.
        sigma: Noise fraction of x: a number, a 0-d tensor or [b].
        sigma_next: Noise fraction after the step, likewise; smaller.
        noise_level: Ignored.
        sigma_max: Ignored.

    Raises:
        ValueError: shapes do not fit, or not 0 <= sigma_next < sigma <= 1. All kernels raise so.
    """
    s, s_next = _levels(sigma, sigma_next)
    return _transition(x, velocity, (s, s_next), s_next, torch.zeros_like(s - s_next))


def flow_sde(
    x: Latent,
    velocity: Latent,
    sigma: Sigma,
    sigma_next: Sigma,
    noise_level: float = 0.7,
    sigma_max: Sigma = 0.96,
) -> Transition:
    """Flow-GRPO's SDE step (Liu et al., arXiv 2505.05470), g = noise_level sqrt(sigma / (1 - sigma)).

    The continuous SDE has the marginals of the ODE; noise_level sqrt(2) is the memoryless schedule. g is infinite at
    sigma = 1, where `1 - sigma` is taken at sigma_max. A first step from 1 to sigma_max then has std = noise_level.

    Args:
        x: As `ode`, like the other tensors.
        velocity: As `ode`.
        sigma: As `ode`.
        sigma_next: As `ode`.
        noise_level: Not negative.
        sigma_max: The schedule's second sigma. Replaces sigma in g where sigma >= 0.999 and sigma > sigma_max. Passed
            with every call, because a replayed step must see the value of its rollout.

    Raises:
        ValueError: as `ode`; or noise_level is negative, or sigma_max not in [0, 1).
    """
    level = _level(noise_level, "flow_sde")
    s, s_next = _levels(sigma, sigma_next)
    held = torch.where(s >= START, torch.minimum(s, _bound(sigma_max, s.device)), s)
    variance_rate = level**2 * s / (1 - held)
    step = s - s_next
    return _transition(x, velocity, (s, s_next), s_next - variance_rate * step / (2 * s), (variance_rate * step).sqrt())


def dance_sde(
    x: Latent,
    velocity: Latent,
    sigma: Sigma,
    sigma_next: Sigma,
    noise_level: float = 0.3,
    sigma_max: Sigma = 0.96,
) -> Transition:
    """DanceGRPO's SDE step (Xue et al., arXiv 2505.07818): constant diffusion, std = noise_level sqrt(h).

    Regular at sigma = 1; the last step to sigma 0 keeps its noise (k = -noise_level^2 / 2), so run that one as an ODE
    step.

    Args:
        x: As `ode`, like the other tensors.
        velocity: As `ode`.
        sigma: As `ode`.
        sigma_next: As `ode`.
        noise_level: Not negative.
        sigma_max: Ignored.

    Raises:
        ValueError: as `ode`; or noise_level is negative.
    """
    level = _level(noise_level, "dance_sde")
    s, s_next = _levels(sigma, sigma_next)
    step = s - s_next
    return _transition(x, velocity, (s, s_next), s_next - level**2 * step / (2 * s), level * step.sqrt())


def cps(
    x: Latent,
    velocity: Latent,
    sigma: Sigma,
    sigma_next: Sigma,
    noise_level: float = 0.8,
    sigma_max: Sigma = 0.96,
) -> Transition:
    """Coefficients-preserving step (Wang and Yu, Flow-CPS, arXiv 2509.05952): part of the noise is drawn afresh.

    `k^2 + std^2 = sigma_next^2` exactly, so no excess noise is left in the latent. That preserves the marginal of a
    point mass only; with spread data the result is too narrow, however many steps. std is 0 on the step to sigma 0.

    Args:
        x: As `ode`, like the other tensors.
        velocity: As `ode`.
        sigma: As `ode`.
        sigma_next: As `ode`.
        noise_level: In [0, 1]; 1 draws all the noise afresh. Beyond 1 the rule would fold back: 1.2 is 0.8.
        sigma_max: Ignored.

    Raises:
        ValueError: as `ode`; or noise_level is not in [0, 1].
    """
    angle = _level(noise_level, "cps", 1.0) * math.pi / 2
    s, s_next = _levels(sigma, sigma_next)
    size = s_next + torch.zeros_like(s)
    return _transition(x, velocity, (s, s_next), size * math.cos(angle), size * math.sin(angle))


def ddim_flow(
    x: Latent,
    velocity: Latent,
    sigma: Sigma,
    sigma_next: Sigma,
    noise_level: float = 1.0,
    sigma_max: Sigma = 0.96,
) -> Transition:
    """DDIM with eta on the rectified-flow path (Song et al., arXiv 2010.02502, eq. 12 and 16).

    noise_level 1 is ancestral sampling and equals SDE-DPM-Solver++ of order 1. Converges to the right marginal; std
    is 0 on the step to sigma 0.

    Args:
        x: As `ode`, like the other tensors.
        velocity: As `ode`.
        sigma: As `ode`.
        sigma_next: As `ode`.
        noise_level: DDIM's eta, in [0, 1].
        sigma_max: Ignored.

    Raises:
        ValueError: as `ode`; or noise_level is not in [0, 1].
    """
    level = _level(noise_level, "ddim_flow", 1.0)
    s, s_next = _levels(sigma, sigma_next)
    fresh = level * (1 - _survival(s, s_next).square()).sqrt()
    return _transition(x, velocity, (s, s_next), s_next * (1 - fresh.square()).sqrt(), s_next * fresh)


def wan_sde(
    x: Latent,
    velocity: Latent,
    sigma: Sigma,
    sigma_next: Sigma,
    noise_level: float = 1.0,
    sigma_max: Sigma = 0.96,
) -> Transition:
    """Flow-GRPO's step for Wan 2.1: the SDE step with diffusion `g = noise_level sigma_max sigma`.

    The released code has no noise level in this rule and ignores the configured one, which is noise_level 1 here. Any
    diffusion leaves the marginals of the continuous SDE alone, so the factor is as free as in `flow_sde`. Regular at
    sigma = 1; the last step to sigma 0 keeps its noise, so run that one as an ODE step.

    Args:
        x: As `ode`, like the other tensors.
        velocity: As `ode`.
        sigma: As `ode`.
        sigma_next: As `ode`.
        noise_level: Not negative.
        sigma_max: The schedule's second sigma; a factor of g at every step, so a replay must pass the rollout's.

    Raises:
        ValueError: as `ode`; or noise_level is negative, or sigma_max not in [0, 1).
    """
    level = _level(noise_level, "wan_sde")
    s, s_next = _levels(sigma, sigma_next)
    g, step = level * _bound(sigma_max, s.device) * s, s - s_next
    return _transition(x, velocity, (s, s_next), s_next - g.square() * step / (2 * s), g * step.sqrt())


def dpm_sde(
    x: Latent,
    velocity: Latent,
    sigma: Sigma,
    sigma_next: Sigma,
    noise_level: float = 1.0,
    sigma_max: Sigma = 0.96,
) -> Transition:
    """SDE-DPM-Solver++ of order 1 (Lu et al., arXiv 2211.01095), exact for constant predicted data.

    With `h_lambda = log((1 - sigma_next) / sigma_next) - log((1 - sigma) / sigma)`: `k = sigma_next exp(-a^2 h_lambda)`
    and `std = sigma_next sqrt(1 - exp(-2 a^2 h_lambda))`. noise_level a = 1 is the published solver and equals
    `ddim_flow` at 1; a between scales the SDE's diffusion as tau does in SA-Solver (Xue et al., arXiv 2309.05019) and
    differs from DDIM's eta. std is 0 on the step to sigma 0.

    Args:
        x: As `ode`, like the other tensors.
        velocity: As `ode`.
        sigma: As `ode`.
        sigma_next: As `ode`.
        noise_level: In [0, 1].
        sigma_max: Ignored.

    Raises:
        ValueError: as `ode`; or noise_level is not in [0, 1].
    """
    level = _level(noise_level, "dpm_sde", 1.0)
    s, s_next = _levels(sigma, sigma_next)
    kept = _survival(s, s_next) ** level**2
    return _transition(x, velocity, (s, s_next), s_next * kept, s_next * (1 - kept.square()).sqrt())


KERNELS = {
    "ode": ode,
    "flow_sde": flow_sde,
    "dance_sde": dance_sde,
    "cps": cps,
    "ddim_flow": ddim_flow,
    "wan_sde": wan_sde,
    "dpm_sde": dpm_sde,
}
