"""Moving windows and thinned schedules against the published tables."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.samplers.schedules import linspace_sigmas
from flowrl.samplers.windows import (
    exponential_decay,
    flash_points,
    flash_tail,
    linear_decay,
    mixgrpo_window,
    thinned_steps,
)


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


def test_a_stride_that_ends_one_short_adds_the_last_window() -> None:
    windows = [mixgrpo_window(i, 8, 3, interval=1, stride=3) for i in range(4)]
    assert windows == [(0, 1, 2), (3, 4, 5), (4, 5, 6), (0, 1, 2)]


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
    assert {window[0] for window in drawn} == set(range(7))
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
    with pytest.raises(ValueError, match="progressive, random, decay, exp_decay, frozen"):
        mixgrpo_window(0, 25, 4, "linear")  # type: ignore[arg-type]
    for size in (0, 25):
        with pytest.raises(ValueError, match=r"1 \.\. 24"):
            mixgrpo_window(0, 25, size)
    with pytest.raises(ValueError, match=r"1 \.\. 23"):
        mixgrpo_window(0, 25, 24, published_off_by_one=True)
    for iteration, interval, stride in [(-1, 25, 1), (0, 0, 1), (0, 25, -1)]:
        with pytest.raises(ValueError, match="iteration >= 0"):
            mixgrpo_window(iteration, 25, 4, interval=interval, stride=stride)


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
    assert flash_points(102, 2, 0.29) == 29  # 0.29 * 100 is below 29 in binary


def test_thinned_steps() -> None:
    assert thinned_steps(6, 1, 1) == (2, 3, 4, 5)
    assert thinned_steps(6, 1, 2) == (2, 3)
    assert thinned_steps(7, 1, 2) == (2, 3, 5)
    assert thinned_steps(6, 0, 3) == (1, 2)  # states 1, 2, 5 of 6
    assert thinned_steps(6, 4, 2) == (5,)
    assert thinned_steps(6, 5, 1) == thinned_steps(6, 5, 3) == ()
    # Network evaluations of all completions of a direction, 16 steps, branches at 0 .. 7.
    assert [sum(len(thinned_steps(16, k, stride)) for k in range(8)) for stride in (1, 2)] == [92, 48]


def test_schedules_refuse() -> None:
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
