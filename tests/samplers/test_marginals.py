"""Marginals of every kernel on Gaussian data, by the variance recursion and by sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from gaussian_flow import MEAN, SPREAD, exact_velocity, noise_of, uniform_schedule, velocity
from torch import Tensor

from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, rollout
from flowrl.samplers.schedules import diffusers_sigmas, dynamic_sigmas, linspace_sigmas

UNIFORM = torch.linspace(1, 0, 11, dtype=torch.float64)
SD3, FLUX, DANCE = diffusers_sigmas(10, 3.0), dynamic_sigmas(6, 0.63), linspace_sigmas(16, 3.0)
MIX = linspace_sigmas(25, 3.0)


def variances(
    name: str, sigma: Tensor, level: float, *, spread: float = SPREAD, steps: Sequence[int] | None = None
) -> list[float]:
    """Variance after each step by the closed-form recursion, with a step's gain and noise read off the kernel.

    The mean must stay at (1 - sigma) MEAN, which is asserted along the way.
    """
    sigma = sigma.double()
    steps = range(len(sigma) - 1) if steps is None else steps
    result = [1.0]
    for i in range(len(sigma) - 1):
        s, s_next = sigma[i], sigma[i + 1]
        x = torch.stack([(1 - s) * MEAN, (1 - s) * MEAN + 1])[:, None]
        kernel = KERNELS[name if i in steps else "ode"]
        step = kernel(x, exact_velocity(x, s, spread), s, s_next, noise_level=level, sigma_max=float(sigma[1]))
        at_mean, above = step.mean[:, 0].tolist()
        assert at_mean == pytest.approx((1 - float(s_next)) * MEAN, abs=1e-12)
        result.append((above - at_mean) ** 2 * result[-1] + float(step.std) ** 2)
    return result


def final_variance(name: str, sigma: Tensor, level: float) -> float:
    """The last entry of `variances`, all steps evaluated in one call."""
    sigma = sigma.double()
    s, s_next = sigma[:-1], sigma[1:]
    at_mean = ((1 - s) * MEAN)[:, None]
    kernel = replace(KERNELS[name], noise_level=level, sigma_max=float(sigma[1]))
    low, high = (kernel(x, exact_velocity(x, s[:, None]), s, s_next) for x in (at_mean, at_mean + 1))
    variance = 1.0
    for gain, noise in zip((high.mean - low.mean).flatten().tolist(), high.std.flatten().tolist(), strict=True):
        variance = gain**2 * variance + noise**2
    return variance


UNIFORM_TABLE: list[tuple[str, float, list[float]]] = [
    ("flow_sde", 0.7,
     [1, 0.919025, 0.795326, 0.624307, 0.481131, 0.368571, 0.285830, 0.231795, 0.205334, 0.205200, 0.229962]),
    ("dance_sde", 0.3,
     [1, 0.810920, 0.646675, 0.507162, 0.392226, 0.301625, 0.234997, 0.191810, 0.171348, 0.172724, 0.194974]),
    ("cps", 0.8,
     [1, 0.810000, 0.642385, 0.496976, 0.373932, 0.273721, 0.197178, 0.145094, 0.116944, 0.110386, 0.123754]),
    ("ode", 0.0,
     [1, 0.810000, 0.644933, 0.504688, 0.389099, 0.297904, 0.230697, 0.186865, 0.165527, 0.165527, 0.185574]),
    ("ddim_flow", 1.0,
     [1, 0.810000, 0.643180, 0.500974, 0.382885, 0.288453, 0.217090, 0.168041, 0.140355, 0.133217, 0.149351]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "level", "wanted"), UNIFORM_TABLE)
def test_variance_after_each_step(name: str, level: float, wanted: list[float]) -> None:
    assert variances(name, UNIFORM, level) == pytest.approx(wanted, abs=6e-7)


COLUMNS = [("ode", 0.0), ("flow_sde", 0.7), ("dance_sde", 0.3), ("dance_sde", 1.0), ("cps", 0.8), ("ddim_flow", 1.0)]


@pytest.mark.parametrize(
    ("sigma", "wanted"),
    [
        (SD3, [0.128996, 0.177256, 0.142078, 0.285667, 0.094663, 0.101924]),
        (FLUX, [0.121279, 0.182125, 0.136078, 0.285795, 0.091495, 0.096592]),
        (DANCE, [0.172741, 0.201960, 0.180715, 0.251222, 0.115894, 0.137432]),
        (torch.linspace(1, 0, 1001, dtype=torch.float64), [0.249260, 0.250918, 0.249372, 0.249968, 0.162145, 0.248251]),
    ],
)
def test_final_variance_on_real_grids(sigma: Tensor, wanted: list[float]) -> None:
    got = [final_variance(name, sigma, level) for name, level in COLUMNS]
    assert got == pytest.approx(wanted, abs=1.5e-6)


def test_variance_of_windows() -> None:
    cps = variances("cps", SD3, 0.8, steps=[1, 2, 3])
    wanted = [1, 0.921848, 0.834646, 0.737151, 0.628264, 0.512904, 0.390195, 0.267776, 0.165007, 0.125911, 0.128107]
    assert cps == pytest.approx(wanted, abs=1e-6)
    flux = variances("flow_sde", FLUX, 0.9)
    assert flux == pytest.approx([1, 1.058737, 0.995480, 0.678165, 0.432722, 0.261922, 0.203635], abs=1.5e-6)
    for name, sigma, steps, last in [
        ("flow_sde", SD3, [1, 2], 0.147622),
        ("flow_sde", SD3, range(9), 0.177245),
        ("cps", FLUX, [0, 1, 2], 0.118441),
        ("flow_sde", MIX, range(4), 0.217854),
        ("flow_sde", MIX, range(10, 14), 0.201100),
        ("flow_sde", MIX, range(19, 23), 0.206434),
        ("ode", MIX, [], 0.197667),
    ]:
        level = 0.8 if name == "cps" else 0.7
        assert variances(name, sigma, level, steps=steps)[-1] == pytest.approx(last, abs=1.5e-6)


def test_variance_of_a_point_mass() -> None:
    """Data without spread: kernels that preserve their coefficients keep var = sigma^2; the others do not."""
    for name, level in [("ode", 0.0), ("cps", 0.8), ("ddim_flow", 1.0)]:
        got = variances(name, SD3, level, spread=0.0)
        assert got == pytest.approx(SD3.double().square().tolist(), abs=1e-12)
    flow = [1, 1.001410, 0.977543, 0.862190, 0.731980, 0.589760, 0.436134, 0.275809, 0.126827, 0.061926, 0.003824]
    dance = [1, 0.921995, 0.834548, 0.736248, 0.625685, 0.501844, 0.365171, 0.220506, 0.085770, 0.025551, 0.649840]
    assert variances("flow_sde", SD3, 0.7, spread=0.0) == pytest.approx(flow, abs=2e-6)
    assert variances("dance_sde", SD3, 0.3, spread=0.0) == pytest.approx(dance, rel=1e-5, abs=2e-6)


@pytest.mark.parametrize(
    ("name", "level", "errors"),
    [
        ("ode", 0.0, [-1.50e-3, -1.50e-4, -3.0e-5]),
        ("dance_sde", 0.3, [-1.14e-3, -1.14e-4, -2.3e-5]),
        ("flow_sde", math.sqrt(2), [1.03e-2, 1.00e-3, 2.0e-4]),
        ("ddim_flow", 1.0, [-2.59e-3, -2.61e-4, -5.2e-5]),
        ("flow_sde", 0.7, [9.99e-3, 2.62e-3, 1.12e-3]),
    ],
)
def test_convergence_of_the_marginal_at_half_noise(name: str, level: float, errors: list[float]) -> None:
    """Order 1 in the step, except Flow-SDE at level .7, whose singular start makes it about 1/2."""
    for count, wanted in zip((100, 1000, 5000), errors, strict=True):
        sigma = torch.linspace(1, 0, count + 1, dtype=torch.float64)
        half = sigma[: count // 2 + 1]
        target = 0.25 * SPREAD**2 + 0.25
        # The list is rounded to two or three digits.
        assert final_variance(name, half, level) - target == pytest.approx(wanted, rel=0.03)


def test_cps_does_not_converge_on_spread_data() -> None:
    sigma = torch.linspace(1, 0, 5001, dtype=torch.float64)
    assert final_variance("cps", sigma, 0.8) == pytest.approx(0.1631, abs=6e-5)


@pytest.mark.parametrize(("name", "level", "wanted"), UNIFORM_TABLE)
def test_monte_carlo_marginals_through_rollout(name: str, level: float, wanted: list[float]) -> None:
    shape = (2000, 100)
    steps = [] if name == "ode" else list(range(9 if name in ("cps", "ddim_flow") else 10))
    trajectory = rollout(
        velocity,
        counter_normal(shape, 0, "start"),
        uniform_schedule(10),
        replace(KERNELS[name], noise_level=level, sigma_max=0.9),
        noise_of(shape),
        stochastic=steps,
    )
    n = shape[0] * shape[1]
    states = [*trajectory.states.unbind(1), trajectory.final]
    for state, index in zip(states, [*trajectory.kept, 10], strict=True):
        variance = wanted[index]
        assert abs(float(state.mean()) - index / 10 * MEAN) < 4.5 * math.sqrt(variance / n)
        assert abs(float(state.var()) / variance - 1) < 4.5 * math.sqrt(2 / n)
