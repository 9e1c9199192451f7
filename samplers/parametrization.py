"""What a flow network's output says about the latent: velocity, clean, noise and score, each with its inverse.

On the rectified-flow path x = (1 - sigma) clean + sigma noise and velocity = noise - clean (Liu et al., arXiv
2209.03003; Esser et al., arXiv 2403.03206). The identities are linear in the network output, hence exact for any
output, also one that is not yet a good prediction. Sigma is a float, a 0-d tensor or [b].
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Sigma = float | Tensor


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a latent is computed with: its own, raised to at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def column(value: Sigma, x: Tensor, name: str = "sigma") -> Tensor:
    """Give a scalar or a per-sample value the dtype, device and rank with which it broadcasts over x.

    Args:
        value: A float, a 0-d tensor or [b].
        x: [b, *latent]; its dtype must be the working dtype already.
        name: What the value is, for the error message.

    Returns:
        A 0-d tensor, or [b, 1, ...] with as many dimensions as x.

    Raises:
        ValueError: the value is neither a scalar nor [b].
    """
    # A Python number becomes float64 first: the default, float32, would round it before it is used.
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if tensor.ndim > 0 and tensor.shape != x.shape[:1]:
        raise ValueError(
            f"{name} must be a number, a 0-d tensor or one value a sample [{x.shape[0] if x.ndim else 0}], "
            f"got shape {tuple(tensor.shape)}"
        )
    tensor = tensor.to(device=x.device, dtype=x.dtype)
    return tensor.reshape(-1, *[1] * (x.ndim - 1)) if tensor.ndim else tensor


def raise_pair(x: Tensor, output: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Bring a latent and a network output to the working dtype of the latent.

    Raises:
        ValueError: the shapes differ; broadcasting one against the other would hide a mistake.
    """
    if x.shape != output.shape:
        raise ValueError(f"{name} must have the shape of x {tuple(x.shape)}, got {tuple(output.shape)}")
    dtype = working_dtype(x)
    return x.to(dtype), output.to(dtype)


def _positive(value: Tensor, meaning: str) -> Tensor:
    if not bool((value > 0).all()):
        raise ValueError(f"{meaning}, got {value.flatten().tolist()}: use another parametrization at this end")
    return value


def clean_from_velocity(
    x: Float[Tensor, " b *latent"], velocity: Float[Tensor, " b *latent"], sigma: Sigma
) -> Float[Tensor, " b *latent"]:
    """Predicted data, `x - sigma * velocity`."""
    x, velocity = raise_pair(x, velocity, "velocity")
    return x - column(sigma, x) * velocity


def noise_from_velocity(
    x: Float[Tensor, " b *latent"], velocity: Float[Tensor, " b *latent"], sigma: Sigma
) -> Float[Tensor, " b *latent"]:
    """Predicted noise, `x + (1 - sigma) * velocity`."""
    x, velocity = raise_pair(x, velocity, "velocity")
    return x + (1 - column(sigma, x)) * velocity


def score_from_velocity(
    x: Float[Tensor, " b *latent"], velocity: Float[Tensor, " b *latent"], sigma: Sigma
) -> Float[Tensor, " b *latent"]:
    """Score of the marginal at sigma, `-noise / sigma`.

    Raises:
        ValueError: sigma is 0, where the score of the path has no value.
    """
    noise = noise_from_velocity(x, velocity, sigma)
    return -noise / _positive(column(sigma, noise), "the score needs sigma > 0")


def velocity_from_clean(
    x: Float[Tensor, " b *latent"], clean: Float[Tensor, " b *latent"], sigma: Sigma
) -> Float[Tensor, " b *latent"]:
    """Velocity of a data prediction, `(x - clean) / sigma`.

    Raises:
        ValueError: sigma is 0, where every velocity predicts the same data.
    """
    x, clean = raise_pair(x, clean, "clean")
    return (x - clean) / _positive(column(sigma, x), "a velocity follows from clean data at sigma > 0 only")


def velocity_from_noise(
    x: Float[Tensor, " b *latent"], noise: Float[Tensor, " b *latent"], sigma: Sigma
) -> Float[Tensor, " b *latent"]:
    """Velocity of a noise prediction, `(noise - x) / (1 - sigma)`.

    Raises:
        ValueError: sigma is 1, where every velocity predicts the same noise.
    """
    x, noise = raise_pair(x, noise, "noise")
    return (noise - x) / _positive(1 - column(sigma, x), "a velocity follows from noise at sigma < 1 only")


def velocity_from_score(
    x: Float[Tensor, " b *latent"], score: Float[Tensor, " b *latent"], sigma: Sigma
) -> Float[Tensor, " b *latent"]:
    """Velocity of a score, through noise = `-sigma * score`.

    Raises:
        ValueError: sigma is 1 (see `velocity_from_noise`).
    """
    x, score = raise_pair(x, score, "score")
    return velocity_from_noise(x, -column(sigma, x) * score, sigma)
