"""Velocity, clean, noise and score convert into one another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flowrl.samplers import (
    clean_from_velocity,
    noise_from_velocity,
    score_from_velocity,
    velocity_from_clean,
    velocity_from_noise,
    velocity_from_score,
)

X = torch.tensor([[0.30, -1.20, 0.75, 2.00]], dtype=torch.float64)
V = torch.tensor([[-0.40, 0.90, -0.10, 1.50]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("there", "back", "sigmas"),
    [
        (clean_from_velocity, velocity_from_clean, [1.0, 0.5, 0.01]),
        (noise_from_velocity, velocity_from_noise, [0.99, 0.5, 0.0]),
        (score_from_velocity, velocity_from_score, [0.99, 0.5, 0.01]),
    ],
)
def test_parametrizations_invert(
    there: Callable[..., Tensor], back: Callable[..., Tensor], sigmas: list[float]
) -> None:
    x, v = X.expand(3, 4), V.expand(3, 4)
    sigma = torch.tensor(sigmas, dtype=torch.float64)
    torch.testing.assert_close(back(x, there(x, v, sigma), sigma), v, rtol=0, atol=1e-12)
    assert there(X.bfloat16(), V.bfloat16(), 0.5).dtype == torch.float32


def test_parametrization_identities() -> None:
    clean, noise = clean_from_velocity(X, V, 0.8), noise_from_velocity(X, V, 0.8)
    torch.testing.assert_close(clean, torch.tensor([[0.62, -1.92, 0.83, 0.80]], dtype=torch.float64))
    torch.testing.assert_close(noise, torch.tensor([[0.22, -1.02, 0.73, 2.30]], dtype=torch.float64))
    torch.testing.assert_close(0.2 * clean + 0.8 * noise, X)
    torch.testing.assert_close(noise - clean, V)
    calls: list[Callable[[], Tensor]] = [
        lambda: score_from_velocity(X, V, 0.0),
        lambda: velocity_from_clean(X, V, 0.0),
        lambda: velocity_from_noise(X, V, 1.0),
        lambda: velocity_from_score(X, V, 1.0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"sigma [<>]"):
            call()
