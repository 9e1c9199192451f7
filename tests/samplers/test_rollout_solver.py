"""Rollouts whose deterministic tail is of second order, and the recorded network outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gaussian_flow import MEAN, SPREAD, velocity
from torch import Tensor

from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, build_schedule, rollout
from flowrl.samplers.multistep import solve
from flowrl.samplers.windows import flash_tail
from flowrl.trajectory import Trajectory

SHAPE = (3, 4, 5)


def noise(step: int) -> Tensor:
    return counter_normal(SHAPE, 0, "step", step)


def run(
    schedule: Any, stochastic: tuple[int, ...], network: Callable[..., Tensor] = velocity, **options: Any
) -> Trajectory:
    kernel = replace(KERNELS["flow_sde"], sigma_max=schedule.sigma_max)
    return rollout(network, counter_normal(SHAPE, 1), schedule, kernel, noise, stochastic=stochastic, **options)


SCHEDULE = build_schedule({"shift": 3.0}, 12, grid="linspace")


def test_tail_changes_nothing_that_is_recorded() -> None:
    """The window and all before it are the same to the bit; the tail is the solver's, started at its first step."""
    asked: list[float] = []

    def spy(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        asked.append(float(sigma))
        return velocity(x, sigma, timestep)

    euler = run(SCHEDULE, (1, 2, 4), keep_means=True)
    second = run(SCHEDULE, (1, 2, 4), spy, solver="dpm2", keep_means=True)
    assert asked == SCHEDULE.sigma[:-1].tolist()
    assert second.kept == euler.kept
    assert torch.equal(second.states, euler.states)
    assert torch.equal(second.log_prob, euler.log_prob)
    assert second.mean is not None
    assert euler.mean is not None
    assert torch.equal(second.mean, euler.mean)
    wanted = solve(velocity, euler.states[:, -1], SCHEDULE, first=5)
    assert torch.equal(second.final, wanted)
    assert not torch.equal(second.final, euler.final)


def test_without_stochastic_steps_the_solver_has_the_whole_path() -> None:
    """A first step from exactly 1 tells the second one nothing; one from a little below, as UniPC has, does."""
    for schedule in (SCHEDULE, build_schedule({"flow_shift": 3.0}, 12, grid="unipc_flow")):
        wanted = solve(velocity, counter_normal(SHAPE, 1), schedule)
        assert torch.equal(run(schedule, (), solver="dpm2").final, wanted)


def test_tail_is_closer_to_the_exact_flow() -> None:
    """From the window's end the exact flow scales the deviation by the ratio of the marginals' spreads."""
    schedule = build_schedule({"shift": 3.0}, 40, grid="linspace")
    euler, second = (run(schedule, (0, 1), solver=solver) for solver in ("euler", "dpm2"))
    s = float(schedule.sigma[2])
    spread = ((1 - s) ** 2 * SPREAD**2 + s**2) ** 0.5
    exact = MEAN + SPREAD / spread * (euler.states[:, -1] - (1 - s) * MEAN)
    errors = [float((part.final - exact).abs().max()) for part in (euler, second)]
    assert errors[1] < 0.35 * errors[0]


def test_without_stochastic_steps_the_whole_run_is_of_second_order() -> None:
    got = run(SCHEDULE, (), solver="dpm2")
    assert got.states.shape == (3, 0, 4, 5)
    assert torch.equal(got.final, solve(velocity, counter_normal(SHAPE, 1), SCHEDULE))


def test_a_window_up_to_the_end_leaves_no_tail() -> None:
    for stochastic in ((10, 11), tuple(range(12))):
        assert torch.equal(run(SCHEDULE, stochastic, solver="dpm2").final, run(SCHEDULE, stochastic).final)


def test_flash_schedule_with_second_order_tail() -> None:
    """Eleven network evaluations in place of 25, and the window the same to the bit."""
    full = build_schedule({"shift": 3.0}, 25, grid="linspace")
    calls: list[float] = []

    def spy(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        calls.append(float(timestep))
        return velocity(x, sigma, timestep)

    flash = run(flash_tail(25, 3, 0.4, shift=3.0), (0, 1, 2, 3), spy, solver="dpm2")
    assert len(calls) == 11
    whole = run(full, (0, 1, 2, 3))
    assert torch.equal(flash.states, whole.states)
    assert torch.equal(flash.log_prob, whole.log_prob)


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_recorded_velocity_is_the_network_output_at_the_source(solver: str) -> None:
    part = run(SCHEDULE, (1, 2, 4), keep_velocity=True, solver=solver)
    assert part.velocity is not None
    assert part.velocity.shape == (3, 3, 4, 5)
    for column, step in enumerate(part.steps):
        x = part.states[:, part.kept.index(step)]
        assert torch.equal(part.velocity[:, column], velocity(x, SCHEDULE.sigma[step], x))
    assert run(SCHEDULE, (1, 2, 4)).velocity is None
    empty = run(SCHEDULE, (), keep_velocity=True).velocity
    assert empty is not None
    assert empty.shape == (3, 0, 4, 5)


def test_rollout_and_trajectory_refuse() -> None:
    with pytest.raises(ValueError, match="euler or dpm2"):
        run(SCHEDULE, (1,), solver="dpm3")
    part = run(SCHEDULE, (1, 2), keep_velocity=True)
    with pytest.raises(ValueError, match="velocity"):
        Trajectory(
            states=part.states,
            kept=part.kept,
            steps=part.steps,
            log_prob=part.log_prob,
            final=part.final,
            velocity=torch.zeros(3, 1, 4, 5),
        )
