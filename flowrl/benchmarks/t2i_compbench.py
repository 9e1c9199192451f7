"""T2I-CompBench and T2I-CompBench++: how answers of detectors and question models become scores.

Huang et al. 2023 (arXiv 2307.06350) and its extension; repository Karine-Huang/T2I-CompBench (MIT). Eight categories of
300 validation prompts, ten images a prompt. An image's name is its prompt and a number that runs over the whole
category; every score is written as a list of `{"question_id": number, "answer": score}`.

    color, shape, texture      product over noun phrases of P(yes) of BLIP-VQA           `attribute_score`
    2d_spatial                 two boxes of UniDet                                       `spatial_2d`
    3d_spatial                 the same with depth: by the repository's own script
    numeracy                   boxes of UniDet                                           `numeracy`
    non_spatial                CLIPScore (the reward `clip_score`)
    complex                    the mean of two or three of the above                     `three_in_one`

A detector or question model other than the published one gives scores of its own, not those of the papers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowrl.benchmarks.geneval.detections import Box, Detection, iou
from flowrl.config.options import unknown_name

CATEGORIES = ("color", "shape", "texture", "2d_spatial", "3d_spatial", "numeracy", "non_spatial", "complex")
IMAGES_PER_PROMPT = 10

NEAR_PIXELS = 150.0
SOFT_IOU = 0.1
LOWEST_SPATIAL = 0.5
"""Below it a spatial score is 0, so that objects without the relation earn nothing."""

_SIDES = {"left": (1, 0), "right": (-1, 0), "top": (0, 1), "above": (0, 1), "bottom": (0, -1), "below": (0, -1)}
_NEAR = ("near", "next", "side")


def attribute_score(yes: Sequence[float]) -> float:
    """The product of P(yes) over the noun phrases of a prompt; 1 where there are none."""
    return math.prod(yes)


def spatial_2d(subject: Detection | None, reference: Detection | None, relation: str) -> float:
    """`s/4 + s'/4 + position/2` of the two objects' confidences; one alone counts its own; below 1/2 it becomes 0.

    Args:
        subject: the object named first, None where it was not found.
        reference: the one named last.
        relation: words that hold left, right, top, above, bottom, below, near, next or side.

    Raises:
        ValueError: a relation without any of these words.
    """
    found = [detection for detection in (subject, reference) if detection is not None]
    score = sum(0.25 * detection.score for detection in found)
    position = 0.0 if subject is None or reference is None else position_2d(subject.box, reference.box, relation)
    score += 0.5 * position
    _words(relation)
    return score if score >= LOWEST_SPATIAL else 0.0


def position_2d(subject: Box, reference: Box, relation: str) -> float:
    """How far a relation holds, in [0, 1].

    A side holds if the centres lie that way and farther apart along it than across: 1, or 0.1/IoU for boxes that
    overlap by 0.1 or more. Nearness is 1 below 150 pixels in either direction, else 150 over the larger distance.
    """
    dx, dy = ((reference[i] + reference[i + 2] - subject[i] - subject[i + 2]) / 2 for i in (0, 1))
    side = _words(relation)
    if side is None:
        near = abs(dx) < NEAR_PIXELS or abs(dy) < NEAR_PIXELS
        return 1.0 if near else NEAR_PIXELS / max(abs(dx), abs(dy))
    along, across = (side[0] * dx, dy) if side[0] else (side[1] * dy, dx)
    if along <= 0 or along <= abs(across):
        return 0.0
    overlap = _share(subject, reference)
    return 1.0 if overlap < SOFT_IOU else SOFT_IOU / overlap


def _words(relation: str) -> tuple[int, int] | None:
    """The direction from subject to reference, None for nearness."""
    words = re.findall(r"[a-z]+", relation.lower())
    if any(word in _NEAR for word in words):
        return None
    sides = [_SIDES[word] for word in words if word in _SIDES]
    if not sides:
        raise ValueError(f"{unknown_name('relation', relation, (*_SIDES, *_NEAR))}")
    return sides[0]


def _share(a: Box, b: Box) -> float:
    """Intersection over union of boxes as areas, without the inclusive pixel of `iou`."""
    width, height = (max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    union = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - width * height
    return width * height / union if union > 0 else 0.0


def numeracy(wanted: Mapping[str, int], detections: Sequence[Detection]) -> float:
    """Mean over the named objects of 1/2 for being there and 1/2 for being there exactly as often as asked.

    Detections of one class of which one covers more than 0.9 of another, or whose IoU is larger, count once.

    Args:
        wanted: counts by class name; the names of synonyms (ship, boat) are the caller's to match.
        detections: what was found, in the detector's order.

    Raises:
        ValueError: nothing is wanted.
    """
    if not wanted:
        raise ValueError("numeracy needs the objects that the prompt names, got none.")
    kept: list[Detection] = []
    for detection in detections:
        if not any(detection.label == other.label and _same(detection.box, other.box) for other in kept):
            kept.append(detection)
    found = [detection.label for detection in kept]
    return sum(
        0.5 * (name in found) + 0.5 * (name in found and found.count(name) == number) for name, number in wanted.items()
    ) / len(wanted)


def _same(a: Box, b: Box) -> bool:
    area_a, area_b = ((box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b))
    share = iou(a, b)
    common = share * (area_a + area_b) / (1 + share)
    return max(share, common / area_a, common / area_b) > 0.9


def three_in_one(attribute: float, spatial: float | None, action: float | None) -> float:
    """The complex score: the mean of the attribute score and of those of spatial relation and action that a prompt has.

    Args:
        attribute: of the noun phrases.
        spatial: None for the prompts of the repository's list `complex_val_action`.
        action: the non-spatial score; None for those of `complex_val_spatial`.

    Raises:
        ValueError: neither is given.
    """
    parts = [part for part in (attribute, spatial, action) if part is not None]
    if len(parts) < 2:
        raise ValueError("three_in_one needs a spatial or an action score beside that of the attributes, got neither.")
    return math.fsum(parts) / len(parts)


def overall(categories: Mapping[str, float]) -> float:
    """The mean of the eight categories, times 100, as Pref-GRPO prints it.

    Raises:
        ValueError: a category is missing or unknown: a mean of fewer would be another number.
    """
    if set(categories) != set(CATEGORIES):
        given = ", ".join(sorted(categories)) or "none"
        raise ValueError(f"the overall needs all of {', '.join(CATEGORIES)}, got {given}.")
    return 100.0 * math.fsum(categories.values()) / len(CATEGORIES)


def file_name(prompt: str, number: int) -> str:
    """`<prompt>_<number>.png`, the number with six digits, counted over all images of the category.

    Raises:
        ValueError: a prompt that cannot be part of a file's name, or that the scripts would cut at its first "_".
    """
    name = f"{prompt}_{number:06d}.png"
    if not prompt or "/" in prompt or "_" in prompt or len(name.encode()) > 255:
        raise ValueError(f"the prompt {prompt[:80]!r} cannot name a file of T2I-CompBench: it needs 1 to about 240 "
                         f"bytes without / and _.")  # fmt: skip
    return name


def parse_file_name(name: str) -> tuple[str, int]:
    """Prompt and number of an image's name.

    Raises:
        ValueError: another form.
    """
    found = re.fullmatch(r"([^_/]+)_(\d+)\.(?:png|jpe?g)", name)
    if found is None:
        raise ValueError(f"an image of T2I-CompBench is named <prompt>_<number>.png, got {name!r}.")
    return found[1], int(found[2])


def results_text(scores: Mapping[int, float]) -> str:
    """The JSON text of a `vqa_result.json`, in the order of the numbers."""
    return json.dumps([{"question_id": number, "answer": scores[number]} for number in sorted(scores)])


def read_results(path: Path) -> dict[int, float]:
    """Scores by number of a `vqa_result.json`; answers may be written as texts.

    Raises:
        ValueError: another form, or a number twice.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        scores = {int(row["question_id"]): float(row["answer"]) for row in rows}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: needs a list of {{question_id, answer}} ({error}).") from error
    if len(scores) != len(rows) or not rows:
        raise ValueError(f"{path}: {len(rows)} entries have {len(scores)} different numbers: each must occur once.")
    return scores
