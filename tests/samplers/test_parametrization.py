"""What a velocity says of the clean data and of the noise."""

from __future__ import annotations

import torch

from flowrl.samplers.parametrization import clean_from_velocity, column, noise_from_velocity

X = torch.tensor([[0.30, -1.20, 0.75, 2.00]], dtype=torch.float64)
V = torch.tensor([[-0.40, 0.90, -0.10, 1.50]], dtype=torch.float64)


def test_parametrization_identities() -> None:
    clean, noise = clean_from_velocity(X, V, 0.8), noise_from_velocity(X, V, 0.8)
    torch.testing.assert_close(clean, torch.tensor([[0.62, -1.92, 0.83, 0.80]], dtype=torch.float64))
    torch.testing.assert_close(noise, torch.tensor([[0.22, -1.02, 0.73, 2.30]], dtype=torch.float64))
    torch.testing.assert_close(0.2 * clean + 0.8 * noise, X)
    torch.testing.assert_close(noise - clean, V)
    for convert in (clean_from_velocity, noise_from_velocity):
        assert convert(X.bfloat16(), V.bfloat16(), 0.5).dtype == torch.float32
        levels = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
        rows = convert(X.expand(3, 4), V.expand(3, 4), levels)
        assert all(torch.equal(row, convert(X, V, float(s))[0]) for row, s in zip(rows, levels, strict=True))


def test_numbers_stay_on_the_host_and_columns_go_to_the_latent() -> None:
    x = torch.zeros(2, 3, 4, device="meta")
    assert column(0.5, x).device.type == column(torch.tensor(0.5), x).device.type == "cpu"
    per_sample = column(torch.tensor([0.5, 0.25]), x)
    assert (per_sample.device.type, per_sample.shape) == ("meta", (2, 1, 1))
