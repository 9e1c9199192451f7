"""Diffusion models in flow coordinates: every kernel, solver and recipe for flow models then applies to them.

A variance-preserving model has `x_vp = sqrt(A) clean + sqrt(1 - A) noise` at a timestep with alpha_bar A. Divided by
c = sqrt(A) + sqrt(1 - A) this is a latent of the rectified-flow path:

    sigma = sqrt(1 - A) / c,        x = x_vp / c = (1 - sigma) clean + sigma noise,        c = 1 / |(1 - sigma, sigma)|

and a prediction of noise, clean data or v is a velocity `noise - clean` (Kingma and Gao, arXiv 2303.00848, have all
these as one). The Euler step in sigma is then DDIM's with eta 0, and `ddim_flow` at a noise level is DDIM's with that
eta (Song et al., arXiv 2010.02502): the same Gaussian divided by c. Densities shift by a constant, ratios and
divergences not at all.

Levels are kept as one table: entry k is sigma at timestep k - 1, from 0 at timestep -1 (data, before the first noise is
added) up to the last. Between integers sigma is linear in the timestep: the logarithm of the signal-to-noise ratio is
infinite at the lower end, and at the upper end if the last level is pure noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from flowrl.runtime.shapes import Float
from flowrl.samplers.parametrization import Sigma, column, raise_pair
from flowrl.trajectory import Schedule

PredictionType = Literal["epsilon", "v_prediction", "sample"]
"""What a diffusers network predicts: the noise, `sqrt(A) noise - sqrt(1 - A) clean`, or the clean data."""

Spacing = Literal["leading", "trailing", "linspace"]

# Settings of diffusers schedulers that move noise levels or change predictions in ways not built here.
_UNSUPPORTED = (
    "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas", "use_flow_sigmas",
    "thresholding", "clip_sample",
)  # fmt: skip

_ROUNDING = 1e-6  # a float32 sigma may stand this much above the table's last level


def flow_sigma(alpha_bar: Float[Tensor, " *n"]) -> Float[Tensor, " *n"]:
    """Share of noise on the flow path, `sqrt(1 - A) / (sqrt(A) + sqrt(1 - A))`."""
    noise = (1 - alpha_bar).sqrt()
    return noise / (alpha_bar.sqrt() + noise)


def vp_scale(sigma: Float[Tensor, " *n"]) -> Float[Tensor, " *n"]:
    """c of `x_vp = c x`: `1 / sqrt((1 - sigma)^2 + sigma^2)`, 1 at both ends and sqrt(2) at sigma 1/2."""
    return ((1 - sigma).square() + sigma.square()).rsqrt()


def alpha_bars(config: Mapping[str, Any]) -> Float[Tensor, " n"]:
    """alpha_bar of every training timestep of a diffusers scheduler, in float64.

    Args:
        config: the scheduler's. Read are beta_schedule (scaled_linear, linear, squaredcos_cap_v2), beta_start,
            beta_end, num_train_timesteps, trained_betas and rescale_betas_zero_snr (Lin et al., arXiv 2305.08891,
            algorithm 1).

    Raises ValueError: this is no noise schedule of a diffusion model, or one that is not built here.
    """
    kind, given = config.get("beta_schedule"), config.get("trained_betas")
    n = int(config.get("num_train_timesteps", 1000))
    start, end = float(config.get("beta_start", 0.0001)), float(config.get("beta_end", 0.02))
    if given is not None:
        beta = torch.as_tensor(given, dtype=torch.float64)
    elif kind == "scaled_linear":
        beta = torch.linspace(start**0.5, end**0.5, n, dtype=torch.float64).square()
    elif kind == "linear":
        beta = torch.linspace(start, end, n, dtype=torch.float64)
    elif kind == "squaredcos_cap_v2":
        # Nichol and Dhariwal, arXiv 2102.09672, eq. 17.
        level = ((torch.arange(n + 1, dtype=torch.float64) / n + 0.008) / 1.008 * torch.pi / 2).cos().square()
        beta = (1 - level[1:] / level[:-1]).clamp(max=0.999)
    else:
        raise ValueError(
            f"scheduler config: beta_schedule is {kind!r}, and noise levels of a diffusion model follow from "
            "scaled_linear, linear or squaredcos_cap_v2: is this model of another family?"
        )
    a = (1 - beta).cumprod(0)
    if config.get("rescale_betas_zero_snr"):
        root = a.sqrt()
        a = ((root - root[-1]) * root[0] / (root[0] - root[-1])).square()
    return a


def flow_levels(config: Mapping[str, Any]) -> Float[Tensor, " n1"]:
    """The table of a scheduler: sigma at timesteps -1 .. n - 1, rising from 0, in float64. Raises ValueError: as
    `alpha_bars`; the scheduler clips, thresholds or has noise levels of its own; or the last level is noise alone and
    the network predicts the noise, which says nothing of the data there."""
    refused = [key for key in _UNSUPPORTED if config.get(key)]
    if refused:
        raise ValueError(
            f"scheduler config: {', '.join(refused)} is not supported, a step would be no Gaussian around the "
            "network's prediction, or lie at other noise levels: set it to false in scheduler/scheduler_config.json"
        )
    sigma = flow_sigma(alpha_bars(config))
    if prediction_of(config) == "epsilon" and float(sigma[-1]) == 1:
        raise ValueError(
            "scheduler config: rescale_betas_zero_snr makes the last level noise alone, where a prediction of the "
            "noise (prediction_type epsilon) says nothing of the data: such models predict v_prediction or sample"
        )
    return torch.cat([sigma.new_zeros(1), sigma])


def prediction_of(config: Mapping[str, Any]) -> PredictionType:
    """What the network of a scheduler predicts. Raises ValueError: something else than noise, v or clean data."""
    found = config.get("prediction_type", "epsilon")
    if found not in get_args(PredictionType):
        raise ValueError(
            f"scheduler config: prediction_type {found!r} is not one of {', '.join(get_args(PredictionType))}: is this "
            "model of another family?"
        )
    return cast(PredictionType, found)


def sigma_at(timestep: Tensor, levels: Float[Tensor, " n1"]) -> Tensor:
    """Sigma at timesteps, in float64 on the table's device, linear between integers and exact at them. Outside -1 .. n
    - 1 it takes the nearer end: a check would wait for the device."""
    place = (timestep.to(levels.device, torch.float64) + 1).clamp(0, len(levels) - 1)
    below = place.floor().clamp(max=len(levels) - 2).long()
    return levels[below].lerp(levels[below + 1], place - below)


def timestep_at(sigma: Tensor, levels: Float[Tensor, " n1"]) -> Tensor:
    """The timestep whose level is sigma, in the dtype of sigma: the inverse of `sigma_at`. Raises ValueError: sigma is
    not among the levels that the network knows."""
    wanted, table = sigma.detach().cpu().double(), levels.cpu()
    highest = float(table[-1])
    if not bool(((wanted >= 0) & (wanted <= highest + _ROUNDING)).all()):
        raise ValueError(
            f"this model knows noise levels of 0 to {highest:.6f}, got sigma from {float(wanted.min()):.6f} to "
            f"{float(wanted.max()):.6f}: there is no timestep above; limit sigma to the highest level"
        )
    below = (torch.searchsorted(table, wanted.clamp(max=highest), right=True) - 1).clamp(max=len(table) - 2)
    timestep = below + (wanted - table[below]) / (table[below + 1] - table[below]) - 1
    return timestep.clamp(max=len(table) - 2).to(sigma)


def velocity_from_prediction(
    x: Float[Tensor, " b *latent"], output: Float[Tensor, " b *latent"], sigma: Sigma, prediction: PredictionType
) -> Float[Tensor, " b *latent"]:
    """Velocity `noise - clean` of a network's output.

        epsilon        (output - x) / (1 - sigma)
        v_prediction   c output + c^2 (2 sigma - 1) x
        sample         (x - output) / sigma

    Arithmetic is in the dtype of x raised to float32; coefficients are found in float64 and rounded once.

    Args:
        x: latent in flow coordinates; the network saw c x.
        sigma: a number, a 0-d tensor or [b]; below 1 for epsilon, above 0 for sample.
    """
    x, output = raise_pair(x, output, "output")
    s = torch.as_tensor(sigma, dtype=torch.float64)
    if prediction == "epsilon":
        return column(1 / (1 - s), x) * (output - x)
    if prediction == "sample":
        return column(1 / s, x) * (x - output)
    if prediction == "v_prediction":
        c = vp_scale(s)
        return column(c, x) * output + column(c.square() * (2 * s - 1), x) * x
    raise ValueError(f"unknown prediction {prediction!r}: choose one of {', '.join(get_args(PredictionType))}")


def diffusion_timesteps(num_steps: int, num_train: int, spacing: Spacing, offset: int = 0) -> list[int]:
    """Integer timesteps of T denoising steps, falling, as diffusers' DDIM spaces them (arXiv 2305.08891, table 2).

        leading    offset + (n // T) (T - 1, ..., 1, 0)
        trailing   n, n - n / T, ..., n / T, rounded, less 1
        linspace   T points from n - 1 to 0, rounded

    Raises ValueError: unknown spacing, or T steps do not fit.
    """
    if not 1 <= num_steps <= num_train:
        raise ValueError(f"num_steps must lie in 1 .. {num_train}, the training timesteps, got {num_steps}")
    if spacing == "leading":
        steps = torch.arange(num_steps).flip(0) * (num_train // num_steps) + offset
    elif spacing == "trailing":
        steps = torch.arange(num_steps, 0, -1, dtype=torch.float64).mul(num_train / num_steps).round().long() - 1
    elif spacing == "linspace":
        steps = torch.linspace(0, num_train - 1, num_steps, dtype=torch.float64).round().long().flip(0)
    else:
        raise ValueError(f"unknown timestep_spacing {spacing!r}: choose one of {', '.join(get_args(Spacing))}")
    if int(steps[0]) >= num_train or int(steps[-1]) < 0:
        raise ValueError(
            f"timesteps {int(steps[-1])} .. {int(steps[0])} leave 0 .. {num_train - 1}: steps_offset {offset} does not "
            f"fit {num_steps} steps, take fewer"
        )
    return [int(step) for step in steps]


def diffusion_schedule(
    config: Mapping[str, Any], num_steps: int, *, grid: str = "diffusers", timesteps: Sequence[float] | None = None
) -> Schedule:
    """The noise levels that a diffusers scheduler visits, in flow coordinates.

    The last step ends at clean data (sigma 0), as with set_alpha_to_one. Stable Diffusion 1's published schedulers end
    at the level of timestep 0 instead (set_alpha_to_one false), where a latent is still 2.8 % noise and that much short
    of data; what trains on finished latents takes them for data. Start noise is N(0, 1) before the division by c, as
    stock pipelines draw it, which is a little more than noise at the first level is: `start_scale` is 1 / c.

    Args:
        config: the scheduler's, see `alpha_bars`; also timestep_spacing and steps_offset.
        grid: "diffusers" (the scheduler's own spacing), or "linspace" (evenly over all timesteps).
        timesteps: T falling ones, in place of those of the grid.
    """
    if grid not in ("diffusers", "linspace"):
        raise ValueError(f"unknown grid {grid!r} of a diffusion model: choose diffusers or linspace")
    levels = flow_levels(config)
    spacing: Spacing = "linspace" if grid == "linspace" else config.get("timestep_spacing", "leading")
    offset = int(config.get("steps_offset", 0))
    if timesteps is None:
        timesteps = diffusion_timesteps(num_steps, len(levels) - 1, spacing, offset)
    timestep = torch.tensor(timesteps)
    sigma = sigma_at(timestep, levels)
    return Schedule(
        sigma=torch.cat([sigma, sigma.new_zeros(1)]).float(),
        timestep=timestep.float(),
        start_scale=1 / float(vp_scale(sigma[0])),
        highest_sigma=float(levels[-1]),
        timestep_of=partial(timestep_at, levels=levels),
    )
