"""A detector's results: which of them count, and the relation of two boxes (GenEval's constants and geometry).

Boxes are `(x1, y1, x2, y2)` in pixels, x to the right, y down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from flowrl.runtime.shapes import Bool

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Detection:
    """One object that a detector found: class name, box, confidence and, if the detector has one, a mask `[H, W]`."""

    label: str
    box: Box
    score: float
    mask: Bool[np.ndarray, " h w"] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        box = tuple(float(side) for side in self.box)
        if len(box) != 4 or not all(math.isfinite(value) for value in (*box, self.score)):
            raise ValueError(
                f"Detection of {self.label!r} needs a box of four finite numbers (x1, y1, x2, y2) and a finite score, "
                f"got box={self.box!r}, score={self.score!r}: drop such objects in the detector."
            )
        object.__setattr__(self, "box", box)
        object.__setattr__(self, "score", float(self.score))


MIN_SCORE, MIN_COUNTING_SCORE = 0.3, 0.9
"""Confidences that a detection must exceed, the second one for the task of counting."""

_MAX_OBJECTS = 16  # best of a class that are kept
_DEAD_ZONE = 0.1  # share of both sizes that an offset must exceed before it counts as a relation


def keep_detections(detections: Iterable[Detection], tag: str) -> dict[str, list[Detection]]:
    """The detections that count, by class, best first: above the threshold of the task, at most 16 of a class.

    Empty classes are absent. Equal scores keep their order. Boxes that overlap all stay, as in the benchmark's default.
    """
    least = MIN_COUNTING_SCORE if tag == "counting" else MIN_SCORE
    kept: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda found: -found.score):
        if detection.score > least and len(kept.setdefault(detection.label, [])) < _MAX_OBJECTS:
            kept[detection.label].append(detection)
    return kept


def offset_direction(box_a: Box, box_b: Box) -> tuple[float, float]:
    """Direction of A seen from B after a dead zone: `sign(o) max(|o| - 0.1 (size_a + size_b), 0) / |o|_2`.

    `o = centre(A) - centre(B)`; the norm is that of the whole offset, so the result is shorter than a unit vector.
    (0, 0) where both shrunk components are below 1e-3.
    """
    offset = [((box_a[i] + box_a[i + 2]) - (box_b[i] + box_b[i + 2])) / 2 for i in (0, 1)]
    margin = [_DEAD_ZONE * (abs(box_a[i + 2] - box_a[i]) + abs(box_b[i + 2] - box_b[i])) for i in (0, 1)]
    shrunk = [math.copysign(max(abs(o) - m, 0.0), o) for o, m in zip(offset, margin, strict=True)]
    if max(abs(shrunk[0]), abs(shrunk[1])) < 1e-3:
        return 0.0, 0.0
    length = math.hypot(*offset)
    return shrunk[0] / length, shrunk[1] / length
