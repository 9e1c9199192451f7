"""Clips of the embedded world: what is drawn holds, and the verdict on motion reads it from the pixels alone."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.world.clips import DIRECTIONS, FRAMES, clip_shapes, draw_clip, motion_record, motion_records, motion_verdict
from flowrl.world.scenes import Shape, draw_scene

RECORD = motion_record("circle", "red", "left")


def clip(*places: tuple[float, float], label: str = "circle", color: str = "red", radius: float = 9.0) -> np.ndarray:
    """Frames with one shape at these centres."""
    return np.stack([draw_scene([Shape(label=label, color=color, x=x, y=y, radius=radius)]) for x, y in places])


def even(start: tuple[float, float], step: tuple[float, float], frames: int = FRAMES) -> list[tuple[float, float]]:
    return [(start[0] + k * step[0], start[1] + k * step[1]) for k in range(frames)]


def test_drawn_clips_are_what_their_records_say() -> None:
    records = [record for split in motion_records() for record in split]
    assert len(records) == 48
    for number, record in enumerate(records):
        drawn = draw_clip(clip_shapes(record, np.random.default_rng(number)))
        assert drawn.shape == (FRAMES, 64, 64, 3)
        found = motion_verdict(drawn, record)
        assert found.correct
        assert found.shape == found.color == 1
        assert found.direction > 0.98
        assert found.smooth > 0.7


def test_a_clip_holds_for_its_own_record_only() -> None:
    records = [record for split in motion_records() for record in split]
    drawn = draw_clip(clip_shapes(RECORD, np.random.default_rng(0)))
    assert [r for r in records if motion_verdict(drawn, r).correct] == [RECORD]


def test_training_and_held_out_share_no_prompt() -> None:
    train, held_out = motion_records()
    assert (len(train), len(held_out)) == (28, 20)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}
    for records in (train, held_out):
        assert {r["direction"] for r in records} == set(DIRECTIONS)


def test_direction_is_the_cosine_of_the_angle() -> None:
    for degrees, expected in ((0, 1.0), (20, 0.94), (60, 0.5), (120, 0.0)):
        angle = np.deg2rad(degrees)
        step = (-2.2 * np.cos(angle), 2.2 * np.sin(angle))
        found = motion_verdict(clip(*even((32 - 4 * step[0], 32 - 4 * step[1]), step)), RECORD)
        assert found.direction == pytest.approx(expected, abs=0.04), degrees
        assert found.correct == (degrees <= 30)


def test_standing_still_and_short_ways_are_no_motion() -> None:
    still = motion_verdict(clip(*[(32.0, 32.0)] * FRAMES), RECORD)
    assert (still.direction, still.correct) == (0.0, False)
    short = motion_verdict(clip(*even((34, 32), (-0.5, 0))), RECORD)  # 4 of the 8 pixels that count
    assert short.direction == pytest.approx(0.5, abs=0.07)
    assert not short.correct


def test_jumps_are_not_smooth() -> None:
    steady = even((44, 32), (-2.5, 0))
    jumps = [steady[0]] * 4 + [steady[-1]] * 5
    wild = [(x, 32 + (8 if k % 2 else -8)) for k, (x, _) in enumerate(steady)]
    scores = [motion_verdict(clip(*places), RECORD).smooth for places in (steady, jumps, wild)]
    assert scores[0] > 0.9
    assert max(scores[1:]) < 0.3
    assert not motion_verdict(clip(*wild), RECORD).correct


def test_shape_color_and_company_count_frame_by_frame() -> None:
    steady = even((44, 32), (-2.5, 0))
    right = clip(*steady)
    changed = right.copy()
    changed[:3] = clip(*steady[:3], label="square", color="blue")
    found = motion_verdict(changed, RECORD)
    assert found.shape == pytest.approx(6 / 9)
    assert found.color == pytest.approx(6 / 9)
    assert found.direction > 0.98
    assert not found.correct
    crowded = right.copy()
    crowded[0] = draw_scene([Shape(label="circle", color="red", x=x, y=32, radius=9) for x in (20.0, 44.0)])
    assert motion_verdict(crowded, RECORD).shape == pytest.approx(8 / 9)
    empty = right.copy()
    empty[:7] = 236
    assert motion_verdict(empty, RECORD).graded == pytest.approx((2 / 9 + 2 / 9) / 4)


def test_bad_clips_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 frames, this clip has 2"):
        motion_verdict(clip((30, 30), (28, 30)), RECORD)
    with pytest.raises(ValueError, match="unknown direction 'sideways'"):
        motion_verdict(clip(*even((40, 30), (-2, 0))), {**RECORD, "direction": "sideways"})
