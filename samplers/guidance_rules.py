"""Classifier-free guidance as each model family does it: one small function per rule, on raw network outputs.

A rule is `rule(negative, positive, scale) -> guided`, outputs `[b, *latent]`. It is bilinear (then reinforcement
learning guidance may be applied before or after it, at equal scale) or it is not (then each network's guidance has to
be finished before the two are mixed, which `flowrl.samplers.guidance.rlg` over guided velocities does).

    family                               rule                  bilinear  no guidance at
    SD3, SD3.5, Wan 2.1, SD 1.5, SDXL    linear_cfg            yes       1
    LTX-2 (guides clean data)            linear_cfg            yes       1
    FLUX.1, FLUX.2 (distilled)           embedded_guidance     one call  -
    Qwen-Image                           qwen_norm_rescale     no        1
    Z-Image                              z_image               no cap    0

LTX-2 takes its mixture in clean data, `x - sigma v`. The weights of the mixture sum to 1, so it is the same mixture of
velocities. Post-processing that is not linear, such as the guidance rescale of SDXL or clipping of clean data, comes
after reinforcement learning guidance.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.runtime.shapes import Float
from flowrl.trajectory import Conditioning

Rule = Callable[[Tensor, Tensor, float], Tensor]


def linear_cfg(
    negative: Float[Tensor, " b *latent"], positive: Float[Tensor, " b *latent"], scale: float
) -> Float[Tensor, " b *latent"]:
    """`negative + scale (positive - negative)` (Ho and Salimans, arXiv 2207.12598, eq. 6)."""
    return negative + scale * (positive - negative)


def qwen_norm_rescale(
    negative: Float[Tensor, " b *latent"], positive: Float[Tensor, " b *latent"], scale: float
) -> Float[Tensor, " b *latent"]:
    """Qwen-Image's: the linear mixture, each token of it brought to the norm that the positive output has there.

        guided = linear * |positive| / |linear|,        norms over the last dimension

    The norm of a mixture is not the mixture of norms, so it does not commute with reinforcement learning guidance.
    Outputs are packed tokens `[b, tokens, channels]`.
    """
    linear = linear_cfg(negative, positive, scale)
    return linear * (positive.norm(dim=-1, keepdim=True) / linear.norm(dim=-1, keepdim=True))


def z_image(
    negative: Float[Tensor, " b *latent"],
    positive: Float[Tensor, " b *latent"],
    scale: float,
    *,
    norm_cap: float | None = None,
) -> Float[Tensor, " b *latent"]:
    """Z-Image's: `-(positive + scale (positive - negative))`, a velocity in our sign.

    The network predicts `clean - noise`, the opposite of our velocity, and the scale counts from 0: it is the usual one
    less 1. With `norm_cap` a sample's mixture is shortened to at most `norm_cap` times the norm of the positive output
    (over all of the sample), which is not linear. Stock switches guidance off above a normalised time by
    `cfg_truncation`: that is scale 0 there. Raises ValueError: norm_cap is not positive.
    """
    if norm_cap is not None and not norm_cap > 0:
        raise ValueError(f"norm_cap must be positive, got {norm_cap}: None means no cap")
    guided = positive + scale * (positive - negative)
    if norm_cap is not None:
        shape = (-1, *[1] * (guided.ndim - 1))
        longest, length = norm_cap * positive.flatten(1).norm(dim=1), guided.flatten(1).norm(dim=1)
        guided = guided * torch.where(length > longest, longest / length, 1.0).reshape(shape)
    return -guided


def embedded_guidance(cond: Conditioning, scale: float, *, name: str = "guidance") -> Conditioning:
    """Conditioning of a guidance-distilled model, the same for base and tuned network: the scale is a network input
    `[b]`, one call per step, 2 rows. Raises ValueError: scale is not finite, or the name is taken."""
    if not math.isfinite(scale) or name in cond.tensors:
        raise ValueError(
            f"an embedded guidance scale must be finite and given once, got {scale} for {name!r} beside "
            f"{', '.join(cond.tensors)}"
        )
    device = next(iter(cond.tensors.values())).device
    return Conditioning({**cond.tensors, name: torch.full((len(cond),), float(scale), device=device)})
