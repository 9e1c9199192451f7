"""GenEval's rules against worked examples and hand-computed numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from geneval_cases import SQUARE, clause, objects, record

from flowrl.benchmarks.geneval.metadata import RELATIONS, TASKS
from flowrl.benchmarks.geneval.rules import (
    Box,
    Detection,
    Verdict,
    graded,
    keep_detections,
    offset_direction,
    relations,
    strict,
    verdict,
)
from flowrl.statistics.means import ScoreRow
from flowrl.statistics.paired import summarise


def painted(*colored: tuple[str, str]) -> tuple[list[Detection], Callable[[Detection], str]]:
    """Objects (label, colour), best first, and the colour function that knows them."""
    found = [Detection(label, box=SQUARE, score=0.99 - 0.001 * i) for i, (label, _) in enumerate(colored)]
    names = {detection.score: color for detection, (_, color) in zip(found, colored, strict=True)}
    return found, lambda detection: names[detection.score]


DOG = record(clause("dog"))
PAIR = record(clause("bench"), clause("sports ball"), tag="two_object")
CLOCKS = record(clause("clock", 2), tag="counting", exclude=[clause("clock", 3)])
PINK_CAR = record(clause("car", color="pink"), tag="colors")
GLASS = record(clause("wine glass", color="purple"), clause("apple", color="black"), tag="color_attr")
CUPS = record(clause("cup", 3, color="blue"), tag="colors")
BEAR = record(clause("teddy bear"), clause("dog", position=["right of", 0]), tag="position")


def bear_and(*dogs: Box, bears: int = 1) -> list[Detection]:
    dog_boxes = [Detection("dog", box=box, score=0.9 - 0.01 * i) for i, box in enumerate(dogs)]
    return objects("teddy bear", bears) + dog_boxes


@pytest.mark.parametrize(
    ("scores", "tag", "kept"),
    [
        ([0.30, 0.95, 0.29, 0.35], "single_object", [0.95, 0.35]),
        ([0.91, 0.95, 0.90], "counting", [0.95, 0.91]),
        ([0.99] * 20, "counting", [0.99] * 16),
    ],
)
def test_keep_detections_threshold_order_and_cap(scores: list[float], tag: str, kept: list[float]) -> None:
    found = [Detection("dog", box=SQUARE, score=score) for score in scores]
    assert [detection.score for detection in keep_detections(found, tag)["dog"]] == kept


def test_keep_detections_leaves_out_classes_with_nothing_left() -> None:
    assert keep_detections([Detection("dog", box=SQUARE, score=0.3)], "colors") == {}


def test_boxes_that_overlap_all_stay() -> None:
    assert len(keep_detections([Detection("dog", box=SQUARE, score=0.9)] * 2, "colors")["dog"]) == 2


@pytest.mark.parametrize(
    ("number", "correct", "reason"),
    [
        (1, False, "expected clock>=2, found 1"),
        (2, True, ""),
        (3, False, "expected clock<3, found 3"),
        (16, False, "expected clock<3, found 16"),
        (20, False, "expected clock<3, found 16"),
    ],
)
def test_verdict_counts(number: int, correct: bool, reason: str) -> None:
    assert verdict(objects("clock", number), CLOCKS) == Verdict(correct, reason)


@pytest.mark.parametrize(
    ("metadata", "found", "reason"),
    [
        (DOG, objects("dog", 1), ""),
        (DOG, [], "expected dog>=1, found 0"),
        (DOG, objects("dog", 3), ""),
        (PAIR, objects("bench", 1), "expected sports ball>=1, found 0"),
        (PAIR, [], "expected bench>=1, found 0\nexpected sports ball>=1, found 0"),
    ],
)
def test_verdict_objects(metadata: dict[str, Any], found: list[Detection], reason: str) -> None:
    assert verdict(found, metadata) == Verdict(not reason, reason)


@pytest.mark.parametrize(
    ("metadata", "colored", "reason"),
    [
        (PINK_CAR, [("car", "pink"), ("car", "red")], ""),
        (PINK_CAR, [("car", "red"), ("car", "pink")], "expected pink car>=1, found 0 pink; and 1 red"),
        (
            GLASS,
            [("wine glass", "purple"), ("apple", "red")],
            "expected black apple>=1, found 0 black; and 1 red",
        ),
        (
            GLASS,
            [("wine glass", "black"), ("apple", "purple")],
            "expected purple wine glass>=1, found 0 purple; and 1 black\n"
            "expected black apple>=1, found 0 black; and 1 purple",
        ),
        (
            CUPS,
            [("cup", "blue"), ("cup", "white"), ("cup", "green")],
            "expected blue cup>=3, found 1 blue; and 1 green, 1 blue, 1 white",
        ),
    ],
)
def test_verdict_colors(metadata: dict[str, Any], colored: list[tuple[str, str]], reason: str) -> None:
    found, color_of = painted(*colored)
    assert verdict(found, metadata, color_of=color_of) == Verdict(not reason, reason)


@pytest.mark.parametrize(
    ("dog", "reason"),
    [
        ((60, 0, 100, 40), ""),
        ((-60, 0, -20, 40), "expected dog right of target, found left of target"),
        ((8, 0, 48, 40), "expected dog right of target, found  target"),
        ((60, 60, 100, 100), ""),
        ((0, -60, 40, -20), "expected dog right of target, found above target"),
        ((-60, -60, -20, -20), "expected dog right of target, found above and left of target"),
    ],
)
def test_verdict_positions(dog: Box, reason: str) -> None:
    assert verdict(bear_and(dog), BEAR) == Verdict(not reason, reason)


def test_verdict_position_without_reference_or_subject() -> None:
    no_reference = "expected teddy bear>=1, found 0\nno target for dog to be right of"
    assert verdict(bear_and((60, 0, 100, 40), bears=0), BEAR) == Verdict(False, no_reference)
    assert verdict(bear_and(), BEAR) == Verdict(False, "expected dog>=1, found 0")


@pytest.mark.parametrize(
    ("box_a", "box_b", "expected"),
    [
        ((60, 60, 100, 100), SQUARE, {"right of", "below"}),
        ((60, 30, 100, 70), SQUARE, {"right of"}),
        ((9, 0, 49, 40), SQUARE, set()),
        ((16, 0, 56, 40), SQUARE, set()),
        ((17, 0, 57, 40), SQUARE, {"right of"}),
        ((30, 30, 130, 130), (0, 0, 100, 100), set()),
        (SQUARE, SQUARE, set()),
        ((0, 0, 100, 100), (20, 0, 120, 100), set()),
        ((0, 0, 100, 100), (25, 0, 125, 100), set()),
    ],
)
def test_relations(box_a: Box, box_b: Box, expected: set[str]) -> None:
    assert relations(box_a, box_b) == expected


@pytest.mark.parametrize(
    ("box_a", "box_b", "direction", "expected"),
    [
        ((0, 0, 100, 100), (200, 0, 300, 100), (-0.9, 0.0), {"left of"}),
        ((0, 0, 100, 100), (150, 150, 250, 250), (-0.6128, -0.6128), {"left of", "above"}),
        ((0, 0, 100, 100), (25, 0, 125, 100), (-0.2, 0.0), set()),
        ((0, 0, 100, 100), (300, 200, 400, 300), (-0.7766, -0.4992), {"left of"}),
        ((0, 200, 100, 300), (0, 0, 100, 100), (0.0, 0.9), {"below"}),
    ],
)
def test_offset_direction(box_a: Box, box_b: Box, direction: tuple[float, float], expected: set[str]) -> None:
    assert offset_direction(box_a, box_b) == pytest.approx(direction, abs=5e-5)
    assert relations(box_a, box_b) == expected


def test_relations_mirror() -> None:
    """Seen from the other side the opposite relations hold."""
    opposite = dict(zip(RELATIONS, ("right of", "left of", "below", "above"), strict=True))
    rng = np.random.default_rng(0)
    for _ in range(200):
        corner, size = rng.uniform(0, 100, (2, 2)), rng.uniform(1, 60, (2, 2))
        box_a, box_b = ((*corner[i], *(corner[i] + size[i])) for i in (0, 1))
        assert relations(box_b, box_a) == {opposite[name] for name in relations(box_a, box_b)}


def check_scores(
    metadata: dict[str, Any],
    found: list[Detection],
    expected: tuple[float, bool, bool],
    color_of: Callable[[Detection], str] | None = None,
) -> None:
    value, exact, official = expected
    assert graded(found, metadata, color_of) == pytest.approx(value, abs=1e-6)
    assert strict(found, metadata, color_of) is exact
    assert verdict(found, metadata, color_of).correct is official


@pytest.mark.parametrize(
    ("metadata", "found", "expected"),
    [
        (DOG, objects("dog", 3), (-1.0, False, True)),
        *((CLOCKS, objects("clock", m), (1 - abs(2 - m) / 2, m == 2, m == 2)) for m in range(6)),
        (
            record(clause("cat", 3), tag="counting", exclude=[clause("cat", 4)]),
            objects("cat", 4),
            (2 / 3, False, False),
        ),
        (PAIR, objects("bench", 1), (0.5, False, False)),
        (PAIR, objects("bench", 2) + objects("sports ball", 1), (0.5, False, True)),
        (BEAR, bear_and((60, 0, 100, 40)), (1.0, True, True)),
        (BEAR, bear_and((-60, 0, -20, 40)), (0.75, False, False)),
        (BEAR, bear_and((60, 0, 100, 40), bears=0), (1 / 3, False, False)),
        (BEAR, bear_and((60, 0, 100, 40), bears=2), (1 / 3, False, True)),
        (BEAR, bear_and(), (1 / 3, False, False)),
        (BEAR, bear_and((60, 0, 100, 40), (60, 0, 100, 40)), (1 / 3, False, True)),
    ],
)
def test_graded_strict_official(metadata: dict[str, Any], found: list[Detection], expected: Any) -> None:
    check_scores(metadata, found, expected)


@pytest.mark.parametrize(
    ("metadata", "colored", "expected"),
    [
        (PINK_CAR, [("car", "pink")], (1.0, True, True)),
        (PINK_CAR, [("car", "red")], (0.5, False, False)),
        (PINK_CAR, [], (0.0, False, False)),
        (PINK_CAR, [("car", "pink"), ("car", "pink")], (0.0, False, True)),
        (GLASS, [("wine glass", "purple"), ("apple", "black")], (1.0, True, True)),
        (GLASS, [("wine glass", "purple"), ("apple", "red")], (0.75, False, False)),
        (GLASS, [("wine glass", "black"), ("apple", "purple")], (0.5, False, False)),
        (GLASS, [("wine glass", "purple")], (0.5, False, False)),
    ],
)
def test_graded_colors(metadata: dict[str, Any], colored: list[tuple[str, str]], expected: Any) -> None:
    found, color_of = painted(*colored)
    check_scores(metadata, found, expected, color_of)


@pytest.mark.parametrize(
    ("number", "term"), [(0, 0), (1, 1 / 3), (2, 2 / 3), (3, 1), (4, 2 / 3), (6, 0), (7, -1 / 3), (9, -1)]
)
def test_graded_count_term(number: int, term: float) -> None:
    assert graded(objects("cat", number), record(clause("cat", 3), tag="counting")) == pytest.approx(term)


def test_graded_wrong_relation_with_and_without_the_published_quirk() -> None:
    wrong, right = bear_and((-60, 0, -20, 40)), bear_and((60, 0, 100, 40))
    assert graded(wrong, BEAR, reference_position_quirk=True) == 0.75
    assert graded(wrong, BEAR, reference_position_quirk=False) == pytest.approx(2 / 3)
    assert graded(right, BEAR, reference_position_quirk=False) == 1.0
    missing = bear_and((60, 0, 100, 40), bears=0)
    assert graded(missing, BEAR, reference_position_quirk=False) == pytest.approx(1 / 3)


def test_scores_look_only_at_detections_above_the_threshold_of_the_task() -> None:
    doubtful = objects("clock", 1) + objects("clock", 1, first=0.85)
    assert graded(doubtful, CLOCKS) == 0.5
    assert graded(doubtful, {**CLOCKS, "tag": "single_object"}) == 1.0


def test_counts_of_six_tasks_give_their_means() -> None:
    """Macro, micro and prompts with a right image, worked out by hand."""
    counts = dict(zip(TASKS, [(289, 320), (214, 396), (120, 320), (303, 376), (32, 400), (60, 364)], strict=True))
    rows = [
        ScoreRow(task=task, prompt=i // 4, sample=i % 4, value=float(i < correct))
        for task, (correct, total) in counts.items()
        for i in range(total)
    ]
    found = summarise(rows, order=TASKS)
    assert [score.mean for score in found.tasks.values()] == pytest.approx(
        [0.903125, 0.540404, 0.375, 0.805851, 0.08, 0.164835], abs=1e-6
    )
    assert found.macro.mean == pytest.approx(0.478203, abs=1e-6)
    assert found.micro.mean == pytest.approx(1018 / 2176)
    # A prompt counts once any of its four images is right: ceil(correct / 4) of each task in this table.
    assert found.any_correct.mean == pytest.approx(sum(math.ceil(c / 4) for c, _ in counts.values()) / 544)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"prompt": "a dog"}, r"prompt 'a dog' lacks tag and include.*JSONL"),
        (
            record(clause("dog"), tag="colours"),
            r"unknown tag 'colours' \(did you mean .colors.*allowed: color_attr",
        ),
        (record(), "include is empty"),
        ({"tag": "colors", "include": "dog"}, "include must be a list"),
        (record({"class": "dog"}), r"include\[0\] must be a mapping with class and count"),
        (record(clause("dog", 0)), "count must be a whole number of at least 1, got 0"),
        (record(clause("dog", True)), "count must be a whole number"),
        (record(clause("", 1)), "class must be a name"),
        (record(clause("dog", colour="red")), "colour, which no rule reads; allowed are class, color"),
        (record(clause("dog", color="rde")), r"unknown include\[0\].color 'rde' \(did you mean 'red'"),
        (record(clause("dog"), exclude=[clause("cat", color="red")]), r"exclude\[0\] has color, which no rule reads"),
        (record(clause("dog", position=["above", 0])), r"refers to include\[0\], but only earlier clauses"),
        (
            record(clause("cat"), clause("dog", position=["over", 0])),
            r"unknown include\[1\] relation .over.*allowed: above",
        ),
        (record(clause("cat"), clause("dog", position="above")), "position must be"),
        ("a photo of a dog", "must be a mapping"),
    ],
)
def test_malformed_records_are_refused(metadata: Any, message: str) -> None:
    for rule in (verdict, graded, strict):
        with pytest.raises(ValueError, match=message):
            rule([], metadata)


def test_a_record_with_colors_needs_a_color_function_whatever_was_detected() -> None:
    for rule in (verdict, graded, strict):
        with pytest.raises(ValueError, match="asks for a pink car, but color_of is None"):
            rule([], PINK_CAR)


@pytest.mark.parametrize(("box", "score"), [((0, 0, 1), 0.5), ((0, 0, 1, math.nan), 0.5), (SQUARE, math.inf)])
def test_detections_with_broken_numbers_are_refused(box: Any, score: float) -> None:
    with pytest.raises(ValueError, match="four finite numbers"):
        Detection("dog", box=box, score=score)
