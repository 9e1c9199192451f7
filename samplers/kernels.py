"""One denoising step of a flow model as a Gaussian transition.

Every sampler is `x_next = (1 - sigma_next) * clean + k * noise + std * xi` with the network's predicted clean data and
noise, `xi ~ N(0, I)`. A sampler is a rule for `(k, std)` and an entry of `KERNELS`; h = sigma - sigma_next is the size
of the step, a the noise level.

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

Arithmetic is in the dtype of x raised to float32; (k, std) are found in float64 on the CPU and rounded once, which
makes a step the same to the bit whether sigma comes as a number of the schedule or as one value per sample. Keep
schedules on the CPU and no step waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.runtime.shapes import Float
from flowrl.samplers.parametrization import Sigma, clean_from_velocity, column, noise_from_velocity
from flowrl.samplers.transition import Transition, cps_log_prob, gaussian_log_prob

# Sigmas this close to 1 count as the start: UniPC grids begin at .9997 instead of 1.
START = 1 - 1e-3

Rule = Callable[[Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor]]
"""`rule(sigma, sigma_next, noise_level, sigma_max) -> (k, std)`, tensors of float64 that broadcast together."""
LogProb = Callable[[Tensor, Transition], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kernel:
    """A sampler: its rule, its properties, and its settings (`dataclasses.replace` binds others).
    Raises ValueError: the noise level is outside 0 .. highest_level, or sigma_max outside [0, 1)."""

    name: str
    """The key of `KERNELS`."""
    rule: Rule
    """See the module."""
    noise_level: float
    """Strength of the noise, not negative; 0 is the ODE. The default of the table is the published value."""
    highest_level: float = math.inf
    """The largest noise level that has a meaning."""
    sigma_max: Sigma = 0.96
    """The schedule's second sigma, which some rules need. Bind it for rollout and replay alike: a replayed step must
    see the value of its rollout."""
    stochastic: bool = True
    """Whether there is noise at all, and so a density."""
    silent_last_step: bool = False
    """Whether std is 0 on the step to sigma 0, which then has no density."""
    full_std: bool = False
    """Whether released code's KL uses the full std, not the diffusion coefficient g alone (see `published_kl`)."""
    log_prob: LogProb = gaussian_log_prob
    """Log-density of a produced latent `[b, *latent]` under the transition, `[b]`, summed over dimensions."""
    published_log_prob: LogProb | None = None
    """The released code's substitute for the log-density, if it uses one."""

    def __post_init__(self) -> None:
        if not 0 <= self.noise_level <= self.highest_level or math.isinf(self.noise_level):
            allowed = f"in [0, {self.highest_level:g}]" if math.isfinite(self.highest_level) else "finite, at least 0"
            raise ValueError(f"noise_level of {self.name} must be {allowed}, got {self.noise_level:g}; 0 is the ODE")
        bound = _number(self.sigma_max)
        if not bool(((bound >= 0) & (bound < 1)).all()):
            raise ValueError(f"sigma_max must lie in [0, 1), got {self.sigma_max}: pass the schedule's second sigma")

    def __call__(
        self,
        x: Float[Tensor, " b *latent"],
        velocity: Float[Tensor, " b *latent"],
        sigma: Sigma,
        sigma_next: Sigma,
        noise_level: float | None = None,
        sigma_max: Sigma | None = None,
    ) -> Transition:
        """The transition of one step, `mean = (1 - sigma_next) * clean + k * noise`.

        This form has no cancelling coefficients near sigma = 1, unlike the expanded one of the Flow-GRPO paper.

        Args:
            x: [b, *latent] at sigma, any float dtype.
            velocity: [b, *latent], the (guided) network output at x.
            sigma: Noise fraction of x: a number, a 0-d tensor or [b].
            sigma_next: Noise fraction after the step, likewise; smaller.
            noise_level: None takes the kernel's own.

        Raises ValueError: shapes do not fit, not 0 <= sigma_next < sigma <= 1, or noise_level or sigma_max is refused.
        """
        given = {"noise_level": noise_level, "sigma_max": sigma_max}
        if changed := {key: value for key, value in given.items() if value is not None}:
            return replace(self, **changed)(x, velocity, sigma, sigma_next)  # type: ignore[arg-type]
        step = self._coefficients(sigma, sigma_next)
        clean, noise = clean_from_velocity(x, velocity, step.sigma), noise_from_velocity(x, velocity, step.sigma)
        mean = column(step.kept, clean, "sigma_next") * clean + column(step.k, clean) * noise
        return Transition(mean, column(step.std, clean), least_std=step.least_std)

    def _coefficients(self, sigma: Sigma, sigma_next: Sigma) -> _Coefficients:
        """Computed once for each step of the schedule; all parts of a rollout and all micro-batches use it again."""
        given = (sigma, sigma_next, self.sigma_max)
        if all(isinstance(value, float) or (isinstance(value, Tensor) and value.ndim == 0) for value in given):
            return _of_step(self.rule, self.noise_level, *map(float, given))
        return _coefficients(self.rule, self.noise_level, *map(_number, given))


class _Coefficients(NamedTuple):
    """The coefficients of a step, float64 on the CPU; `kept` is 1 - sigma_next."""

    sigma: Tensor
    kept: Tensor
    k: Tensor
    std: Tensor
    least_std: float


def _coefficients(rule: Rule, noise_level: float, sigma: Tensor, sigma_next: Tensor, bound: Tensor) -> _Coefficients:
    s, s_next = torch.broadcast_tensors(sigma, sigma_next)
    if not bool(((s_next >= 0) & (s_next < s) & (s <= 1)).all()):
        raise ValueError(
            f"a step needs 0 <= sigma_next < sigma <= 1, got sigma {s.tolist()} and sigma_next {s_next.tolist()}: "
            "sigma is the noise fraction and decreases during sampling"
        )
    k, std = rule(s, s_next, noise_level, bound)
    return _Coefficients(s, 1 - s_next, k, std, float(std.min()))


@lru_cache(maxsize=4096)
def _of_step(rule: Rule, noise_level: float, *numbers: float) -> _Coefficients:
    return _coefficients(rule, noise_level, *map(_number, numbers))


def _number(value: Sigma) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).cpu()


def _ode(s: Tensor, s_next: Tensor, a: float, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Euler step of the probability-flow ODE, `mean = x - h * velocity`; ignores the noise level."""
    return s_next, torch.zeros_like(s)


def _flow_sde(s: Tensor, s_next: Tensor, a: float, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Flow-GRPO's SDE step (Liu et al., arXiv 2505.05470), g = a sqrt(sigma / (1 - sigma)), with the ODE's marginals;
    level sqrt(2) is memoryless. As g is infinite at sigma = 1, `1 - sigma` is taken at sigma_max from 0.999 on: a first
    step from 1 to sigma_max then has std = a."""
    held = torch.where(s >= START, torch.minimum(s, bound), s)
    rate = a**2 * s / (1 - held)
    return s_next - rate * (s - s_next) / (2 * s), (rate * (s - s_next)).sqrt()


def _dance_sde(s: Tensor, s_next: Tensor, a: float, bound: Tensor) -> tuple[Tensor, Tensor]:
    """DanceGRPO's SDE step (Xue et al., arXiv 2505.07818): constant diffusion, std = a sqrt(h), regular at sigma = 1.
    The last step to sigma 0 keeps its noise (k = -a^2 / 2), so run that one as an ODE step."""
    return s_next - a**2 * (s - s_next) / (2 * s), a * (s - s_next).sqrt()


def _cps(s: Tensor, s_next: Tensor, a: float, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients-preserving step (Wang and Yu, Flow-CPS, arXiv 2509.05952): part of the noise is drawn again.

    `k^2 + std^2 = sigma_next^2` exactly, so no excess noise is left in the latent. That preserves the marginal of a
    point mass only; with spread data the result is too narrow, however many steps. Level 1 draws all the noise again;
    beyond 1 the rule would fold back: 1.2 is 0.8.
    """
    angle = a * math.pi / 2
    return s_next * math.cos(angle), s_next * math.sin(angle)


def _ddim_flow(s: Tensor, s_next: Tensor, a: float, bound: Tensor) -> tuple[Tensor, Tensor]:
    """DDIM with eta = a on the rectified-flow path (Song et al., arXiv 2010.02502, eq. 12, 16); right marginal in the
    limit. Level 1 is ancestral sampling and equals SDE-DPM-Solver++ of order 1."""
    fresh = a * (1 - _survival(s, s_next).square()).sqrt()
    return s_next * (1 - fresh.square()).sqrt(), s_next * fresh


def _wan_sde(s: Tensor, s_next: Tensor, a: float, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Flow-GRPO's step for Wan 2.1: the SDE step with diffusion `g = a sigma_max sigma`.

    The released code has no noise level in this rule and ignores the configured one, which is level 1 here. Any
    diffusion leaves the marginals of the continuous SDE alone, so the factor is as free as in `flow_sde`. Regular at
    sigma = 1; the last step to sigma 0 keeps its noise, so run that one as an ODE step.
    """
    g = a * bound * s
    return s_next - g.square() * (s - s_next) / (2 * s), g * (s - s_next).sqrt()


def _dpm_sde(s: Tensor, s_next: Tensor, a: float, bound: Tensor) -> tuple[Tensor, Tensor]:
    """SDE-DPM-Solver++ of order 1 (Lu et al., arXiv 2211.01095), exact for constant predicted data.

    The step in `lambda = log((1 - sigma) / sigma)` is `h_lambda = -log q`. Level 1 is the published solver and equals
    `ddim_flow` at 1; a level between scales the SDE's diffusion as tau does in SA-Solver (Xue et al., arXiv 2309.05019)
    and differs from DDIM's eta.
    """
    kept = _survival(s, s_next) ** a**2
    return s_next * kept, s_next * (1 - kept.square()).sqrt()


def _survival(s: Tensor, s_next: Tensor) -> Tensor:
    """q = exp(-h_lambda), the share of the noise-to-signal ratio that survives a step; 0 at both ends of the path."""
    return s_next * (1 - s) / (s * (1 - s_next))


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(name="ode", rule=_ode, noise_level=0.0, stochastic=False),
        Kernel(name="flow_sde", rule=_flow_sde, noise_level=0.7),
        Kernel(name="dance_sde", rule=_dance_sde, noise_level=0.3),
        Kernel(
            name="cps", rule=_cps, noise_level=0.8, highest_level=1.0, silent_last_step=True, full_std=True,
            published_log_prob=cps_log_prob,
        ),
        Kernel(name="ddim_flow", rule=_ddim_flow, noise_level=1.0, highest_level=1.0, silent_last_step=True),
        Kernel(name="wan_sde", rule=_wan_sde, noise_level=1.0),
        Kernel(name="dpm_sde", rule=_dpm_sde, noise_level=1.0, highest_level=1.0, silent_last_step=True),
    )
}  # fmt: skip
"""Every sampler by name."""
