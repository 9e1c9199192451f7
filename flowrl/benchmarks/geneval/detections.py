"""What a detector found, which of it counts, and how two boxes lie to each other (GenEval's constants and geometry).

Boxes are `(x1, y1, x2, y2)` in pixels, x to the right, y down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool

from flowrl.benchmarks.geneval.metadata import RELATIONS

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """The benchmark's constants; anything but the defaults is no longer GenEval.

    `score` (and `counting` for the counting task) must be exceeded by a detection's confidence; the best `max_objects`
    of a class are kept; `max_overlap` < 1 switches non-maximum suppression on; `position` is the share of both sizes
    that an offset must exceed before it counts as a relation.
    """

    score: float = 0.3
    counting: float = 0.9
    max_objects: int = 16
    max_overlap: float = 1.0
    position: float = 0.1


GENEVAL_THRESHOLDS = Thresholds()


def iou(box_a: Box, box_b: Box) -> float:
    """Intersection over union with inclusive pixels, side = max(x2 - x1 + 1, 0); 0 where the union is empty."""

    def area(x1: float, y1: float, x2: float, y2: float) -> float:
        return max(x2 - x1 + 1, 0.0) * max(y2 - y1 + 1, 0.0)

    common = area(*(max(a, b) for a, b in zip(box_a[:2], box_b[:2], strict=True)),
                  *(min(a, b) for a, b in zip(box_a[2:], box_b[2:], strict=True)))  # fmt: skip
    union = area(*box_a) + area(*box_b) - common
    return common / union if union else 0.0


def keep_detections(
    detections: Iterable[Detection], tag: str, thresholds: Thresholds = GENEVAL_THRESHOLDS
) -> dict[str, list[Detection]]:
    """The detections that count, by class, best first: above the threshold of the task, at most 16, after suppression.

    Classes with nothing left are absent. Equal scores keep the detector's order.
    """
    least = thresholds.counting if tag == "counting" else thresholds.score
    kept: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda found: -found.score):
        objects = kept.setdefault(detection.label, [])
        if detection.score > least and len(objects) < thresholds.max_objects:
            objects.append(detection)
    if thresholds.max_overlap < 1.0:  # the cap comes first, as in the benchmark: suppressed boxes are not replaced
        for label, objects in kept.items():
            kept[label] = _suppress(objects, thresholds.max_overlap)
    return {label: objects for label, objects in kept.items() if objects}


def _suppress(objects: Sequence[Detection], max_overlap: float) -> list[Detection]:
    """Greedy non-maximum suppression of one class, best first: a box goes if it overlaps a kept one too much."""
    kept: list[Detection] = []
    for candidate in objects:
        if all(iou(winner.box, candidate.box) < max_overlap for winner in kept):
            kept.append(candidate)
    return kept


def offset_direction(box_a: Box, box_b: Box, threshold: float = 0.1) -> tuple[float, float]:
    """Direction of A seen from B after a dead zone: `sign(o) max(|o| - threshold (size_a + size_b), 0) / |o|_2`.

    `o = centre(A) - centre(B)`; the norm is that of the whole offset, so the result is shorter than a unit vector.
    (0, 0) where both shrunk components are below 1e-3.
    """
    offset = [((box_a[i] + box_a[i + 2]) - (box_b[i] + box_b[i + 2])) / 2 for i in (0, 1)]
    margin = [threshold * (abs(box_a[i + 2] - box_a[i]) + abs(box_b[i + 2] - box_b[i])) for i in (0, 1)]
    shrunk = [math.copysign(max(abs(o) - m, 0.0), o) for o, m in zip(offset, margin, strict=True)]
    if max(abs(shrunk[0]), abs(shrunk[1])) < 1e-3:
        return 0.0, 0.0
    length = math.hypot(*offset)
    return shrunk[0] / length, shrunk[1] / length


def relations(box_a: Box, box_b: Box, *, threshold: float = 0.1) -> frozenset[str]:
    """Where A is, seen from B: each component of `offset_direction` beyond one half is a relation; up to two hold."""
    dx, dy = offset_direction(box_a, box_b, threshold)
    holds = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return frozenset(name for name in RELATIONS if holds[name])


def first_violation(
    subjects: Sequence[Detection], references: Sequence[Detection], relation: str, threshold: float
) -> frozenset[str] | None:
    """The relations of the first pair (subject, reference) that lacks `relation`; None if every pair has it."""
    for subject in subjects:
        for reference in references:
            seen = relations(subject.box, reference.box, threshold=threshold)
            if relation not in seen:
                return seen
    return None
