"""Moving windows, subsets and thinned schedules against the published tables."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.samplers import (
    WINDOW_STRATEGIES,
    branch_start,
    exponential_decay,
    flash_points,
    flash_tail,
    leading,
    linear_decay,
    linspace_sigmas,
    mixgrpo_window,
    random_subset,
    solve,
    sub_schedule,
    thinned_steps,
    window_starts,
)
from flowrl.trajectory import Schedule


@pytest.mark.parametrize(
    ("first", "last", "steps"),
    [
        (0, 24, (0, 1, 2, 3)),
        (25, 49, (1, 2, 3, 4)),
        (475, 499, (19, 20, 21, 22)),
        (500, 524, (20, 21, 22)),
        (525, 549, (21, 22)),
        (550, 574, (22,)),
        (575, 599, ()),
        (600, 624, (0, 1, 2, 3)),
    ],
)
def test_published_windows(first: int, last: int, steps: tuple[int, ...]) -> None:
    for iteration in (first, last):
        assert mixgrpo_window(iteration, 25, 4, published_off_by_one=True) == steps


def test_progressive_windows_are_full_and_reach_the_last_but_one_step() -> None:
    assert [mixgrpo_window(i, 25, 4)[0] for i in (0, 24, 25, 499, 500, 524, 525)] == [0, 0, 1, 19, 20, 20, 0]
    assert mixgrpo_window(500, 25, 4) == (20, 21, 22, 23)
    # A stride that does not land on the last start is cut short there, so that no step is left out.
    assert [mixgrpo_window(i, 10, 4, interval=1, stride=3) for i in range(4)] == [
        (0, 1, 2, 3),
        (3, 4, 5, 6),
        (5, 6, 7, 8),
        (0, 1, 2, 3),
    ]
    assert [mixgrpo_window(i, 10, 3, interval=1, stride=3)[0] for i in range(4)] == [0, 3, 6, 0]  # no overlap


def test_decays_match_the_published_values() -> None:
    assert [linear_decay(start, 25) for start in (0, 4, 8, 12, 16, 20)] == [10, 8, 6, 5, 3, 2]
    assert [exponential_decay(start) for start in (0, 13, 14, 16, 20, 23)] == [25, 25, 23, 19, 13, 10]
    assert linear_decay(23, 25) == 1
    assert linear_decay(5, 25, longest=4, shortest=2) == 3  # floor(4 * 18/23 + 2 * 5/23) = floor(3.57)


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("strategy", ["decay", "exp_decay"])
def test_decaying_windows_stay_as_long_as_they_should(strategy: Any, published: bool) -> None:
    stay = linear_decay if strategy == "decay" else lambda start, num_steps: exponential_decay(start, 20)
    starts = range(24) if published else range(21)
    length = sum(stay(start, 25) for start in starts)
    windows = [
        mixgrpo_window(i, 25, 4, strategy, interval=20, published_off_by_one=published) for i in range(length + 30)
    ]
    assert windows[:30] == windows[length:]
    runs = Counter(windows[:length])
    end = 23 if published else 24
    assert list(runs) == [tuple(range(s, min(s + 4, end))) for s in starts]  # in this order
    assert list(runs.values()) == [stay(start, 25) for start in starts]


def test_random_windows_are_uniform_and_counted() -> None:
    drawn = [mixgrpo_window(25 * i, 10, 3, "random", seed=3) for i in range(700)]
    assert {window[0] for window in drawn} == set(window_starts(10, 3, 0, 9))
    counts = Counter(window[0] for window in drawn)
    assert max(abs(count - 100) for count in counts.values()) < 4.5 * math.sqrt(100)
    assert [mixgrpo_window(i, 10, 3, "random", seed=3) for i in range(25)] == [drawn[0]] * 25
    assert drawn != [mixgrpo_window(25 * i, 10, 3, "random", seed=4) for i in range(700)]
    published = {mixgrpo_window(25 * i, 25, 4, "random", published_off_by_one=True)[0] for i in range(400)}
    assert published == set(range(20))


def test_frozen_windows() -> None:
    for iteration in (0, 24, 25, 10_000):
        assert mixgrpo_window(iteration, 25, 4, "frozen") == (0, 1, 2, 3)
        assert mixgrpo_window(iteration, 25, 4, stride=0) == (0, 1, 2, 3)
        assert mixgrpo_window(iteration, 25, 4, stride=0, published_off_by_one=True) == (0, 1, 2, 3)


@settings(max_examples=25, deadline=None)
@given(
    num_steps=st.integers(2, 16),
    share=st.floats(0, 1),
    strategy=st.sampled_from(["progressive", "decay", "exp_decay"]),
    interval=st.integers(1, 3),
    stride=st.integers(1, 5),
)
def test_every_step_but_the_last_is_trained(
    num_steps: int, share: float, strategy: Any, interval: int, stride: int
) -> None:
    size = 1 + int(share * (num_steps - 2))
    stride = min(stride, size)  # a longer one jumps over steps, as asked
    windows = [
        mixgrpo_window(i, num_steps, size, strategy, interval=interval, stride=stride)
        for i in range(num_steps * max(interval, 10))
    ]
    assert all(window == tuple(range(window[0], window[0] + size)) for window in windows)
    assert {step for window in windows for step in window} == set(range(num_steps - 1))


def test_windows_refuse() -> None:
    with pytest.raises(ValueError, match=", ".join(WINDOW_STRATEGIES)):
        mixgrpo_window(0, 25, 4, "linear")  # type: ignore[arg-type]
    for size in (0, 25):
        with pytest.raises(ValueError, match=r"1 \.\. 24"):
            mixgrpo_window(0, 25, size)
    with pytest.raises(ValueError, match=r"1 \.\. 23"):
        mixgrpo_window(0, 25, 24, published_off_by_one=True)
    for iteration, interval, stride in [(-1, 25, 1), (0, 0, 1), (0, 25, -1)]:
        with pytest.raises(ValueError, match="iteration >= 0"):
            mixgrpo_window(iteration, 25, 4, interval=interval, stride=stride)


def test_leading_share() -> None:
    assert leading(10, 0.99) == tuple(range(9))  # Flow-GRPO
    assert leading(15, 0.6) == tuple(range(9))  # DanceGRPO's share of the 15 steps before the last
    assert leading(10, 1.0) == tuple(range(10))
    assert len(leading(100, 0.29)) == 29  # .29 * 100 is 28.999...
    assert len(leading(25, 0.99)) == 24


def test_random_subsets() -> None:
    subsets = [random_subset(16, 9, 5, 0, sample) for sample in range(1500)]
    assert all(len(set(subset)) == 9 and list(subset) == sorted(subset) for subset in subsets)
    counts = Counter(step for subset in subsets for step in subset)
    assert set(counts) == set(range(15))  # the last step is left out
    # Each step is in a subset with probability 9/15: 900 times, standard deviation 19.
    assert max(abs(count - 900) for count in counts.values()) < 4.5 * math.sqrt(1500 * 0.6 * 0.4)
    assert subsets[:20] == [random_subset(16, 9, 5, 0, sample) for sample in range(20)]
    assert len(set(subsets[:20])) > 15
    assert [random_subset(16, 9, seed, it, 0) for seed, it in [(6, 0), (5, 1)]] != [subsets[0]] * 2
    assert random_subset(4, 3, 0, 0, 0) == (0, 1, 2)


def test_branch_starts() -> None:
    starts = Counter(branch_start(11, 2, iteration) for iteration in range(1000))
    assert set(starts) == set(range(5))
    assert max(abs(count - 200) for count in starts.values()) < 4.5 * math.sqrt(1000 * 0.2 * 0.8)
    assert branch_start(2, 0, 7) == branch_start(3, 0, 7) == 0


FLASH = [(3, 0.4, 8, 11), (3, 0.2, 4, 7), (8, 0.4, 6, 14), (13, 0.4, 4, 17), (18, 0.4, 2, 20)]


@pytest.mark.parametrize(("last", "ratio", "points", "steps"), FLASH)
def test_flash_tail_table(last: int, ratio: float, points: int, steps: int) -> None:
    assert flash_points(25, last, ratio) == points
    schedule = flash_tail(25, last, ratio, shift=3.0)
    assert schedule.num_steps == steps
    full = linspace_sigmas(25, 3.0)
    assert torch.equal(schedule.sigma[: last + 2], full[: last + 2])  # the window runs on the full grid
    u = schedule.sigma.double() / (3 - 2 * schedule.sigma.double())  # the shift undone
    gaps = u[last + 1 : -1] - u[last + 2 :]
    assert gaps.tolist() == pytest.approx([(1 - (last + 1) / 25) / (points - 1)] * (points - 1), abs=1e-6)
    torch.testing.assert_close(schedule.timestep, 1000 * schedule.sigma[:-1])


def test_flash_tail_always_ends_in_clean_data() -> None:
    """Late windows: one published point would stop at u = 1 - (last + 1) / T; here one step leads from there to 0."""
    for last in (21, 22, 23):
        assert flash_points(25, last, 0.4) == 1
        schedule = flash_tail(25, last, 0.4, shift=3.0)
        assert schedule.num_steps == last + 2
        assert float(schedule.sigma[-1]) == 0
        assert float(schedule.sigma[-2]) == float(linspace_sigmas(25, 3.0)[last + 1])
    assert flash_points(10, 0, 1.0) == 10
    torch.testing.assert_close(flash_tail(10, 8, 1.0).sigma, linspace_sigmas(10))


def test_thinned_steps() -> None:
    assert thinned_steps(6, 1, 1) == (2, 3, 4, 5)
    assert thinned_steps(6, 1, 2) == (2, 3)
    assert thinned_steps(7, 1, 2) == (2, 3, 5)
    assert thinned_steps(6, 0, 3) == (1, 2)  # states 1, 2, 5 of 6
    assert thinned_steps(6, 4, 2) == (5,)
    assert thinned_steps(6, 5, 1) == thinned_steps(6, 5, 3) == ()
    # Network evaluations of all completions of a direction, 16 steps, branches at 0 .. 7.
    assert [sum(len(thinned_steps(16, k, stride)) for k in range(8)) for stride in (1, 2)] == [92, 48]


def test_sub_schedule_jumps_to_clean_data() -> None:
    sigma = linspace_sigmas(6, 2.0)
    full = Schedule(sigma=sigma, timestep=1000 * sigma[:-1])
    thin = sub_schedule(full, thinned_steps(6, 1, 2))
    assert thin.sigma.tolist() == [float(sigma[2]), float(sigma[3]), 0.0]
    assert thin.timestep.tolist() == [float(full.timestep[2]), float(full.timestep[3])]
    # On data that is a point mass at 2 the velocity is (x - 2) / sigma and one jump ends there.
    x = torch.tensor([[0.3, -1.0]])
    done = solve(lambda y, s, t: (y - 2) / s, x, thin, order=1)
    torch.testing.assert_close(done, torch.full((1, 2), 2.0))
    assert torch.equal(sub_schedule(full, range(6)).sigma, sigma)


def test_subsets_and_schedules_refuse() -> None:
    for fraction in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="fraction must lie"):
            leading(10, fraction)
    with pytest.raises(ValueError, match="is none"):
        leading(10, 0.05)
    for count in (0, 16):
        with pytest.raises(ValueError, match=r"1 \.\. 15"):
            random_subset(16, count, 0, 0, 0)
    with pytest.raises(ValueError, match="at least 2"):
        branch_start(1, 0, 0)
    for last in (-1, 24):
        with pytest.raises(ValueError, match=r"0 \.\. 23"):
            flash_tail(25, last, 0.4)
    with pytest.raises(ValueError, match="ratio must lie"):
        flash_tail(25, 3, 0.0)
    with pytest.raises(ValueError, match="shift must be positive"):
        flash_tail(25, 3, 0.4, shift=0.0)
    for k, stride in [(-1, 1), (6, 1), (1, 0)]:
        with pytest.raises(ValueError, match="stride >= 1"):
            thinned_steps(6, k, stride)
    sigma = linspace_sigmas(6)
    full = Schedule(sigma=sigma, timestep=sigma[:-1])
    for steps in [(), (2, 1), (1, 1), (-1, 2), (4, 6)]:
        with pytest.raises(ValueError, match="ascend within"):
            sub_schedule(full, steps)
