"""DPM-Solver++ against worked numbers, quadrature, and the exact flow of Gaussian data."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.randomness import counter_normal
from flowrl.samplers import (
    KERNELS,
    build_schedule,
    clean_from_velocity,
    diffusers_sigmas,
    dpm_sde_step,
    dpm_step,
    solve,
    solver_order,
)
from flowrl.trajectory import Schedule

MEAN, SPREAD = 1.5, 0.5  # of Gaussian data
ONE = torch.ones(1, 1, dtype=torch.float64)


def velocity(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
    """E[noise - clean | x] for data N(MEAN, SPREAD^2)."""
    variance = (1 - sigma) ** 2 * SPREAD**2 + sigma**2
    return -MEAN + (sigma - (1 - sigma) * SPREAD**2) / variance * (x - (1 - sigma) * MEAN)


def uniform_schedule(num_steps: int) -> Schedule:
    return build_schedule({"shift": 1.0}, num_steps, grid="linspace")


def log_snr(sigma: float) -> float:
    return math.log((1 - sigma) / sigma)


def quadrature(x: float, sigma: float, sigma_next: float, clean: Callable[[float], float]) -> float:
    """The exact step for a given clean(lambda), by Gauss-Legendre integration."""
    start, h = log_snr(sigma), log_snr(sigma_next) - log_snr(sigma)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    u = (nodes + 1) * h / 2
    values = np.exp(u - h) * np.array([clean(start + step) for step in u])
    return sigma_next / sigma * x + (1 - sigma_next) * float((values * weights).sum()) * h / 2


@pytest.mark.parametrize(
    ("cleans", "sigma", "variant", "wanted"),
    [
        ([0.2], [0.6, 0.5], "midpoint", 0.866667),  # order 1 with m = .2
        ([0.5], [0.6, 0.5], "midpoint", 0.916667),
        ([0.2, 0.5], [0.7, 0.6, 0.5], "midpoint", 0.939609),
        ([0.2, 0.5], [0.7, 0.6, 0.5], "heun", 0.941155),
    ],
)
def test_worked_scalar(cleans: list[float], sigma: list[float], variant: Any, wanted: float) -> None:
    got = dpm_step(ONE, [m * ONE for m in cleans], sigma, variant=variant)
    assert float(got) == pytest.approx(wanted, abs=6e-7)


def test_equal_predictions_are_the_euler_step() -> None:
    x, c = 1.1 * ONE, 0.37 * ONE
    for cleans, sigma in [([c], [0.5, 0.3]), ([c, c], [0.7, 0.5, 0.3]), ([c, c, c], [0.9, 0.7, 0.5, 0.3])]:
        for variant in ("midpoint", "heun"):
            assert float(dpm_step(x, cleans, sigma, variant=variant)) == pytest.approx(0.808, abs=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("sigma", [[1.0, 0.9], [0.8, 0.7], [0.3, 0.0], [1.0, 0.0]])
def test_order_one_is_euler_at_both_ends_too(sigma: list[float]) -> None:
    x, v = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = dpm_step(x, [clean_from_velocity(x, v, sigma[0])], sigma)
    torch.testing.assert_close(got, x + (sigma[1] - sigma[0]) * v, rtol=0, atol=1e-14)


LEVELS = st.lists(st.floats(0.02, 0.98), min_size=4, max_size=4, unique=True).filter(
    lambda values: min(abs(a - b) for i, a in enumerate(values) for b in values[:i]) > 0.02
)


@settings(max_examples=30, deadline=None)
@given(levels=LEVELS, data=st.data())
def test_exact_for_polynomial_predictions(levels: list[float], data: st.DataObject) -> None:
    """Order n is exact where clean is a polynomial of degree n - 1 in lambda; midpoint only for constants."""
    sigma = sorted(levels, reverse=True)
    for order in (1, 2, 3):
        coefficients = [data.draw(st.floats(-2, 2)) for _ in range(order)]

        def clean(value: float, c: list[float] = coefficients) -> float:
            return sum(factor * value**power for power, factor in enumerate(c))

        used = sigma[3 - order :]
        cleans = [clean(log_snr(s)) * ONE for s in used[:-1]]
        got = dpm_step(1.3 * ONE, cleans, used, variant="heun")
        wanted = quadrature(1.3, used[-2], used[-1], clean)
        # Third differences of close levels amplify rounding.
        assert float(got) == pytest.approx(wanted, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize(
    ("order", "variant", "rate"), [(1, "heun", 2), (2, "heun", 3), (2, "midpoint", 3), (3, "heun", 4)]
)
def test_local_order(order: int, variant: Any, rate: int) -> None:
    """Error of one step with exact history: h^(n+1), so halving the step divides it by 2^(n+1)."""

    def error(h: float) -> float:
        lambdas = [0.3 + i * h for i in range(1 - order, 2)]
        sigma = [1 / (1 + math.exp(value)) for value in lambdas]
        cleans = [math.sin(2 * value) * ONE for value in lambdas[:-1]]
        wanted = quadrature(0.7, sigma[-2], sigma[-1], lambda value: math.sin(2 * value))
        return abs(float(dpm_step(0.7 * ONE, cleans, sigma, variant=variant)) - wanted)

    assert math.log2(error(0.02) / error(0.01)) == pytest.approx(rate, abs=0.1)


def test_limits_at_the_ends_of_the_path() -> None:
    x, m = 0.4 * ONE, [0.9 * ONE, -0.3 * ONE, 0.5 * ONE]
    euler = dpm_step(x, m[2:], [0.8, 0.7])
    for variant in ("midpoint", "heun"):
        # A prediction made at sigma 1 lies infinitely far away: it has no weight.
        torch.testing.assert_close(dpm_step(x, m[1:], [1.0, 0.8, 0.7], variant=variant), euler, rtol=0, atol=1e-14)  # type: ignore[arg-type]
    linear = dpm_step(x, m[1:], [0.9, 0.8, 0.7], variant="heun")
    torch.testing.assert_close(dpm_step(x, m, [1.0, 0.9, 0.8, 0.7]), linear, rtol=0, atol=1e-14)
    near = dpm_step(x, m, [1 - 1e-12, 0.9, 0.8, 0.7])
    torch.testing.assert_close(near, linear, rtol=0, atol=0.05)  # approached as 1 / log
    for used in (1, 2, 3):
        torch.testing.assert_close(dpm_step(x, m[-used:], [0.9, 0.8, 0.7, 0.0][-used - 1 :]), m[2], rtol=0, atol=0)


def test_solver_orders() -> None:
    def orders(num_steps: int, order: int, first: int = 0) -> list[int]:
        return [solver_order(step, num_steps, order, first) for step in range(first, num_steps)]

    assert orders(10, 1) == [1] * 10
    assert orders(10, 2) == [1, *[2] * 8, 1]
    assert orders(10, 3) == [1, 2, *[3] * 6, 2, 1]
    assert orders(14, 3)[-3:] == [3, 2, 1]
    assert orders(15, 3)[-3:] == [3, 3, 1]
    assert orders(10, 3, first=6) == [1, 2, 2, 1]
    assert orders(10, 2, first=8) == [1, 1]
    assert orders(1, 3) == [1]


@cache
def final_error(num_steps: int, order: int, variant: Any = "midpoint") -> float:
    """Largest distance of the finished latents from the exact flow, which scales deviations to the data's spread."""
    x = counter_normal((1, 50), 3).double()
    got = solve(velocity, x, uniform_schedule(num_steps), order=order, variant=variant)
    return float((got - (MEAN + SPREAD * x)).abs().max())


def test_second_order_converges_faster_than_euler() -> None:
    assert final_error(100, 1) / final_error(200, 1) == pytest.approx(2, rel=0.03)
    for variant in ("midpoint", "heun"):
        assert final_error(100, 2, variant) / final_error(200, 2, variant) > 3.3
        for num_steps in (10, 20, 50):
            assert final_error(num_steps, 2, variant) < 0.6 * final_error(num_steps, 1)
    assert final_error(200, 2) < 0.05 * final_error(200, 1)


def test_order_one_solve_is_euler() -> None:
    schedule = build_schedule({"shift": 3.0}, 10)
    x = counter_normal((2, 7), 4).double()
    wanted = x
    for step in range(10):
        s, s_next = schedule.sigma[step], schedule.sigma[step + 1]
        wanted = wanted + (s_next.double() - s.double()) * velocity(wanted, s, s)
    torch.testing.assert_close(solve(velocity, x, schedule, order=1), wanted, rtol=0, atol=1e-12)


def test_solve_from_a_later_step() -> None:
    schedule, asked, done = uniform_schedule(6), list[tuple[float, float]](), list[int]()

    def spy(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        asked.append((float(sigma), float(timestep)))
        return velocity(x, sigma, timestep)

    x = counter_normal((1, 4), 5)
    got = solve(spy, x, schedule, first=3, progress=done.append)
    assert asked == [(float(schedule.sigma[i]), float(schedule.timestep[i])) for i in (3, 4, 5)]
    assert done == [3, 4, 5]
    # Three steps by hand: Euler, second order from the levels 3 and 4, Euler.
    s = schedule.sigma.tolist()
    cleans = [clean_from_velocity(x, velocity(x, schedule.sigma[3], x), s[3])]
    y = dpm_step(x, cleans, s[3:5])
    cleans.append(clean_from_velocity(y, velocity(y, schedule.sigma[4], y), s[4]))
    y = dpm_step(y, cleans, s[3:6])
    torch.testing.assert_close(got, clean_from_velocity(y, velocity(y, schedule.sigma[5], y), s[5]), rtol=0, atol=1e-6)
    assert torch.equal(solve(spy, x, schedule, first=6), x)
    low = solve(velocity, x, schedule, storage_dtype=torch.bfloat16)
    assert low.dtype == torch.float32
    assert torch.equal(low.bfloat16().float(), low)


def test_coefficients_are_found_in_float64() -> None:
    """A float32 run differs from the float64 one by float32 rounding only, also on the tiny last steps of SD 3."""
    schedule = build_schedule({"shift": 3.0}, 40)
    x = counter_normal((4, 16), 6)
    for order in (2, 3):
        low, high = solve(velocity, x, schedule, order=order), solve(velocity, x.double(), schedule, order=order)
        torch.testing.assert_close(low.double(), high, rtol=0, atol=2e-5)


def test_stochastic_step_of_order_one_is_the_kernel() -> None:
    x, v = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for sigma, sigma_next in [(1.0, 0.9), (0.8, 0.7), (0.3, 0.0)]:
        got = dpm_sde_step(x, [clean_from_velocity(x, v, sigma)], [sigma, sigma_next])
        wanted = KERNELS["dpm_sde"](x, v, sigma, sigma_next)
        torch.testing.assert_close(got.mean, wanted.mean, rtol=0, atol=1e-13)
        assert float(got.std) == pytest.approx(float(wanted.std), abs=1e-15)


def test_stochastic_second_order_by_hand() -> None:
    x, m_1, m_0 = 1.0, 0.2, 0.5
    h, h_previous = log_snr(0.5) - log_snr(0.6), log_snr(0.6) - log_snr(0.7)
    d1 = (m_0 - m_1) / (h_previous / h)
    assert h == pytest.approx(0.405465, abs=6e-7)
    assert d1 == pytest.approx(0.275307, abs=6e-7)
    decay = math.exp(-2 * h)
    mean = 0.5 / 0.6 * math.exp(-h) * x + 0.5 * (1 - decay) * m_0 + 0.25 * (1 - decay) * d1
    step = dpm_sde_step(x * ONE, [m_1 * ONE, m_0 * ONE], [0.7, 0.6, 0.5])
    assert float(step.mean) == pytest.approx(mean, abs=1e-12)
    assert float(step.std) == pytest.approx(0.5 * math.sqrt(1 - decay), abs=1e-12)
    # History from sigma 1 has no weight, and the step to 0 is the newest prediction without noise.
    cold = dpm_sde_step(x * ONE, [m_1 * ONE, m_0 * ONE], [1.0, 0.6, 0.5])
    assert float(cold.mean) == pytest.approx(float(dpm_sde_step(x * ONE, [m_0 * ONE], [0.6, 0.5]).mean), abs=1e-14)
    end = dpm_sde_step(x * ONE, [m_1 * ONE, m_0 * ONE], [0.7, 0.6, 0.0])
    assert (float(end.mean), float(end.std)) == (0.5, 0.0)


def test_stochastic_second_order_keeps_the_marginal() -> None:
    """Variance on Gaussian data, every latent written in independent unit normals: order 2 is much closer than 1."""

    def variance(order: int) -> float:
        sigma = torch.linspace(0.98, 0.3, 41, dtype=torch.float64).tolist()
        # Deviations from the mean path are linear: the latent as a row of weights of independent unit normals.
        x = torch.zeros(1, 41, dtype=torch.float64)
        x[0, 0] = math.sqrt(0.02**2 * SPREAD**2 + 0.98**2)
        cleans: list[Tensor] = []
        for step in range(40):
            s = sigma[step]
            cleans.append((1 - s) * SPREAD**2 / ((1 - s) ** 2 * SPREAD**2 + s**2) * x)
            used = min(order, len(cleans))
            transition = dpm_sde_step(x, cleans[-used:], sigma[step + 1 - used : step + 2])
            x = transition.mean.clone()
            x[0, step + 1] += transition.std
        return float(x.square().sum())

    target = 0.7**2 * SPREAD**2 + 0.3**2
    assert abs(variance(2) - target) < 0.25 * abs(variance(1) - target)


def test_gradient_flows_through_a_step() -> None:
    x, m_1, m_0 = (counter_normal((2, 3), 7, i).double().requires_grad_() for i in range(3))
    assert torch.autograd.gradcheck(lambda *t: dpm_step(t[0], t[1:], [0.7, 0.6, 0.5]), (x, m_1, m_0))
    assert torch.autograd.gradcheck(lambda *t: dpm_sde_step(t[0], t[1:], [0.7, 0.6, 0.5]).mean, (x, m_1, m_0))


def test_steps_refuse() -> None:
    for cleans, sigma in [
        ([], [0.5]),
        ([ONE] * 4, [0.9, 0.8, 0.7, 0.6, 0.5]),
        ([ONE], [0.5]),
        ([ONE], [0.7, 0.6, 0.5]),
    ]:
        with pytest.raises(ValueError, match="1 to 3 predictions"):
            dpm_step(ONE, cleans, sigma)
    with pytest.raises(ValueError, match="1 to 2 predictions"):
        dpm_sde_step(ONE, [ONE] * 3, [0.9, 0.8, 0.7, 0.6])
    for sigma in ([0.6, 0.7], [0.6, 0.6], [1.1, 0.6], [0.6, -0.1], [math.nan, 0.1]):
        with pytest.raises(ValueError, match="decrease strictly"):
            dpm_step(ONE, [ONE], sigma)
    with pytest.raises(ValueError, match="shape of x"):
        dpm_step(ONE, [torch.ones(1, 2)], [0.6, 0.5])
    with pytest.raises(ValueError, match="midpoint or heun"):
        dpm_step(ONE, [ONE], [0.6, 0.5], variant="ralston")  # type: ignore[arg-type]


def test_solver_refuses() -> None:
    schedule = Schedule(sigma=diffusers_sigmas(4, 3.0), timestep=diffusers_sigmas(4, 3.0)[:-1])
    for order in (0, 4):
        with pytest.raises(ValueError, match="order 1, 2 or 3"):
            solve(velocity, ONE, schedule, order=order)
    for first in (-1, 5):
        with pytest.raises(ValueError, match=r"0 \.\. 4"):
            solve(velocity, ONE, schedule, first=first)
    for step, first in [(4, 0), (1, 2), (-1, 0)]:
        with pytest.raises(ValueError, match="step must lie"):
            solver_order(step, 4, 2, first)
    with pytest.raises(ValueError, match="shape of x"):
        solve(lambda x, sigma, timestep: torch.ones(1, 2), ONE, schedule)
