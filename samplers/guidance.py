"""Velocity functions, and guidance as functions over them.

A network is `network(x, timestep, cond) -> v`, in whatever dtype it likes. A velocity is `velocity(x, sigma, timestep)
-> v`: it knows its conditioning, answers in at least float32, and is what a rollout and an update call. Guidance takes
networks or velocities and returns velocities, so that rollout and update are guided alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.samplers.parametrization import working_dtype
from flowrl.trajectory import Conditioning

Network = Callable[[Tensor, Tensor, Conditioning], Tensor]
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


def _evaluate(network: Network, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
    """Call a network with one timestep a sample and check what comes back."""
    if timestep.shape not in ((), x.shape[:1]):
        raise ValueError(f"timestep must be 0-d or [{len(x)}], got shape {tuple(timestep.shape)}")
    velocity = network(x, timestep.to(x.device).expand(len(x)), cond)
    if velocity.shape != x.shape:
        raise ValueError(
            f"a network must return a velocity of the shape of x {tuple(x.shape)}, got {tuple(velocity.shape)}"
        )
    return velocity.to(torch.promote_types(velocity.dtype, working_dtype(x)))


def _check_length(cond: Conditioning, x: Tensor) -> None:
    if len(cond) != len(x):
        raise ValueError(
            f"conditioning of {len(cond)} samples cannot drive a batch of {len(x)}: index or expand it to the batch"
        )


def conditioned(network: Network, cond: Conditioning) -> Velocity:
    """Bind a network to its conditioning: one evaluation, no guidance.

    Args:
        network: Receives x as it is, timestep [b] on the device of x, and the conditioning.
        cond: [b]; index it with the rows at hand.

    Returns:
        A velocity that raises ValueError where the batch differs from the conditioning's, or where the network's output
        differs in shape from x.
    """

    def velocity(x: Float[Tensor, " b *latent"], sigma: Tensor, timestep: Tensor) -> Float[Tensor, " b *latent"]:
        _check_length(cond, x)
        return _evaluate(network, x, timestep, cond)

    return velocity


def classifier_free_guidance(network: Network, cond: Conditioning, negative: Conditioning, scale: float) -> Velocity:
    """Classifier-free guidance `v_neg + scale (v_pos - v_neg)` (Ho and Salimans, arXiv 2207.12598, eq. 6).

    Negative and positive run in one batched call, negative first, and gradient flows through both. The mixture is taken
    in float32. Scale 1 is one evaluation of the positive alone, without the negative.

    Args:
        network: As in `conditioned`; sees a batch of 2b, except at scale 1.
        cond: [b].
        negative: [b], or one sample for all.
        scale: Finite.

    Raises:
        ValueError: scale is not finite, or the two conditionings do not fit together.
    """
    if not math.isfinite(scale):
        raise ValueError(f"guidance scale must be finite, got {scale}: 1 means no guidance")
    if scale == 1:
        return conditioned(network, cond)
    both = Conditioning.cat([negative.expand(len(cond)), cond])

    def velocity(x: Float[Tensor, " b *latent"], sigma: Tensor, timestep: Tensor) -> Float[Tensor, " b *latent"]:
        _check_length(cond, x)
        doubled = timestep if timestep.ndim == 0 else torch.cat([timestep, timestep])
        without, with_prompt = _evaluate(network, torch.cat([x, x]), doubled, both).chunk(2)
        return without + scale * (with_prompt - without)

    return velocity
