"""What a flow network's output says about the latent: its clean data and its noise.

On the rectified-flow path x = (1 - sigma) clean + sigma noise and velocity = noise - clean (Liu et al., arXiv
2209.03003; Esser et al., arXiv 2403.03206). The identities are linear in the network output, hence exact for any
output, even for one that is not a good prediction yet. Sigma is a float, a 0-d tensor or [b].
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.runtime.placement import sent
from flowrl.runtime.shapes import Float

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

    Returns a 0-d tensor on the CPU, which combines with tensors of any device without a copy; or [b, 1, ...] on the
    device of x, with as many dimensions as x.
    """
    # A Python number becomes float64 first: the default, float32, would round it before it is used.
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if tensor.ndim == 0:
        return tensor.to(device="cpu", dtype=x.dtype)
    if tensor.shape != x.shape[:1]:
        raise ValueError(
            f"{name} must be a number, a 0-d tensor or one value per sample [{x.shape[0] if x.ndim else 0}], "
            f"got shape {tuple(tensor.shape)}"
        )
    return sent(tensor.to(x.dtype), x.device).reshape(-1, *[1] * (x.ndim - 1))


def raise_pair(x: Tensor, output: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Bring a latent and a network output to the working dtype of the latent. Raises ValueError: the shapes differ;
    broadcasting one against the other would hide a mistake."""
    if x.shape != output.shape:
        raise ValueError(f"{name} must have the shape of x {tuple(x.shape)}, got {tuple(output.shape)}")
    dtype = working_dtype(x)
    return x.to(dtype), output.to(dtype)


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
    return x + column(1 - sigma, x) * velocity
