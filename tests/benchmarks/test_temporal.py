"""Temporal diagnostics against closed forms: frozen, moving, jumping and flickering clips."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.benchmarks.temporal import NAMES, diagnose, flicker, frame_change, freeze, luminance, teleport

SIDE, SIZE = 64, 8


def square(places: Sequence[tuple[float, float]], *, value: float = 1.0, ground: float = 0.2) -> Tensor:
    """A square of `SIZE` pixels on a grey ground, its upper left corner at the places (x, y)."""
    video = torch.full((len(places), 3, SIDE, SIDE), ground)
    for frame, (x, y) in zip(video, places, strict=True):
        frame[:, int(y) : int(y) + SIZE, int(x) : int(x) + SIZE] = value
    return video


def moving(step: int, frames: int = 7) -> Tensor:
    return square([(4 + step * t, 20) for t in range(frames)])


def jumping(step: int, jump: int, frames: int = 8) -> Tensor:
    """Even steps to the right but for one of `jump` in the middle."""
    places = [4 + step * t + (jump - step if t >= frames // 2 else 0) for t in range(frames)]
    return square([(x, 20) for x in places])


def test_a_frozen_clip() -> None:
    found = diagnose(moving(0))
    assert found == {"change": 0.0, "flicker": 0.0, "freeze": 1.0, "teleport": 0.0}


@pytest.mark.parametrize("step", [1, 3, 4])
def test_an_evenly_moving_square(step: int) -> None:
    found = diagnose(moving(step))
    # Two strips of step by SIZE pixels change by 0.8 in each step.
    assert found["change"] == pytest.approx(2 * step * SIZE * 0.8 / SIDE**2, abs=1e-6)
    assert found["flicker"] == 0.0  # every pixel goes one way, or comes back later
    assert found["freeze"] == 0.0
    assert found["teleport"] == pytest.approx(0.0, abs=1e-5)


def test_what_covers_a_pixel_for_one_frame_flickers() -> None:
    # Of its 8 columns the last of one place is the first of the next: 6 are covered once.
    assert float(flicker(moving(7))) == pytest.approx(5 * 6 * SIZE * 0.8 / SIDE**2 / 5, abs=1e-6)


@pytest.mark.parametrize(("step", "jump"), [(1, 20), (2, 5), (3, 30), (4, 4)])
def test_a_square_that_jumps(step: int, jump: int) -> None:
    assert float(teleport(jumping(step, jump))) == pytest.approx(1 - step / jump, abs=1e-5)


def test_a_jump_in_any_direction_of_any_colour_and_darker_than_its_ground() -> None:
    places = [(10.0, 10.0), (12.0, 10.0), (14.0, 10.0), (14.0, 40.0), (16.0, 40.0), (18.0, 40.0)]
    video = square(places, value=0.1, ground=0.9)
    video[:, 1] = 0.5  # one channel does not move
    assert float(teleport(video)) == pytest.approx(1 - 2 / 30, abs=1e-5)


def test_a_jump_in_a_clip_that_stands_still_otherwise() -> None:
    video = square([(4, 20)] * 4 + [(40, 20)] * 4)
    assert float(teleport(video)) > 0.95
    assert float(freeze(video)) == pytest.approx(6 / 7)


def test_alternating_brightness() -> None:
    levels = torch.tensor([0.3, 0.7] * 4)
    video = levels[:, None, None, None].expand(-1, 3, SIDE, SIDE).contiguous()
    found = diagnose(video)
    assert found["flicker"] == pytest.approx(0.4, abs=1e-6)
    assert found["change"] == pytest.approx(0.4, abs=1e-6)
    assert found["freeze"] == 0.0
    assert found["teleport"] == pytest.approx(0.0, abs=1e-5)  # it is everywhere at once, and goes nowhere


def test_a_fade_is_no_flicker() -> None:
    video = torch.linspace(0, 1, 6)[:, None, None, None].expand(-1, 3, 16, 16).contiguous()
    assert float(flicker(video)) == 0.0
    assert float(frame_change(video)) == pytest.approx(0.2, abs=1e-6)


def test_flicker_counts_the_smaller_way() -> None:
    video = torch.tensor([0.0, 1.0, 0.25])[:, None, None, None].expand(-1, 3, 8, 8).contiguous()
    assert float(flicker(video)) == pytest.approx(0.75, abs=1e-6)


def test_noise_of_a_decoder_is_frozen_and_a_small_thing_that_moves_is_not() -> None:
    rng = np.random.default_rng(0)
    noise = torch.from_numpy(rng.normal(0, 1 / 255, (5, 3, SIDE, SIDE))).float()
    assert float(freeze(0.5 + noise)) == 1.0
    assert float(teleport(0.5 + noise)) == 0.0
    assert float(freeze(moving(1))) == 0.0


def test_change_is_what_vbench_takes_from_one() -> None:
    frames = np.random.default_rng(1).integers(0, 256, (4, 9, 7, 3)).astype(np.float32)
    steps = [np.mean(np.abs(frames[t + 1] - frames[t])) for t in range(3)]
    published = (255.0 - np.mean(steps)) / 255.0
    video = torch.from_numpy(frames).permute(0, 3, 1, 2) / 255
    assert 1 - float(frame_change(video)) == pytest.approx(published, abs=1e-6)


def test_luminance_of_the_primaries() -> None:
    primaries = torch.eye(3)[:, :, None, None]
    assert luminance(primaries).flatten().tolist() == pytest.approx([0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize(("frames", "known"), [(1, set()), (2, {"change", "freeze"}), (3, set(NAMES))])
def test_what_few_frames_cannot_show_is_not_a_number(frames: int, known: set[str]) -> None:
    found = diagnose(moving(2, frames))
    assert {name for name, value in found.items() if not math.isnan(value)} == known
