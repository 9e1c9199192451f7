"""DDIM steps of variance-preserving diffusion models: noise, v- and clean-data predictions, and SD 1.x's schedule.

On this path `x = sqrt(alpha_bar) clean + sqrt(1 - alpha_bar) noise`; alpha_bar rises from near 0 to near 1 during
sampling. A step is the same Gaussian `Transition` as that of a flow model, so densities, divergences and objectives
apply unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.samplers.parametrization import Sigma, column, raise_pair
from flowrl.samplers.transition import Transition

Prediction = Literal["epsilon", "v", "clean"]
PREDICTIONS: tuple[Prediction, ...] = ("epsilon", "v", "clean")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DiffusionSchedule:
    """Noise levels of a denoising run of a diffusion model and what the network is fed at each.

    Attributes:
        alpha_bar: [T+1] float64, rising within [0, 1]: entry j is the level of state j.
        timestep: [T] float32, network input of each step.

    Raises:
        ValueError: shapes do not fit, or alpha_bar decreases or leaves [0, 1].
    """

    alpha_bar: Float[Tensor, " T1"]
    timestep: Float[Tensor, " T"]

    def __post_init__(self) -> None:
        if self.alpha_bar.ndim != 1 or len(self.alpha_bar) < 2 or self.timestep.shape != (len(self.alpha_bar) - 1,):
            raise ValueError(
                f"a schedule of T >= 1 steps has alpha_bar [T+1] and timestep [T], got {tuple(self.alpha_bar.shape)} "
                f"and {tuple(self.timestep.shape)}"
            )
        a = self.alpha_bar
        if not bool((a[1:] >= a[:-1]).all()) or float(a[0]) < 0 or float(a[-1]) > 1:
            raise ValueError(f"alpha_bar must rise within [0, 1], the share of data grows, got {a.tolist()}")

    @property
    def num_steps(self) -> int:
        """T, the number of network evaluations of one sample."""
        return len(self.timestep)


def scaled_linear_alpha_bar(
    num_train_timesteps: int = 1000, beta_start: float = 0.00085, beta_end: float = 0.012
) -> Float[Tensor, " n"]:
    """Products `prod_{j <= t} (1 - beta_j)` with the square roots of beta evenly spaced; defaults are SD 1.x's.

    Returns:
        [n] float64, entry t belongs to the training timestep t.

    Raises:
        ValueError: no timestep, or not 0 < beta_start <= beta_end < 1.
    """
    if num_train_timesteps < 1 or not 0 < beta_start <= beta_end < 1:
        raise ValueError(
            f"need num_train_timesteps >= 1 and 0 < beta_start <= beta_end < 1, got {num_train_timesteps}, "
            f"{beta_start} and {beta_end}"
        )
    beta = torch.linspace(beta_start**0.5, beta_end**0.5, num_train_timesteps, dtype=torch.float64).square()
    return (1 - beta).cumprod(0)


def leading_schedule(
    num_steps: int, *, alpha_bar: Float[Tensor, " n"] | None = None, steps_offset: int = 1
) -> DiffusionSchedule:
    """DDIM's schedule with leading spacing: `t = steps_offset + (n // T) * (T-1, ..., 1, 0)`, as SD 1.x samples.

    The step from t leads to `max(t - n // T, 0)`, so the last state is at the level of timestep 0, not at clean data.
    With steps_offset 0 the last step would start there too: its std is 0 and it cannot be scored.

    Args:
        num_steps: T, 1 .. n.
        alpha_bar: [n] level of each training timestep; None takes `scaled_linear_alpha_bar()`.
        steps_offset: Added to every timestep; SD 1.x uses 1.

    Raises:
        ValueError: T is out of range, or a timestep leaves 0 .. n-1.
    """
    table = scaled_linear_alpha_bar() if alpha_bar is None else alpha_bar.double()
    if not 1 <= num_steps <= len(table):
        raise ValueError(f"num_steps must lie in 1 .. {len(table)}, the training timesteps, got {num_steps}")
    stride = len(table) // num_steps
    timestep = torch.arange(num_steps - 1, -1, -1) * stride + steps_offset
    if steps_offset < 0 or int(timestep[0]) >= len(table):
        raise ValueError(
            f"steps_offset {steps_offset} puts the timesteps {int(timestep[-1])} .. {int(timestep[0])} outside "
            f"0 .. {len(table) - 1}: take a smaller offset that is not negative"
        )
    end = (timestep[-1:] - stride).clamp(min=0)
    return DiffusionSchedule(alpha_bar=table[torch.cat([timestep, end])], timestep=timestep.float())


def ddim(
    x: Float[Tensor, " b *latent"],
    output: Float[Tensor, " b *latent"],
    alpha_bar: Sigma,
    alpha_bar_next: Sigma,
    eta: float = 1.0,
    prediction: Prediction = "epsilon",
) -> Transition:
    """One DDIM step (Song et al., arXiv 2010.02502, eq. 12 and 16); what DDPO (arXiv 2305.13301) trains.

    With A and A' for alpha_bar and alpha_bar_next:

        std  = eta sqrt((1 - A') / (1 - A) * (1 - A / A'))
        mean = sqrt(A') clean + sqrt(1 - A' - std^2) noise

    eta 1 is ancestral sampling, eta 0 deterministic. A step with A' = A or A' = 1 has std 0 and no density. Arithmetic
    is in the dtype of x raised to float32; coefficients are found in float64 and rounded once.

    Args:
        x: [b, *latent] at alpha_bar, any float dtype.
        output: [b, *latent], the (guided) network output at x.
        alpha_bar: Level of x: a number, a 0-d tensor or [b].
        alpha_bar_next: Level after the step, likewise; not smaller.
        eta: In [0, 1].
        prediction: What the network predicts: "epsilon" the noise, "v" the velocity `sqrt(A) noise - sqrt(1 - A)
            clean` (Salimans and Ho, arXiv 2202.00512), or "clean" the data. Levels of exactly 0 need "v" or "clean".

    Raises:
        ValueError: shapes do not fit; not 0 <= alpha_bar <= alpha_bar_next <= 1 with alpha_bar < 1; alpha_bar 0 with a
            noise prediction; eta or prediction is not among the allowed.
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta must lie in [0, 1], got {eta}: 0 is deterministic, 1 ancestral sampling")
    if prediction not in PREDICTIONS:
        raise ValueError(f"unknown prediction {prediction!r}: choose one of {', '.join(PREDICTIONS)}")
    a, a_next = _alpha_bars(alpha_bar, alpha_bar_next, prediction)
    x, output = raise_pair(x, output, "output")
    signal, noise_scale = column(a.sqrt(), x, "alpha_bar"), column((1 - a).sqrt(), x, "alpha_bar")
    if prediction == "epsilon":
        clean, noise = (x - noise_scale * output) / signal, output
    elif prediction == "v":
        clean, noise = signal * x - noise_scale * output, signal * output + noise_scale * x
    else:
        clean, noise = output, (x - signal * output) / noise_scale
    variance = eta**2 * (1 - a_next) / (1 - a) * (1 - a / a_next)
    # Rounding may leave a tiny negative number where nothing of the old noise is kept.
    kept = (1 - a_next - variance).clamp(min=0).sqrt()
    mean = column(a_next.sqrt(), x, "alpha_bar_next") * clean + column(kept, x) * noise
    return Transition(mean, column(variance.sqrt(), x))


def _alpha_bars(alpha_bar: Sigma, alpha_bar_next: Sigma, prediction: str) -> tuple[Tensor, Tensor]:
    """Both levels in float64 on one device, checked."""
    a, a_next = (torch.as_tensor(level, dtype=torch.float64) for level in (alpha_bar, alpha_bar_next))
    if a.device != a_next.device:
        a, a_next = a.cpu(), a_next.cpu()
    if not bool(((a >= 0) & (a <= a_next) & (a < 1) & (a_next > 0) & (a_next <= 1)).all()):
        raise ValueError(
            "a step needs 0 <= alpha_bar <= alpha_bar_next <= 1 with alpha_bar < 1 and alpha_bar_next > 0, got "
            f"{a.tolist()} and {a_next.tolist()}: alpha_bar is the share of data and grows during sampling"
        )
    if prediction == "epsilon" and not bool((a > 0).all()):
        raise ValueError(
            'at alpha_bar 0 the latent is noise alone and a noise prediction says nothing of the data: use a "v" or '
            '"clean" model, or start above 0'
        )
    return a, a_next
