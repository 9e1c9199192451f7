"""Pieces of policy-gradient losses, unreduced: the recipe decides what is averaged over what.

Shapes must match exactly. A [1] against a [b] would broadcast to a loss that looks right and is not, so it is an error.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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
    towards it, and 0 where it has already gone too far in the direction the advantage asks for.

    Args:
        log_ratio: [b] new minus old log-probability, summed or per dimension as the clip range assumes.
        advantage: [b].
        clip_low: Distance, one number or [b].
        clip_high: Distance, one number or [b].

    Returns:
        [b], unreduced.

    Raises:
        ValueError: shapes differ, or a clip distance is negative.
    """
    _check_clip(log_ratio, advantage, clip_low, clip_high)
    ratio = log_ratio.exp()
    low = torch.as_tensor(1 - clip_low, dtype=ratio.dtype, device=ratio.device)
    high = torch.as_tensor(1 + clip_high, dtype=ratio.dtype, device=ratio.device)
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))


def masked_mean(values: Float[Tensor, " *shape"], weight: Tensor, *, denominator: Tensor | float) -> Float[Tensor, ""]:
    """Weighted sum over a denominator that the caller knows.

    `sum(values * weight) / denominator`. With the denominator of the whole batch, the losses of its micro-batches add
    up to the loss of the batch however it is cut. Values of weight 0 are left out altogether, NaN included.

    Args:
        values: Any shape.
        weight: The same shape; a boolean mask counts as 0 and 1.
        denominator: Positive; usually the sum of the weights over all micro-batches and ranks.

    Raises:
        ValueError: shapes differ, or the denominator is not positive.
    """
    _check_same({"values": values, "weight": weight})
    if not denominator > 0:
        raise ValueError(f"the denominator must be positive, got {denominator}: nothing is left to average")
    kept = torch.where(weight != 0, values, torch.zeros_like(values))
    return (kept * weight.to(values.dtype)).sum() / denominator


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


def approx_kl(log_ratio: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Estimate of KL(old || new) from samples of the old policy, `r - 1 - log r`: unbiased and never negative.

    Schulman, "Approximating KL Divergence" (2020), estimator k3. For a log-ratio taken per dimension it is a measure of
    drift, not a divergence.
    """
    return torch.expm1(log_ratio) - log_ratio
