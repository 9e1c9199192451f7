"""GenEval: does an image show the objects, counts, colours and positions that its prompt asks for?

The rules of Ghosh et al. 2023 (arXiv 2310.11513) on the output of any detector, and the two scores that Flow-GRPO
(Liu et al. 2025, arXiv 2505.05470, section 5.1) made of them: `graded` credit, on which it trains, and `strict`.

A record is one line of GenEval's metadata file, with an optional list `exclude` of `{class, count}`:

    {"tag": "position", "prompt": "a photo of a dog right of a teddy bear",
     "include": [{"class": "teddy bear", "count": 1}, {"class": "dog", "count": 1, "position": ["right of", 0]}]}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.benchmarks.geneval.metadata import COLORS, RELATIONS, Clause, Record, parse_record
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


ColorFn = Callable[[Detection], str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The benchmark's answer for one image; `reason` holds one line for each clause that failed, else it is empty."""

    correct: bool
    reason: str


def verdict(
    detections: Iterable[Detection], metadata: Mapping[str, Any] | Record, color_of: ColorFn | None = None
) -> Verdict:
    """Judges one image by the benchmark's own rule.

    Each include clause looks at its `count` most confident objects only, so extra objects harm nothing unless an
    exclude clause forbids them. A position is judged only if its own clause holds so far and its reference holds too.

    Args:
        detections: what the detector found, unfiltered; the thresholds are applied here.
        metadata: the record of the prompt, read or not.
        color_of: names the colour of one detection; needed only for records that ask for colours.

    Raises ValueError for a malformed record, or one that asks for a colour when `color_of` is missing.
    """
    record = parse_record(metadata)
    color_fn = _color_fn(record, color_of)
    kept = keep_detections(detections, record.tag)
    reasons: list[str] = []
    matched: list[list[Detection] | None] = []  # the objects of each clause, None where the clause does not hold
    for clause in record.include:
        found = kept.get(clause.label, [])[: clause.count]
        reason = _clause_failure(clause, found, matched, color_fn)
        reasons.extend([reason] if reason else [])
        matched.append(None if reason else found)
    for clause in record.exclude:
        number = len(kept.get(clause.label, []))
        if number >= clause.count:
            reasons.append(f"expected {clause.label}<{clause.count}, found {number}")
    return Verdict(not reasons, "\n".join(reasons))


def _color_fn(record: Record, color_of: ColorFn | None) -> ColorFn:
    """`color_of`, after a check that it is there if any clause needs it, whatever was detected."""
    colored = [clause for clause in record.include if clause.color is not None]
    if color_of is not None:
        return color_of
    if colored:
        raise ValueError(
            f"the record asks for a {colored[0].color} {colored[0].label}, but color_of is None: pass a function that "
            f"names the colour of a detection."
        )
    return lambda detection: ""


def _clause_failure(
    clause: Clause, found: list[Detection], matched: list[list[Detection] | None], color_of: ColorFn
) -> str:
    """Why a clause does not hold under the benchmark's rule, in the benchmark's words; "" if it holds."""
    if len(found) < clause.count:
        return f"expected {clause.label}>={clause.count}, found {len(found)}"
    if clause.color is not None:
        seen = [color_of(detection) for detection in found]
        if (right := seen.count(clause.color)) < clause.count:
            names = [*COLORS, *sorted(set(seen).difference(COLORS))]
            listing = ", ".join(f"{seen.count(name)} {name}" for name in names if name in seen)
            return (
                f"expected {clause.color} {clause.label}>={clause.count}, found {right} {clause.color}; and {listing}"
            )
    if clause.position is not None:
        relation, target = clause.position
        reference = matched[target]
        if reference is None:
            return f"no target for {clause.label} to be {relation}"
        seen_relations = first_violation(found, reference, relation)
        if seen_relations is not None:
            names_found = " and ".join(sorted(seen_relations))
            return f"expected {clause.label} {relation} target, found {names_found} target"
    return ""


def relations(box_a: Box, box_b: Box) -> frozenset[str]:
    """Where A is, seen from B: each component of `offset_direction` beyond one half is a relation; up to two hold."""
    dx, dy = offset_direction(box_a, box_b)
    holds = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return frozenset(name for name in RELATIONS if holds[name])


def first_violation(
    subjects: Sequence[Detection], references: Sequence[Detection], relation: str
) -> frozenset[str] | None:
    """The relations of the first pair (subject, reference) that lacks `relation`; None if every pair has it."""
    for subject in subjects:
        for reference in references:
            seen = relations(subject.box, reference.box)
            if relation not in seen:
                return seen
    return None


def graded(
    detections: Iterable[Detection],
    metadata: Mapping[str, Any] | Record,
    color_of: ColorFn | None = None,
    *,
    reference_position_quirk: bool = True,
) -> float:
    """Partial credit for one image: the mean of the terms below over all include clauses; exclude is ignored.

    With m objects kept where the clause asks for n, k of them in the colour asked for:

        count       1 - |n - m| / n                         may be negative
        m != n      one further 0 if the clause has a colour or a position; nothing else of the clause is looked at
        colour      1 - |n - k| / n
        position    (only where the colour holds) 0 if the reference clause does not hold, else 1 if every pair of
                    objects has the relation and 0 if not

    Unlike `verdict` it asks for exactly n objects and looks at all that were kept (Flow-GRPO, section 5.1).

    Args:
        detections: what the detector found, unfiltered.
        metadata: the record of the prompt, read or not.
        color_of: names the colour of one detection; needed only for records that ask for colours.
        reference_position_quirk: the published reward code adds a 1 after the 0 of a wrong relation too, so that a
            wrong relation between the right objects earns 0.75, not 2/3. True reproduces it, False leaves the 1 away.

    Returns a number of at most 1; 1 if and only if `strict` holds.
    """
    terms, _ = _exact_terms(detections, metadata, color_of, reference_position_quirk)
    return sum(terms) / len(terms)


def strict(
    detections: Iterable[Detection], metadata: Mapping[str, Any] | Record, color_of: ColorFn | None = None
) -> bool:
    """True if every include clause holds with exactly its count, exactly its coloured count and every relation."""
    _, holds = _exact_terms(detections, metadata, color_of, True)
    return holds


def _exact_terms(
    detections: Iterable[Detection], metadata: Mapping[str, Any] | Record, color_of: ColorFn | None, quirk: bool
) -> tuple[list[float], bool]:
    """The terms of `graded`, and whether every clause holds exactly."""
    record = parse_record(metadata)
    color_fn = _color_fn(record, color_of)
    kept = keep_detections(detections, record.tag)
    terms: list[float] = []
    matched: list[list[Detection] | None] = []
    for clause in record.include:
        found = kept.get(clause.label, [])
        count, number = clause.count, len(found)
        right = number
        terms.append(1 - abs(count - number) / count)
        if number != count and (clause.color is not None or clause.position is not None):
            terms.append(0.0)
        elif clause.color is not None:
            right = sum(color_fn(detection) == clause.color for detection in found)
            terms.append(1 - abs(count - right) / count)
        holds = right == count
        if holds and clause.position is not None:
            relation, target = clause.position
            reference = matched[target]
            holds = reference is not None and first_violation(found, reference, relation) is None
            terms.append(float(holds))
            if quirk and reference is not None and not holds:
                terms.append(1.0)
        matched.append(found if holds else None)
    return terms, all(group is not None for group in matched)
