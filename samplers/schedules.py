"""Sigma grids of flow models, as diffusers builds them, without diffusers.

Two different grids are in circulation under the same settings "10 steps, shift 3": diffusers' default, which shifts an
already shifted end point and so ends with a very small step, and the grid shifted once that most training code passes
in explicitly. Per-step noise and results are not comparable between them, so a grid is always chosen by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flowrl.runtime.shapes import Float
from flowrl.trajectory import Schedule

GRIDS = ("diffusers", "linspace", "unipc_flow")

# Settings of diffusers schedulers that change the grid in ways not built here.
_UNSUPPORTED = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "stochastic_sampling",
)


def shift_sigma(u: Float[Tensor, " n"], shift: float) -> Float[Tensor, " n"]:
    """Static shift `shift u / (1 + (shift - 1) u)` (Esser et al., arXiv 2403.03206, eq. 23); 1 is the identity."""
    if not shift > 0:
        raise ValueError(f"shift must be positive, got {shift}: 1 leaves the grid unshifted, 3 is SD3's")
    return shift * u / (1 + (shift - 1) * u)


def dynamic_mu(
    num_tokens: int, *, base_shift: float = 0.5, max_shift: float = 1.15, base_tokens: int = 256, max_tokens: int = 4096
) -> float:
    """Logarithm of the shift for an image of `(height / 16) * (width / 16)` latent tokens (FLUX, Qwen-Image), linear
    from base_shift at base_tokens to max_shift at max_tokens. Defaults are FLUX's; Qwen-Image has 0.9 at 8192."""
    return base_shift + (max_shift - base_shift) * (num_tokens - base_tokens) / (max_tokens - base_tokens)


def diffusers_sigmas(num_steps: int, shift: float = 1.0, num_train_timesteps: int = 1000) -> Float[Tensor, " T1"]:
    """Grid of diffusers' FlowMatchEulerDiscreteScheduler without explicit sigmas (SD3's), shifted twice: `S(linspace(1,
    S(1/n), T)), 0`. The last sigma before 0 is S(S(1/n)), .0089 for shift 3, whatever T."""
    # The scheduler keeps its table in float32, so the end point is rounded before it is used.
    end = float(shift_sigma(torch.tensor([1 / num_train_timesteps], dtype=torch.float32), shift))
    return _finish(shift_sigma(_points(1.0, end, num_steps), shift))


def linspace_sigmas(num_steps: int, shift: float = 1.0) -> Float[Tensor, " T1"]:
    """Evenly spaced grid shifted once, `S(linspace(1, 0, T + 1))` (DanceGRPO, MixGRPO, Flow-Factory)."""
    return _finish(shift_sigma(_points(1.0, 1 / num_steps if num_steps > 0 else 0.0, num_steps), shift))


def dynamic_sigmas(
    num_steps: int, mu: float, *, end: float | None = None, terminal: float | None = None
) -> Float[Tensor, " T1"]:
    """Grid with the resolution-dependent shift exp(mu) (FLUX, Qwen-Image).

    Args:
        mu: Logarithm of the shift, see `dynamic_mu`.
        end: Last unshifted value before 0; 1/T if None.
        terminal: If given, stretch the grid so that its last value before 0 is this (Qwen-Image: .02).

    Raises ValueError: T < 1, or a terminal with T = 1, which leaves nothing to stretch.
    """
    if not math.isfinite(mu):
        raise ValueError(f"mu must be finite, got {mu}")
    sigma = shift_sigma(_points(1.0, 1 / max(num_steps, 1) if end is None else end, num_steps), math.exp(mu))
    return _finish(sigma, terminal)


def unipc_flow_sigmas(num_steps: int, shift: float, num_train_timesteps: int = 1000) -> Float[Tensor, " T1"]:
    """Grid of diffusers' UniPC scheduler with flow sigmas (Wan): starts just below 1, .99967 for shift 3."""
    clean = _points(1.0, 1 / num_train_timesteps, num_steps + 1)
    return _finish(shift_sigma(1 - clean, shift).flip(0)[:-1])


def _points(start: float, end: float, count: int) -> Tensor:
    if count < 1:
        raise ValueError(f"a schedule needs at least one step, got num_steps {count}")
    return torch.linspace(start, end, count, dtype=torch.float64)


def _finish(sigma: Tensor, terminal: float | None = None) -> Tensor:
    """Stretch to the terminal value if one is asked for, append 0 and round to float32."""
    if terminal:
        if len(sigma) < 2:
            raise ValueError("one step cannot be stretched to shift_terminal: take at least two, or no terminal")
        sigma = 1 - (1 - sigma) * (1 - terminal) / (1 - sigma[-1])
    return torch.cat([sigma, sigma.new_zeros(1)]).float()


def _number(config: Mapping[str, object], key: str, default: float) -> float:
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"scheduler config: {key} must be a number, got {value!r}")
    return float(value)


def _check_followed(config: Mapping[str, object], grid: str, mu: float | None) -> None:
    """Refuses what `build_schedule` does not follow."""
    if grid not in GRIDS:
        raise ValueError(f"unknown sigma grid {grid!r}: choose one of {', '.join(GRIDS)}")
    refused = [key for key in _UNSUPPORTED if config.get(key)]
    if refused or config.get("time_shift_type", "exponential") != "exponential":
        raise ValueError(
            f"scheduler config: {', '.join(refused) or 'time_shift_type other than exponential'} is not supported"
        )
    dynamic = bool(config.get("use_dynamic_shifting", False))
    if dynamic and mu is None:
        raise ValueError("this scheduler shifts by resolution (use_dynamic_shifting): pass mu=dynamic_mu(num_tokens)")
    if mu is not None and (not dynamic or grid == "unipc_flow"):
        raise ValueError(f"mu={mu} has no effect here: it needs use_dynamic_shifting and grid diffusers or linspace")


def build_schedule(
    config: Mapping[str, object], num_steps: int, *, grid: str = "diffusers", mu: float | None = None
) -> Schedule:
    """Build the schedule of a model from its scheduler's plain config.

    Args:
        config: diffusers scheduler config. Read are shift, num_train_timesteps, use_dynamic_shifting, time_shift_type,
            shift_terminal, and flow_shift for UniPC; keys that do not concern the grid are ignored.
        grid: "diffusers" (end point as the scheduler chooses it), "linspace" (explicit sigmas linspace(1, 1/T, T), what
            FLUX, Qwen-Image and most training code use), or "unipc_flow" (Wan).
        mu: Logarithm of the shift; needed with use_dynamic_shifting and refused without.

    Returns a schedule whose timesteps are num_train_timesteps * sigma, truncated to integers for "unipc_flow". Raises
    ValueError: unknown grid; dynamic shifting without mu, or mu without it; a setting that is not supported.
    """
    _check_followed(config, grid, mu)
    num_train = int(_number(config, "num_train_timesteps", 1000))
    terminal = _number(config, "shift_terminal", 0.0) or None
    if grid == "unipc_flow":
        sigma = unipc_flow_sigmas(num_steps, _number(config, "flow_shift", 1.0), num_train)
        return Schedule(sigma=sigma, timestep=(sigma[:-1] * num_train).trunc())
    if mu is not None:
        # With dynamic shifting the scheduler's table is unshifted, so its own end point is 1/n, rounded to float32.
        end = float(torch.tensor(1 / num_train, dtype=torch.float32)) if grid == "diffusers" else None
        sigma = dynamic_sigmas(num_steps, mu, end=end, terminal=terminal)
    else:
        shift = _number(config, "shift", 1.0)
        twice = grid == "diffusers"
        sigma = diffusers_sigmas(num_steps, shift, num_train) if twice else linspace_sigmas(num_steps, shift)
        sigma = _finish(sigma[:-1].double(), terminal)
    return Schedule(sigma=sigma, timestep=sigma[:-1] * num_train)
