"""Clips of the embedded world: one coloured shape that moves evenly in one of four directions.

A record is `{"prompt": "a red circle moving left", "tag": "motion", "shape": ..., "color": ..., "direction": ...}`. The
verdict on a clip reads shape, colour and place from every frame with the world's detector.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.world.detector import color_of, detect_in_batch
from flowrl.world.scene_prompts import Record
from flowrl.world.scenes import COLORS, SHAPES, SIZE, Shape, draw_scene

FRAMES = 9
"""Frames of a clip."""
FPS = 8
"""Frames per second."""

DIRECTIONS: dict[str, tuple[float, float]] = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
}
"""Name -> unit step (x, y); y points down."""

WORDS = ("moving", "up", "down")
"""Words of these prompts that images' prompts do not have."""

OPPOSITE_WAY = {"left": "right", "right": "left", "up": "down", "down": "up"}

_PATH = (16.0, 26.0)  # pixels from the first to the last frame
_RADIUS = (8.0, 12.0)
_LEAST_PATH = 8.0  # a shorter way is not motion
_COSINE = np.cos(np.pi / 6)  # of the widest angle to the asked direction
_SMOOTH = 0.15  # root mean square distance from even motion, as a share of the way, that counts as smooth
_HELD_OUT = 20  # of the 48 combinations
_SPLIT_SEED = 44


@dataclass(frozen=True, kw_only=True, slots=True)
class MotionVerdict:
    """Whether a clip shows the requested motion."""

    shape: float
    """Share of frames that show exactly one object, of the asked shape."""
    color: float
    """Share of frames whose one object has the asked colour."""
    direction: float
    """In [0, 1], how well the way from first to last sighting agrees with the asked direction."""
    smooth: float
    """In [0, 1], how evenly the object moves."""
    correct: bool
    """All of it: every frame right, the way within 30 degrees and at least 8 pixels long, evenly."""

    @property
    def graded(self) -> float:
        """Mean of the four parts, in [0, 1]."""
        return (self.shape + self.color + self.direction + self.smooth) / 4


def motion_record(shape: str, color: str, direction: str) -> Record:
    """The record "a COLOR SHAPE moving DIRECTION"."""
    return {"prompt": f"a {color} {shape} moving {direction}", "tag": "motion", "shape": shape, "color": color,
            "direction": direction}  # fmt: skip


def motion_records() -> tuple[list[Record], list[Record]]:
    """Training and held-out records: combinations of shape, colour and direction, disjoint."""
    records = [motion_record(*names) for names in itertools.product(SHAPES, COLORS, DIRECTIONS)]
    held_out = set(np.random.default_rng(_SPLIT_SEED).permutation(len(records))[:_HELD_OUT].tolist())
    return (
        [r for i, r in enumerate(records) if i not in held_out],
        [r for i, r in enumerate(records) if i in held_out],
    )


def clip_shapes(record: Mapping[str, Any], rng: np.random.Generator, frames: int = FRAMES) -> list[Shape]:
    """The shape in every frame of a clip in which a record holds, at a random place, size and speed."""
    radius, length = rng.uniform(*_RADIUS), rng.uniform(*_PATH)
    step = np.asarray(DIRECTIONS[record["direction"]]) * length
    low, high = radius + 1.5, SIZE - radius - 1.5
    start = np.asarray([rng.uniform(low - min(0.0, d), high - max(0.0, d)) for d in step])
    return [
        Shape(label=record["shape"], color=record["color"], x=float(x), y=float(y), radius=float(radius))
        for x, y in (start + share * step for share in np.linspace(0.0, 1.0, frames))
    ]


def draw_clip(shapes: Sequence[Shape]) -> np.ndarray:
    """The clip of a shape that is here, then there (see `clip_shapes`): uint8 `[frames, 64, 64, 3]`."""
    return np.stack([draw_scene([shape]) for shape in shapes])


def motion_verdict(clip: np.ndarray, record: Mapping[str, Any]) -> MotionVerdict:
    """Judges a clip by its record.

    The way is the line fitted to the centres of the asked shape's sightings (the clearest object of a frame) over the
    frame numbers; `direction` is the cosine of its angle to the asked direction, at least 0, times how much of the
    least way of 8 pixels it makes; `smooth` falls from 1 at even motion to 0 at a deviation of 15 % of the way.

    Args:
        clip: uint8 `[F, H, W, 3]`, RGB; F at least 3.
        record: with shape, color and direction.
    """
    if len(clip) < 3:
        raise ValueError(f"motion needs at least 3 frames, this clip has {len(clip)}")
    if record.get("direction") not in DIRECTIONS:
        raise ValueError(f"unknown direction {record.get('direction')!r}: the world has {', '.join(DIRECTIONS)}")
    shapes, colors, places = 0, 0, []
    for number, (frame, found) in enumerate(zip(clip, detect_in_batch(clip), strict=True)):
        if not found:
            continue
        best = found[0]
        alone = len(found) == 1
        shapes += alone and best.label == record["shape"]
        colors += alone and color_of(frame, best) == record["color"]
        places.append((number, (best.box[0] + best.box[2]) / 2, (best.box[1] + best.box[3]) / 2))
    direction, smooth, far = _way(np.asarray(places, dtype=np.float64), np.asarray(DIRECTIONS[record["direction"]]))
    frames = len(clip)
    correct = shapes == colors == len(places) == frames and far and direction >= _COSINE and smooth >= 0.5
    return MotionVerdict(
        shape=shapes / frames, color=colors / frames, direction=direction, smooth=smooth, correct=bool(correct)
    )


def _way(places: np.ndarray, asked: np.ndarray) -> tuple[float, float, bool]:
    """Agreement with the asked direction, evenness, and whether the way is long enough, of `[n, 3]` (frame, x, y)."""
    if len(places) < 3:
        return 0.0, 0.0, False
    numbers, centres = places[:, 0], places[:, 1:]
    times = numbers - numbers.mean()
    speed = times @ (centres - centres.mean(axis=0)) / (times @ times)
    way = speed * (numbers[-1] - numbers[0])
    length = float(np.linalg.norm(way))
    if length < 1e-9:
        return 0.0, 0.0, False
    residual = centres - centres.mean(axis=0) - times[:, None] * speed
    deviation = float(np.sqrt((residual**2).sum(axis=1).mean())) / max(length, _LEAST_PATH)
    cosine = max(0.0, float(way @ asked) / length)
    return cosine * min(1.0, length / _LEAST_PATH), max(0.0, 1 - deviation / _SMOOTH), length >= _LEAST_PATH
