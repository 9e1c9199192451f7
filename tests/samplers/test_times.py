"""Training noise levels: strata, distributions, and their dependence on counters alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flowrl.samplers.schedules import diffusers_sigmas, unipc_flow_sigmas
from flowrl.samplers.times import (
    logit_normal_sigmas,
    permuted_steps,
    steps_in_reach,
    strata,
    training_times,
    uniform_sigmas,
)
from flowrl.trajectory import Schedule

KEYS: list[tuple[int | str, ...]] = [(0, "times", 3, sample) for sample in range(400)]


def schedule(n: int) -> Schedule:
    sigma = diffusers_sigmas(n, 3.0)
    return Schedule(sigma=sigma, timestep=sigma[:-1] * 1000)


def test_the_grid_the_strata_are_of() -> None:
    expected = [1, 0.97306, 0.94305, 0.90941, 0.87145, 0.82828, 0.77874, 0.72131, 0.65394, 0.57381, 0.47691, 0.35737,
                0.20620, 0.00893, 0]  # fmt: skip
    assert schedule(14).sigma.tolist() == pytest.approx(expected, abs=5.1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("discrete", [{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}]),
        ("discrete_wo_init", [{1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}]),
        ("discrete_with_init", [{0}, {1, 2}, {3, 4}, {5, 6}, {7, 8}, {9, 10, 11}]),
    ],
)
def test_strata_of_fourteen_steps(kind: Any, expected: list[set[int]]) -> None:
    assert [set(piece) for piece in strata(kind, int(14 * 0.9), 6)] == expected
    times = training_times(kind, schedule(14), KEYS, count=6, fraction=0.9)
    steps = (times.sigma[..., None] == schedule(14).sigma).nonzero()[:, 2].reshape(400, 6)
    assert [set(column.tolist()) for column in steps.T] == expected  # every step, and no other, is drawn
    assert torch.equal(times.timestep, times.sigma * 1000)
    for column, piece in zip(steps.T, expected, strict=True):
        counts = torch.bincount(column, minlength=14)[sorted(piece)].double()
        spread = math.sqrt(400 / len(piece) * (1 - 1 / len(piece))) if len(piece) > 1 else 0.0
        assert float((counts - 400 / len(piece)).abs().max()) <= 4 * spread


def test_empty_strata_give_their_lower_boundary() -> None:
    assert [list(piece) for piece in strata("discrete", 3, 6)] == [[0], [0], [1], [1], [2], [2]]
    assert [list(piece) for piece in strata("discrete_wo_init", 2, 3)] == [[1], [1], [1]]
    assert [list(piece) for piece in strata("discrete_with_init", 5, 1)] == [[0]]


def test_permuted_schedule_takes_different_steps_of_all_for_each_image() -> None:
    for n, count in ((10, 9), (25, 24), (6, 5)):
        times = training_times("schedule", schedule(n), KEYS[:40], count=count)
        assert times.sigma.shape == (40, count)
        assert all(len(set(row)) == count for row in times.sigma.tolist())
        assert set(times.sigma.flatten().tolist()) == set(schedule(n).sigma[:-1].tolist())  # the last one too
    nine = training_times("schedule", schedule(10), KEYS[:40], count=9).sigma
    assert len({tuple(row) for row in nine.tolist()}) == 40
    assert torch.equal(training_times("schedule", schedule(10), KEYS[:40], count=4).sigma, nine[:, :4])
    assert sorted(permuted_steps(5, 5, 1, "a")) == [0, 1, 2, 3, 4]


def test_permuted_leading_share_draws_each_of_its_steps_equally_often() -> None:
    """Four of the first five of ten steps: each in 0.8 of all draws, the others never."""
    times = training_times("schedule", schedule(10), KEYS, count=4, fraction=0.5)
    steps = (times.sigma[..., None] == schedule(10).sigma).nonzero()[:, 2]
    counts = torch.bincount(steps, minlength=10).double()
    assert not counts[5:].any()
    assert float((counts[:5] - 320).abs().max()) <= 4 * math.sqrt(400 * 0.8 * 0.2)


def test_what_is_in_reach() -> None:
    assert [steps_in_reach(kind, 10) for kind in ("schedule", "discrete", "discrete_wo_init")] == [10, 9, 9]
    assert [steps_in_reach(kind, 10, 0.5) for kind in ("schedule", "discrete")] == [5, 5]
    assert steps_in_reach("schedule", 10, 1.0) == 10


def test_the_network_is_fed_the_schedules_own_timesteps() -> None:
    sigma = unipc_flow_sigmas(20, 3.0)
    wan = Schedule(sigma=sigma, timestep=(sigma[:-1] * 1000).trunc())
    times = training_times("discrete", wan, KEYS[:5], count=4)
    assert torch.equal(times.timestep, (times.sigma * 1000).trunc())


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_continuous_levels_are_stratified(shift: float) -> None:
    """Undo shift and map: each draw of a sample has a stratum of its own, in random order."""
    for kind in ("logit_normal", "uniform"):
        picked: Any = kind
        times = training_times(picked, schedule(10), KEYS, count=5, shift=shift)
        assert times.sigma.shape == (400, 5)
        assert times.sigma.dtype == torch.float32
        assert torch.equal(times.timestep, times.sigma * 1000)
        t = times.sigma.double()
        t = t / (shift - (shift - 1) * t)
        u = torch.special.ndtr(t.logit()) if kind == "logit_normal" else (t - 0.2) / 0.8
        assert torch.equal((u * 5).floor().long().sort(1).values, torch.arange(5).expand(400, 5))
        # Uniform over all: mean 1/2, second moment 1/3, of 2000 numbers whose strata only lower the error.
        assert abs(float(u.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 2000)
        assert abs(float(u.square().mean()) - 1 / 3) < 4 * math.sqrt(4 / 45 / 2000)
        assert 0.35 < float((u[:, 0] < 0.5).double().mean()) < 0.65  # the order is random


def test_levels_stay_in_range_and_shift_towards_noise() -> None:
    low = torch.cat([logit_normal_sigmas(64, 1, sample) for sample in range(40)])
    assert float(low.min()) >= 0.01
    assert float(low.max()) < 1
    even = uniform_sigmas(1000, 1)
    assert 0.2 <= float(even.min()) < 0.202
    assert float(even.max()) <= 1
    shifted = uniform_sigmas(1000, 1, shift=3.0)
    assert torch.allclose(shifted, 3 * even / (1 + 2 * even))  # .5 -> .75, towards noise
    assert bool((shifted >= even).all())


@pytest.mark.parametrize("kind", ["uniform", "logit_normal"])
def test_levels_end_where_the_model_knows_none(kind: Any) -> None:
    sigma = torch.tensor([0.6, 0.3, 0.0])
    schedule = Schedule(sigma=sigma, timestep=sigma[:-1] * 1000, highest_sigma=0.6)
    times = training_times(kind, schedule, [(0, i) for i in range(20)], count=4, shift=3.0)
    assert float(times.sigma.max()) == pytest.approx(0.6)


def test_levels_depend_on_the_key_alone() -> None:
    for kind in ("schedule", "discrete", "logit_normal", "uniform"):
        picked: Any = kind
        whole = training_times(picked, schedule(20), KEYS[:8], count=3).sigma
        part = training_times(picked, schedule(20), KEYS[5:6], count=3).sigma
        assert torch.equal(whole[5:6], part)
        assert len({tuple(row) for row in whole.tolist()}) > 5


def test_times_refuse_what_cannot_be_drawn() -> None:
    ten, bad = schedule(10), "cosine"
    wrong: Any = bad
    with pytest.raises(ValueError, match="unknown kind"):
        training_times(wrong, ten, KEYS[:1], count=2)
    with pytest.raises(ValueError, match="one key"):
        training_times("schedule", ten, [], count=2)
    for kind, fraction in (("schedule", 0.0), ("discrete", 1.5)):
        picked: Any = kind
        with pytest.raises(ValueError, match="fraction is the share"):
            training_times(picked, ten, KEYS[:1], count=2, fraction=fraction)
    with pytest.raises(ValueError, match="11 different steps"):
        training_times("schedule", ten, KEYS[:1], count=11)
    with pytest.raises(ValueError, match="6 different steps cannot be taken of the first 5"):
        training_times("schedule", ten, KEYS[:1], count=6, fraction=0.5)
    with pytest.raises(ValueError, match="cannot take"):
        training_times("discrete_wo_init", ten, KEYS[:1], count=2, fraction=0.1)
    with pytest.raises(ValueError, match="at least one"):
        training_times("uniform", ten, KEYS[:1], count=0)
    with pytest.raises(ValueError, match="shift"):
        training_times("logit_normal", ten, KEYS[:1], count=2, shift=0.0)
    with pytest.raises(ValueError, match="no strata"):
        strata("uniform", 5, 2)
