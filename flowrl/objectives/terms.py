"""Pieces of losses, unreduced: the recipe decides what is averaged over what.

Shapes must match exactly. A [1] against a [b] would broadcast to a loss that looks right and is not, so it is an error.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from flowrl.runtime.placement import sent, widened, widest
from flowrl.runtime.shapes import Bool, Float

AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]
Weighting = Literal["uniform", "t", "t2", "huber", "ghuber"]


def _check_same(values: dict[str, Tensor | float]) -> None:
    """Raise unless all tensors have one shape; plain numbers pass."""
    shapes = {name: tuple(value.shape) for name, value in values.items() if isinstance(value, Tensor)}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes must match exactly, without broadcasting, got {shapes}")


def _check_clip(log_ratio: Tensor, advantage: Tensor, clip_low: Tensor | float, clip_high: Tensor | float) -> None:
    _check_same({"log_ratio": log_ratio, "advantage": advantage, "clip_low": clip_low, "clip_high": clip_high})
    for name, bound in (("clip_low", clip_low), ("clip_high", clip_high)):
        if isinstance(bound, int | float) and not bound >= 0:
            raise ValueError(f"{name} is a distance from 1 and must not be negative, got {bound}: 0.2 means 1 -+ 0.2")


def truncated_weight(log_ratio: Float[Tensor, " b"], cap: float) -> Float[Tensor, " b"]:
    """Truncated importance weight `min(cap, exp(log_ratio))` of samples that another policy has drawn.

    `log_ratio` is log pi - log mu, of the policy pi that they are used for and of mu that drew them. `E_mu[w f] =
    E_pi[f]` holds where nothing is cut; the cap bounds the variance, and biases towards mu. IMPALA (arXiv 1802.01561,
    section 4.1), whose experiments take 1.
    """
    return log_ratio.clamp(max=math.log(cap)).exp()


def clipped_surrogate(
    log_ratio: Float[Tensor, " b"],
    advantage: Float[Tensor, " b"],
    *,
    clip_low: Float[Tensor, " b"] | float,
    clip_high: Float[Tensor, " b"] | float,
) -> Float[Tensor, " b"]:
    """Clipped policy-gradient loss of each row, to be minimised.

    `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` with `r = exp(log_ratio)` (Schulman et al., PPO, arXiv
    1707.06347, eq. 7, negated). Its gradient is `-A r d log_prob` where the ratio is inside the range or moves back
    towards it, and 0 where it has already gone too far in the direction the advantage asks for. The log-ratio [b] is
    summed or per dimension as the clip range assumes; distances are one number or [b]. Returns [b], unreduced.
    """
    _check_clip(log_ratio, advantage, clip_low, clip_high)
    ratio = log_ratio.exp()
    low, high = (
        bound.to(ratio.dtype) if isinstance(bound, Tensor) else ratio.new_full((), bound)
        for bound in (1 - clip_low, 1 + clip_high)
    )
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))


def clipped_above(
    log_ratio: Float[Tensor, " b"], advantage: Float[Tensor, " b"], *, clip_high: Float[Tensor, " b"] | float
) -> Bool[Tensor, " b"]:
    """Rows whose gradient the upper bound cuts: good samples whose ratio is above 1 + clip_high."""
    _check_clip(log_ratio, advantage, 0.0, clip_high)
    return (log_ratio.exp() > 1 + clip_high) & (advantage > 0)


def clipped_below(
    log_ratio: Float[Tensor, " b"], advantage: Float[Tensor, " b"], *, clip_low: Float[Tensor, " b"] | float
) -> Bool[Tensor, " b"]:
    """Rows whose gradient the lower bound cuts: bad samples whose ratio is below 1 - clip_low."""
    _check_clip(log_ratio, advantage, clip_low, 0.0)
    return (log_ratio.exp() < 1 - clip_low) & (advantage < 0)


def clipped(
    log_ratio: Float[Tensor, " b"],
    advantage: Float[Tensor, " b"],
    *,
    clip_low: Float[Tensor, " b"] | float,
    clip_high: Float[Tensor, " b"] | float,
) -> Bool[Tensor, " b"]:
    """Rows whose gradient either bound cuts."""
    above = clipped_above(log_ratio, advantage, clip_high=clip_high)
    return above | clipped_below(log_ratio, advantage, clip_low=clip_low)


def approx_kl(log_ratio: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Estimate of KL(old || new) from samples of the old policy, `r - 1 - log r`: unbiased and never negative.

    Schulman, "Approximating KL Divergence" (2020), estimator k3. For a log-ratio per dimension it is no divergence.
    """
    return torch.expm1(log_ratio) - log_ratio


def sample_mean(values: Float[Tensor, " b *latent"]) -> Float[Tensor, " b"]:
    """Mean over the elements of each sample, in the widest dtype of the device."""
    return values.flatten(1).mean(1, dtype=widest(values.device)) if values.ndim > 1 else widened(values)


def mean_squared_error(prediction: Float[Tensor, " b *latent"], target: Float[Tensor, " b *latent"]) -> Tensor:
    """Squared error of each sample, averaged over its elements: [b], in float64.

    Differences of such errors are multiplied by numbers in the thousands, so they are not rounded to float32. A
    coefficient quoted for a summed error is this one's divided by the number of elements. Raises ValueError: shapes
    differ, or there is no batch dimension.
    """
    _check_same({"prediction": prediction, "target": target})
    if prediction.ndim == 0:
        raise ValueError("prediction and target need a batch dimension [b, ...], got 0-d tensors")
    wide = torch.promote_types(torch.promote_types(prediction.dtype, target.dtype), torch.float32)
    return sample_mean((prediction.to(wide) - target.to(wide)).square())


def matching_error(
    error: Float[Tensor, " b *latent"], *, adaptive: bool = True, floor: float = 1e-5
) -> Float[Tensor, " b"]:
    """Mean square of each sample's error, `mean(d^2) / sg[max(mean|d|, floor)]` if adaptive, in float64.

    The adaptive weight of DiffusionNFT makes the loss of every sample linear in the size of its error.
    """
    square = mean_squared_error(error, torch.zeros_like(error))
    return square / sample_mean(error.detach().abs()).clamp(min=floor) if adaptive else square


def optimality(
    advantage: Float[Tensor, " b"], *, advantage_range: float = 5.0, mode: AdvantageMode = "all"
) -> Float[Tensor, " b"]:
    """Probability r in [0, 1] that an image counts as good, `clip(A / (2 c) + 1/2, 0, 1)` with `c = advantage_range`.

    The mode changes the advantage first: positive_only and negative_only clip it at 0, one_only is 1 for A > 0 and else
    0, binary is the sign. With c = 5 the last two give r in {.5, .6} and {.4, .5, .6}, not {0, 1}; a range of 1 gives
    those. Raises ValueError: the mode is unknown.
    """
    clipped = advantage.clamp(-advantage_range, advantage_range)
    modes = {
        "all": clipped,
        "positive_only": clipped.clamp(min=0),
        "negative_only": clipped.clamp(max=0),
        "one_only": (clipped > 0).to(clipped.dtype),
        "binary": clipped.sign(),
    }
    if mode not in modes:
        raise ValueError(f"mode of the advantage must be one of {', '.join(modes)}, got {mode!r}")
    return (modes[mode] / (2 * advantage_range) + 0.5).clamp(0, 1)


def matching_log_prob(
    error: Float[Tensor, " b"], sigma: Float[Tensor, " b"], *, weighting: Weighting = "ghuber", power: float = 0.25
) -> Float[Tensor, " b"]:
    """AWM's stand-in for a log-probability, `-psi(l, t)` of the velocity's mean squared error l at t = sigma.

    psi: uniform `l`; t `t l`; t2 `t^2 l`; huber `t (sqrt(l + 1e-10) - 1e-5)`; ghuber `(t / p) ((l + 1e-10)^p -
    1e-10^p)`, which weighs large errors down. Raises ValueError: the weighting is unknown.
    """
    t = sent(sigma, error.device).to(error.dtype)
    powers = {"uniform": (0, 1.0), "t": (1, 1.0), "t2": (2, 1.0), "huber": (1, 0.5), "ghuber": (1, power)}
    if weighting not in powers:
        raise ValueError(f"weighting of awm must be one of {', '.join(powers)}, got {weighting!r}")
    time_power, error_power = powers[weighting]
    if error_power == 1:
        return -(t**time_power) * error
    # huber is published without the factor 1/p that ghuber has.
    scale = 1.0 if weighting == "huber" else 1 / error_power
    return -scale * t * ((error + 1e-10) ** error_power - 1e-10**error_power)


def velocity_kl(velocity: Float[Tensor, " b *latent"], reference: Float[Tensor, " b *latent"]) -> Float[Tensor, " b"]:
    """Distance to another policy, `mse(velocity, sg[reference])`, in float64."""
    return mean_squared_error(velocity, reference.detach())
