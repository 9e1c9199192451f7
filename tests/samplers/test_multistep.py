"""DPM-Solver++(2M) against worked numbers, quadrature, and the exact flow of Gaussian data."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gaussian_flow import MEAN, SPREAD, uniform_schedule, velocity
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import build_schedule, ode_rollout
from flowrl.samplers.multistep import dpm_step, solve
from flowrl.samplers.parametrization import clean_from_velocity

ONE = torch.ones(1, 1, dtype=torch.float64)


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
    ("cleans", "sigma", "wanted"),
    [
        ([0.2], [0.6, 0.5], 0.866667),  # order 1 with m = .2
        ([0.5], [0.6, 0.5], 0.916667),
        ([0.2, 0.5], [0.7, 0.6, 0.5], 0.939609),
    ],
)
def test_worked_scalar(cleans: list[float], sigma: list[float], wanted: float) -> None:
    assert float(dpm_step(ONE, [m * ONE for m in cleans], sigma)) == pytest.approx(wanted, abs=6e-7)


@pytest.mark.parametrize("sigma", [[1.0, 0.9], [0.8, 0.7], [0.3, 0.0], [1.0, 0.0]])
def test_order_one_is_euler_at_both_ends_too(sigma: list[float]) -> None:
    x, v = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = dpm_step(x, [clean_from_velocity(x, v, sigma[0])], sigma)
    torch.testing.assert_close(got, x + (sigma[1] - sigma[0]) * v, rtol=0, atol=1e-14)


LEVELS = st.lists(st.floats(0.02, 0.98), min_size=3, max_size=3, unique=True).filter(
    lambda values: min(abs(a - b) for i, a in enumerate(values) for b in values[:i]) > 0.02
)


@settings(max_examples=30, deadline=None)
@given(levels=LEVELS, clean=st.floats(-2, 2))
def test_equal_predictions_are_the_exact_step(levels: list[float], clean: float) -> None:
    sigma = sorted(levels, reverse=True)
    wanted = quadrature(1.3, sigma[1], sigma[2], lambda value: clean)
    for used in (1, 2):
        got = float(dpm_step(1.3 * ONE, [clean * ONE] * used, sigma[2 - used :]))
        assert got == pytest.approx(wanted, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("order", [1, 2])
def test_local_order(order: int) -> None:
    """Error of one step with exact history: h^(n+1), so halving the step divides it by 2^(n+1)."""

    def error(h: float) -> float:
        lambdas = [0.3 + i * h for i in range(1 - order, 2)]
        sigma = [1 / (1 + math.exp(value)) for value in lambdas]
        cleans = [math.sin(2 * value) * ONE for value in lambdas[:-1]]
        wanted = quadrature(0.7, sigma[-2], sigma[-1], lambda value: math.sin(2 * value))
        return abs(float(dpm_step(0.7 * ONE, cleans, sigma)) - wanted)

    assert math.log2(error(0.02) / error(0.01)) == pytest.approx(order + 1, abs=0.1)


def test_limits_at_the_ends_of_the_path() -> None:
    x, m = 0.4 * ONE, [-0.3 * ONE, 0.5 * ONE]
    euler = dpm_step(x, m[1:], [0.8, 0.7])
    # A prediction made at sigma 1 lies infinitely far away: it has no weight.
    torch.testing.assert_close(dpm_step(x, m, [1.0, 0.8, 0.7]), euler, rtol=0, atol=1e-14)
    near = dpm_step(x, m, [1 - 1e-12, 0.8, 0.7])
    torch.testing.assert_close(near, euler, rtol=0, atol=0.05)  # approached as 1 / log
    for used in (1, 2):
        assert torch.equal(dpm_step(x, m[-used:], [0.8, 0.7, 0.0][-used - 1 :]), m[1])


def test_second_order_converges_faster_than_euler() -> None:
    """Largest distance of the finished latents from the exact flow, which scales deviations to the data's spread."""
    x = counter_normal((1, 50), 3).double()

    def error(num_steps: int, solver: str) -> float:
        got = ode_rollout(velocity, x, uniform_schedule(num_steps), solver=solver)  # type: ignore[arg-type]
        return float((got - (MEAN + SPREAD * x)).abs().max())

    first, second = ({n: error(n, solver) for n in (10, 20, 50, 100, 200)} for solver in ("euler", "dpm2"))
    assert first[100] / first[200] == pytest.approx(2, rel=0.03)
    assert second[100] / second[200] > 3.3
    assert all(second[n] < 0.6 * first[n] for n in first)
    assert second[200] < 0.05 * first[200]


def test_solve_from_a_later_step() -> None:
    schedule, asked = uniform_schedule(6), list[tuple[float, float]]()

    def spy(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        asked.append((float(sigma), float(timestep)))
        return velocity(x, sigma, timestep)

    x = counter_normal((1, 4), 5)
    got = solve(spy, x, schedule, first=3)
    assert asked == [(float(schedule.sigma[i]), float(schedule.timestep[i])) for i in (3, 4, 5)]
    # Three steps by hand: Euler, second order from the levels 3 and 4, Euler.
    s = schedule.sigma.tolist()
    cleans = [clean_from_velocity(x, velocity(x, schedule.sigma[3], x), s[3])]
    y = dpm_step(x, cleans, s[3:5])
    cleans.append(clean_from_velocity(y, velocity(y, schedule.sigma[4], y), s[4]))
    y = dpm_step(y, cleans, s[3:6])
    torch.testing.assert_close(got, clean_from_velocity(y, velocity(y, schedule.sigma[5], y), s[5]), rtol=0, atol=1e-6)
    assert torch.equal(solve(spy, x, schedule, first=6), x)


def test_coefficients_are_found_in_float64() -> None:
    """A float32 run differs from the float64 one by float32 rounding only, also on the tiny last steps of SD 3."""
    schedule = build_schedule({"shift": 3.0}, 40)
    x = counter_normal((4, 16), 6)
    low, high = solve(velocity, x, schedule), solve(velocity, x.double(), schedule)
    torch.testing.assert_close(low.double(), high, rtol=0, atol=2e-5)


def test_gradient_flows_through_a_step() -> None:
    x, m_1, m_0 = (counter_normal((2, 3), 7, i).double().requires_grad_() for i in range(3))
    assert torch.autograd.gradcheck(lambda *t: dpm_step(t[0], t[1:], [0.7, 0.6, 0.5]), (x, m_1, m_0))


def test_steps_and_solver_refuse() -> None:
    for cleans, sigma in [
        ([], [0.5]),
        ([ONE] * 3, [0.9, 0.8, 0.7, 0.6]),
        ([ONE], [0.5]),
        ([ONE], [0.7, 0.6, 0.5]),
    ]:
        with pytest.raises(ValueError, match="1 or 2 predictions"):
            dpm_step(ONE, cleans, sigma)
    for sigma in ([0.6, 0.7], [0.6, 0.6], [1.1, 0.6], [0.6, -0.1], [math.nan, 0.1]):
        with pytest.raises(ValueError, match="decrease strictly"):
            dpm_step(ONE, [ONE], sigma)
    with pytest.raises(ValueError, match="shape of x"):
        dpm_step(ONE, [torch.ones(1, 2)], [0.6, 0.5])
    for first in (-1, 5):
        with pytest.raises(ValueError, match=r"0 \.\. 4"):
            solve(velocity, ONE, uniform_schedule(4), first=first)
    with pytest.raises(ValueError, match="shape of x"):
        solve(lambda x, sigma, timestep: torch.ones(1, 2), ONE, uniform_schedule(4))
