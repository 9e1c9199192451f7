"""Densities and divergences of transitions against torch.distributions and worked numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from flowrl.samplers import KERNELS, Transition, gaussian_kl, gaussian_log_prob, published_kl
from flowrl.samplers.schedules import diffusers_sigmas
from flowrl.samplers.transition import cps_log_prob

X = torch.tensor([[0.30, -1.20, 0.75, 2.00]], dtype=torch.float64)
V = torch.tensor([[-0.40, 0.90, -0.10, 1.50]], dtype=torch.float64)
X_NEXT = torch.tensor([[0.40, -1.35, 0.70, 1.65]], dtype=torch.float64)
SIGMA, SIGMA_NEXT = 0.8, 0.7
SD3 = diffusers_sigmas(10, 3.0)
STOCHASTIC = [name for name in KERNELS if name != "ode"]


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize("b", [1, 3])
def test_log_prob_equals_torch_distributions(name: str, b: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, v, x_next = torch.randn(3, b, 2, 5, 5, generator=generator, dtype=torch.float64)
    step = KERNELS[name](x, v, torch.linspace(0.8, 0.6, b), torch.linspace(0.5, 0.4, b))
    wanted = Normal(step.mean, step.std).log_prob(x_next).flatten(1).sum(1)
    torch.testing.assert_close(gaussian_log_prob(x_next, step), wanted, rtol=1e-13, atol=0)


def test_log_prob_of_a_large_latent_is_accurate_in_float32() -> None:
    generator = torch.Generator().manual_seed(2)
    mean, noise = torch.randn(2, 2, 16, 64, 64, generator=generator)
    std = torch.tensor(0.1)
    x_next = mean + std * noise
    log_prob = gaussian_log_prob(x_next, Transition(mean, std))
    exact = Normal(mean.double(), std.double()).log_prob(x_next.double()).flatten(1).sum(1)
    assert log_prob.dtype == torch.float32
    # Only the result is rounded (65,536 dimensions, |log_prob| about 6e4): half an ulp of float32.
    torch.testing.assert_close(log_prob.double(), exact, rtol=1.5e-7, atol=0)
    expected = 65536 * (-math.log(0.1) - 0.5 * math.log(2 * math.pi) - 0.5)
    assert abs(float(log_prob[0]) - expected) < 5 * math.sqrt(65536 / 2)


def test_log_prob_gradient_goes_to_the_mean_only() -> None:
    mean, x_next = V.clone().requires_grad_(), X_NEXT.clone().requires_grad_()
    gaussian_log_prob(x_next, Transition(mean, torch.tensor(0.5, dtype=torch.float64))).sum().backward()
    assert x_next.grad is None
    assert mean.grad is not None
    torch.testing.assert_close(mean.grad, (X_NEXT - V) / 0.25)


@pytest.mark.parametrize("std", [torch.tensor(0.0), torch.tensor([[1.0], [0.0]]), torch.tensor(math.nan)])
def test_deterministic_step_has_no_density(std: Tensor) -> None:
    zero = Transition(torch.zeros(2, 3), std)
    one = Transition(torch.zeros(2, 3), torch.tensor(1.0))
    calls: list[Callable[[], Tensor]] = [
        lambda: gaussian_log_prob(torch.zeros(2, 3), zero),
        lambda: gaussian_kl(zero, one),
        lambda: gaussian_kl(one, zero),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="no density"):
            call()
    with pytest.raises(ValueError, match="mean's shape"):
        gaussian_log_prob(torch.zeros(1, 3), one)


def test_cps_log_prob() -> None:
    velocity = V.clone().requires_grad_()
    step = KERNELS["cps"](X, velocity, SIGMA, SIGMA_NEXT, noise_level=0.8)
    log_prob = cps_log_prob(X_NEXT, step)
    assert log_prob.item() / 4 == pytest.approx(-0.3131074438, abs=6e-11)
    (log_prob / 4).sum().backward()
    assert velocity.grad is not None
    assert float(velocity.grad[0, 0]) == pytest.approx(-0.01636969, abs=6e-9)
    # Its log-ratios are 2 std^2 times the Gaussian ones.
    other = KERNELS["cps"](X, V + 0.1, SIGMA, SIGMA_NEXT, noise_level=0.8)
    gauss = gaussian_log_prob(X_NEXT, other) - gaussian_log_prob(X_NEXT, step)
    torch.testing.assert_close(cps_log_prob(X_NEXT, other) - log_prob, 2 * step.std**2 * gauss)
    assert torch.isfinite(cps_log_prob(X, KERNELS["cps"](X, V, 0.1, 0.0))).all()


@pytest.mark.parametrize(
    ("name", "c", "kl", "code"),
    [
        ("flow_sde", -0.1245, 5.5358036e-5, 1.3839509e-6),
        ("dance_sde", -0.101125, 7.9537622e-4, 1.9884405e-5),
        ("cps", -0.1967376208, 6.1131371e-5, 1.5282843e-5),
    ],
)
def test_kl_of_two_policies(name: str, c: float, kl: float, code: float) -> None:
    difference = torch.tensor([[-0.02, 0.01, -0.03, 0.0]], dtype=torch.float64)
    new = KERNELS[name](X, V, SIGMA, SIGMA_NEXT)
    reference = KERNELS[name](X, V - difference, SIGMA, SIGMA_NEXT)
    torch.testing.assert_close(new.mean - reference.mean, c * difference, rtol=0, atol=1e-11)
    exact = gaussian_kl(new, reference)
    torch.testing.assert_close(
        exact, kl_divergence(Normal(new.mean, new.std), Normal(reference.mean, reference.std)).sum(1)
    )
    assert float(exact) == pytest.approx(kl, rel=2e-8)
    assert float(exact) / 4 == pytest.approx(kl / 4, rel=2e-8)
    step_size = None if name == "cps" else torch.tensor([SIGMA - SIGMA_NEXT], dtype=torch.float64)
    assert float(published_kl(new, reference, step_size=step_size)) / 4 == pytest.approx(code, rel=5e-8)
    assert float(gaussian_kl(new, new)) == 0


def test_kl_in_velocity_space_as_published() -> None:
    difference = torch.tensor([[-0.02, 0.01, -0.03, 0.0]], dtype=torch.float64)
    new = KERNELS["flow_sde"](X, V, SIGMA, SIGMA_NEXT)
    reference = KERNELS["flow_sde"](X, V - difference, SIGMA, SIGMA_NEXT)
    g, h = 1.4, 0.1
    wanted = h / 2 * (g * (1 - SIGMA) / (2 * SIGMA) + 1 / g) ** 2 * difference.square().sum(1)
    torch.testing.assert_close(gaussian_kl(new, reference), wanted)


@pytest.mark.parametrize("shape", [(), (3, 1), (3, 4), (1, 4)])
def test_kl_of_different_std_equals_torch_distributions(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    stds = torch.rand(2, *shape, generator=generator, dtype=torch.float64) + 0.1
    new, reference = Transition(means[0], stds[0]), Transition(means[1], stds[1])
    wanted = kl_divergence(Normal(means[0], stds[0]), Normal(means[1], stds[1])).sum(1)
    torch.testing.assert_close(gaussian_kl(new, reference), wanted)
    log_prob = Normal(means[0], stds[0]).log_prob(means[1]).sum(1)
    torch.testing.assert_close(gaussian_log_prob(means[1], new), log_prob)


def test_published_kl_strength_on_the_sd3_grid() -> None:
    """Switching from the published number to the exact one multiplies a tuned coefficient by 1/h."""
    s, s_next = SD3[:-1].double(), SD3[1:].double()
    x, v = torch.randn(2, 10, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    options = {"sigma_max": float(SD3[1])}
    new, reference = (KERNELS["flow_sde"](x, v + d, s, s_next, **options) for d in (0.0, 0.1))
    ratio = gaussian_kl(new, reference) / published_kl(new, reference, step_size=s - s_next)
    wanted = torch.tensor([25, 21, 18, 15, 12, 9.5, 7.3, 5.4, 3.7, 112], dtype=torch.float64)
    torch.testing.assert_close(ratio, wanted, rtol=0.04, atol=0)  # the list is rounded to two digits
    for bad in (torch.ones(3), 0.0, torch.ones(10, 1)):
        with pytest.raises(ValueError, match="step_size"):
            published_kl(new, reference, step_size=bad)
