"""Completions against one-by-one integration on Gaussian data, and the flat table of a rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, Velocity, build_schedule, rollout
from flowrl.samplers.completion import complete, sample_trajectories
from flowrl.trajectory import Schedule, Trajectory

B, T = 3, 6
SPREAD = 0.5
CENTRE = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)  # the data of each sample's prompt
SCHEDULE = build_schedule({"shift": 3.0}, T)
SIGMA, TIMESTEP = SCHEDULE.sigma.double().numpy(), SCHEDULE.timestep.double().numpy()
STEPS = [(0, 1, 2, 3, 4), (1, 4), (5,), (0, 2, 3)]


def exact(x: Tensor, sigma: Tensor, centre: Tensor) -> Tensor:
    """E[noise - clean | x] for data N(centre, SPREAD^2), one sigma and centre a row."""
    s, m = sigma.to(x.dtype).reshape(-1, 1, 1), centre.to(x.dtype).reshape(-1, 1, 1)
    return -m + (s - (1 - s) * SPREAD**2) / ((1 - s) ** 2 * SPREAD**2 + s**2) * (x - (1 - s) * m)


class Network:
    """The exact velocity, which notes every call."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.fed: list[tuple[float, float]] = []

    def __call__(self, index: Tensor) -> Velocity:
        def velocity(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
            self.rows.append(len(x))
            self.fed += zip(sigma.tolist(), timestep.tolist(), strict=True)
            return exact(x, sigma, CENTRE[index])

        return velocity


def noisy(steps: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Trajectory:
    """A rollout with its velocities."""
    return rollout(
        lambda x, sigma, timestep: exact(x, sigma, CENTRE),
        counter_normal((B, 2, 4), "start").to(dtype),
        SCHEDULE,
        replace(KERNELS["dance_sde"], noise_level=0.6),
        lambda step: counter_normal((B, 2, 4), "step", step),
        stochastic=steps,
        keep_velocity=True,
        keep_means=True,
    )


def one_by_one(trajectory: Trajectory, grid_of: Callable[[int], list[float]]) -> np.ndarray:
    """Euler by hand, one completion after the other, along the sigmas that `grid_of(step)` names."""
    result = []
    for i in range(len(trajectory)):
        row = []
        for step in trajectory.steps:
            x = trajectory.states[i : i + 1, trajectory.kept.index(step)]
            grid = grid_of(step)
            for s, s_next in pairwise(grid):
                x = x - (s - s_next) * exact(x, torch.tensor([s]), CENTRE[i : i + 1])
            row.append(x[0].numpy())
        result.append(np.stack(row))
    return np.stack(result)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("batch_size", [2, 100])
def test_full_completions_against_integration_one_by_one(steps: tuple[int, ...], batch_size: int) -> None:
    trajectory, network = noisy(steps), Network()
    got = complete(network, trajectory, SCHEDULE, mode="full", batch_size=batch_size)[:, :-1]
    np.testing.assert_allclose(got, one_by_one(trajectory, lambda step: SIGMA[step:].tolist()), rtol=0, atol=1e-10)
    assert sum(network.rows) == B * sum(T - step - 1 for step in steps)
    assert max(network.rows, default=0) <= batch_size
    assert set(network.fed) <= set(zip(SIGMA.tolist(), TIMESTEP.tolist(), strict=False))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_even_substeps_against_integration_one_by_one(steps: tuple[int, ...], count: int) -> None:
    trajectory, network = noisy(steps), Network()
    got = complete(network, trajectory, SCHEDULE, mode=count, batch_size=4)[:, :-1]
    # The grid is float32, like every schedule: hence 1e-6.
    wanted = one_by_one(trajectory, lambda step: np.linspace(SIGMA[step], 0, count + 1).tolist())
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
    assert sum(network.rows) == B * len(steps) * (count - 1)
    slope = {step: TIMESTEP[step] / SIGMA[step] for step in steps}
    for sigma, timestep in network.fed:
        assert any(timestep == pytest.approx(sigma * factor, rel=1e-6) for factor in slope.values())


def test_clean_is_the_one_step_estimate_without_evaluation() -> None:
    trajectory, network = noisy((0, 2, 3)), Network()
    got = complete(network, trajectory, SCHEDULE, mode="clean", batch_size=1)[:, :-1]
    assert trajectory.velocity is not None
    x = trajectory.states[:, [trajectory.kept.index(step) for step in (0, 2, 3)]]
    sigma = SCHEDULE.sigma[[0, 2, 3]].double().reshape(1, 3, 1, 1)
    torch.testing.assert_close(got, x - sigma * trajectory.velocity, rtol=0, atol=1e-12)
    assert network.rows == []


def test_many_substeps_reach_the_exact_end_of_the_flow() -> None:
    """The flow keeps a latent's place in its marginal: x_0 = m + SPREAD (x - (1 - sigma) m) / std(sigma)."""
    trajectory = noisy((1, 3))
    s = SCHEDULE.sigma[[1, 3]].double().reshape(1, 2, 1, 1)
    m = CENTRE.reshape(B, 1, 1, 1)
    x = trajectory.states[:, [trajectory.kept.index(step) for step in (1, 3)]]
    end = m + SPREAD * (x - (1 - s) * m) / ((1 - s) ** 2 * SPREAD**2 + s**2).sqrt()
    errors = []
    for count in (50, 100):
        got = complete(Network(), trajectory, SCHEDULE, mode=count, batch_size=64)[:, :-1]
        errors.append(float((got - end).abs().max()))
    assert errors[1] < 0.02
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.05)  # Euler is of first order


def test_a_completion_is_the_rollout_without_noise_to_the_bit() -> None:
    """Also for steps with gaps: carrying on from what step 1 produced leads through the source of step 4."""
    trajectory = noisy((1, 4), torch.float32)
    got = complete(Network(), trajectory, SCHEDULE, mode="full", batch_size=5)
    assert got.dtype == torch.float32
    assert torch.equal(got[:, -1], trajectory.final)
    for start, k in ((1, 0), (2, 1)):
        rest = Schedule(sigma=SCHEDULE.sigma[start:], timestep=SCHEDULE.timestep[start:])
        alone = rollout(
            lambda x, sigma, timestep: exact(x, sigma, CENTRE),
            trajectory.states[:, trajectory.kept.index(start)],
            rest,
            KERNELS["ode"],
            lambda step: torch.zeros(0),
            stochastic=(),
        )
        assert torch.equal(got[:, k], alone.final)


def test_refuses_what_cannot_be_completed() -> None:
    trajectory = noisy((0, 4))
    run = partial(complete, Network(), schedule=SCHEDULE, batch_size=4)
    with pytest.raises(ValueError, match="keep_velocity=True"):
        run(replace(trajectory, velocity=None), mode="full")
    modes: list[Any] = [0, -1, "half", 2.5]
    for mode in modes:
        with pytest.raises(ValueError, match=r'"full", "clean" or a number'):
            run(trajectory, mode=mode)
    with pytest.raises(ValueError, match="batch_size"):
        run(trajectory, mode=2, batch_size=0)
    with pytest.raises(ValueError, match=r"0 \.\. 2"):
        run(trajectory, schedule=build_schedule({"shift": 3.0}, 3), mode="full")
    with pytest.raises(ValueError, match="stochastic steps"):
        run(noisy(()), mode="full")


@pytest.mark.parametrize("with_values", [True, False])
def test_flat_table_of_a_rollout(with_values: bool) -> None:
    steps = (0, 2, 3)
    trajectory, group = noisy(steps, torch.float32), torch.tensor([7, 7, 9])
    values = counter_normal((B, 4, 2, 4), "values") if with_values else None
    flat = sample_trajectories(trajectory, group, values)
    assert trajectory.mean is not None
    assert flat.mean is not None
    assert len(flat) == B * 3
    for i in range(B):
        for k, step in enumerate(steps):
            row = i * 3 + k
            assert torch.equal(flat.states[flat.source[row]], trajectory.states[i, trajectory.kept.index(step)])
            assert torch.equal(flat.states[flat.produced[row]], trajectory.states[i, trajectory.kept.index(step + 1)])
            assert torch.equal(flat.mean[row], trajectory.mean[i, k])
            assert float(flat.log_prob[row]) == float(trajectory.log_prob[i, k])
            given = (int(flat.step[row]), int(flat.sample[row]), int(flat.group[row]), int(flat.parent[row]))
            assert given == (step, i, int(group[i]), row - 1 if k else -1)
            if values is not None:
                assert torch.equal(flat.finished[i * 4 + k], values[i, k])
        last = i * 4 + 3 if with_values else i
        assert torch.equal(flat.finished[last], trajectory.final[i] if values is None else values[i, 3])
        assert int(flat.finished_after[last]) == i * 3 + 2
    if with_values:
        assert flat.finished_after.tolist() == [-1, 0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8]
    assert flat.finished_group.tolist() == group.repeat_interleave(4 if with_values else 1).tolist()


def test_flat_table_refuses_what_does_not_fit() -> None:
    trajectory = noisy((0, 2))
    for group, values in [(torch.zeros(2), None), (torch.zeros(3), torch.zeros(3, 2, 2, 4))]:
        with pytest.raises(ValueError, match=r"values \(3, 3, 2, 4\)"):
            sample_trajectories(trajectory, group.long(), values)
    with pytest.raises(ValueError, match="no stochastic step"):
        sample_trajectories(noisy(()), torch.zeros(3, dtype=torch.long), None)
