"""Rollouts: what is recorded, precision, and agreement with a replay."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from gaussian_flow import MEAN, SPREAD, exact_velocity, noise_of, uniform_schedule, velocity
from torch import Tensor

from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, build_schedule, gaussian_log_prob, rollout
from flowrl.samplers.completion import sample_trajectories
from flowrl.trajectory import Trajectory


def test_expected_log_prob_and_ratio_under_the_policy() -> None:
    """Summed: E[log p] = D (-log std - log(2 pi)/2 - 1/2), and the ratio to any other policy has expectation 1."""
    b, d = 40000, 4
    x = counter_normal((b, d), 1, "start")
    step = KERNELS["flow_sde"](x, exact_velocity(x, torch.tensor(0.5)), 0.5, 0.4)
    x_next = step.mean + step.std * counter_normal((b, d), 2, "step")
    log_prob = gaussian_log_prob(x_next, step)
    entropy = d * (-math.log(float(step.std)) - 0.5 * math.log(2 * math.pi) - 0.5)
    assert abs(float(log_prob.mean()) - entropy) < 4 * math.sqrt(d / 2 / b)
    other = KERNELS["flow_sde"](x, exact_velocity(x, torch.tensor(0.5)) + 0.3, 0.5, 0.4)
    ratio = (gaussian_log_prob(x_next, other) - log_prob).exp()
    assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / math.sqrt(b)


def test_ode_rollout_is_euler_and_first_order() -> None:
    x = counter_normal((1, 50), 3).double()  # one sample; the exact flow scales deviations to the data's spread
    exact = MEAN + SPREAD * x

    def error(num_steps: int) -> float:
        trajectory = rollout(
            velocity,
            x,
            uniform_schedule(num_steps),
            KERNELS["ode"],
            noise_of((1, 50)),
            stochastic=[],
        )
        assert trajectory.states.shape == (1, 0, 50)
        assert trajectory.log_prob.shape == (1, 0)
        return float((trajectory.final - exact).abs().max())

    assert error(100) / error(200) == pytest.approx(2, rel=0.02)
    assert error(200) / error(400) == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "cps", "cps published", "ddim_flow"])
def test_ratio_is_one_for_every_network_dtype(name: str, low: torch.dtype) -> None:
    """A replay of the stored states gives the recorded log-probabilities to the bit, step by step and row by row."""
    shape = (5, 4, 8, 8)
    schedule = build_schedule({"shift": 3.0}, 10)
    kernel = replace(KERNELS[name.split()[0]], sigma_max=schedule.sigma_max)
    if "published" in name:
        assert kernel.published_log_prob is not None
        kernel = replace(kernel, log_prob=kernel.published_log_prob)

    def rounded(x: Tensor, sigma: Tensor) -> Tensor:
        return exact_velocity(x, sigma).to(low)

    trajectory = rollout(
        lambda x, sigma, timestep: rounded(x, sigma),
        counter_normal(shape, 4),
        schedule,
        kernel,
        noise_of(shape),
        stochastic=(6, 1, 2),
        keep_means=True,
    )
    assert trajectory.steps == (1, 2, 6)
    assert trajectory.kept == (1, 2, 3, 6, 7)
    assert trajectory.states.dtype == torch.float32
    assert trajectory.mean is not None
    for column, step in enumerate(trajectory.steps):
        x, x_next = (trajectory.states[:, trajectory.kept.index(state)] for state in (step, step + 1))
        sigma, sigma_next = schedule.sigma[step], schedule.sigma[step + 1]
        new = kernel(x, rounded(x, sigma), sigma, sigma_next)
        assert torch.equal(kernel.log_prob(x_next, new), trajectory.log_prob[:, column])
        assert torch.equal(new.mean, trajectory.mean[:, column])
    # The same through the row table, one sigma per row.
    rows = sample_trajectories(trajectory, torch.zeros(5, dtype=torch.long), None)
    pool = rows.states
    x, x_next = pool[rows.source], pool[rows.produced]
    sigma, sigma_next = schedule.sigma[rows.step], schedule.sigma[rows.step + 1]
    new = kernel(x, rounded(x, sigma.reshape(-1, 1, 1, 1)), sigma, sigma_next)
    assert torch.equal(kernel.log_prob(x_next, new), rows.log_prob)


def test_rollout_does_not_depend_on_who_else_is_in_the_batch() -> None:
    schedule = uniform_schedule(4)
    start, xi = counter_normal((6, 3, 2), 5), [counter_normal((6, 3, 2), 6, step) for step in range(4)]
    run = partial(rollout, velocity, schedule=schedule, kernel=KERNELS["dance_sde"], stochastic=(0, 1, 2))
    whole = run(start, noise=lambda step: xi[step])

    def part(rows: slice) -> Trajectory:
        return run(start[rows], noise=lambda step: xi[step][rows])

    parts = [part(slice(i, i + 2)) for i in (0, 2, 4)]
    for name in ("states", "final", "log_prob"):
        assert torch.equal(torch.cat([getattr(one, name) for one in parts]), getattr(whole, name))


def test_one_step_one_image_rollout() -> None:
    seen: list[tuple[float, float]] = []

    def spy(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        seen.append((float(sigma), float(timestep)))
        assert sigma.ndim == timestep.ndim == 0
        return velocity(x, sigma, timestep)

    schedule = uniform_schedule(1)
    x = counter_normal((1, 2, 2), 7).bfloat16()
    trajectory = rollout(
        spy,
        x,
        schedule,
        replace(KERNELS["flow_sde"], noise_level=0.7, sigma_max=schedule.sigma_max),
        noise_of((1, 2, 2)),
        stochastic=[0],
    )
    assert seen == [(1.0, 1000.0)]
    assert trajectory.kept == (0, 1)
    assert torch.equal(trajectory.states[:, 0], x.float())
    assert torch.equal(trajectory.states[:, 1], trajectory.final)
    clean = x.float() - velocity(x.float(), torch.tensor(1.0), torch.tensor(1000.0))
    wanted = clean - 0.7**2 / 2 * x.float() + 0.7 * counter_normal((1, 2, 2), 0, "step", 0)
    torch.testing.assert_close(trajectory.final, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["cps", "ddim_flow"])
def test_rollouts_refuse_steps_without_noise_and_noise_that_does_not_fit(name: str) -> None:
    run = partial(rollout, velocity, torch.zeros(2, 3), uniform_schedule(4), KERNELS[name], noise_of((2, 3)))
    with pytest.raises(ValueError, match="std 0 is deterministic"):
        run(stochastic=(2, 3))
    for bad in [(4,), (-1,), (1, 1)]:
        with pytest.raises(ValueError, match=r"0 \.\. 3"):
            run(stochastic=bad)
    with pytest.raises(ValueError, match=r"step noise .* \(2, 3\), got \(1, 3\)"):
        rollout(velocity, torch.zeros(2, 3), uniform_schedule(4), KERNELS[name], noise_of((1, 3)), stochastic=[0])


def test_noise_is_drawn_after_the_network_was_asked_and_for_stochastic_steps_only() -> None:
    """A GPU computes the velocity while the host draws, so that nobody waits for noise."""
    said: list[str] = []

    def network(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        said.append("network")
        return velocity(x, sigma, timestep)

    def noise(step: int) -> Tensor:
        said.append(f"noise {step}")
        return counter_normal((2, 50), step)

    x = counter_normal((2, 50), "start")
    rollout(network, x, uniform_schedule(4), KERNELS["flow_sde"], noise, stochastic=[1, 2])
    assert said == ["network", "network", "noise 1", "network", "noise 2", "network"]
