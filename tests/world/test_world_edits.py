"""Edits of the embedded world: the verifier accepts what was asked and nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from flowrl.world.edits import (
    TASKS,
    draw_edit,
    edit_record,
    edit_records,
    edit_verdict,
    edited_scene,
    random_edit,
    source_scene,
)
from flowrl.world.scenes import Shape, draw_scene

CIRCLE = Shape(label="circle", color="red", x=18.0, y=20.0, radius=10.0)
SQUARE = Shape(label="square", color="green", x=46.0, y=44.0, radius=9.0)
SCENE = (CIRCLE, SQUARE)


def changed(shape: Shape, **values: Any) -> Shape:
    return Shape(**{**{name: getattr(shape, name) for name in ("label", "color", "x", "y", "radius")}, **values})


def judged(record: dict[str, Any], *shapes: Shape) -> tuple[float, float, bool]:
    found = edit_verdict(draw_scene(shapes), draw_edit(record)[0], record)
    return round(found.done, 3), round(found.kept, 3), found.correct


def test_what_is_drawn_as_the_edit_is_correct_and_the_source_never_is() -> None:
    for number in range(90):
        record = random_edit(np.random.default_rng(number), TASKS[number % 3])
        source, edited = draw_edit(record)
        assert edit_verdict(edited, source, record).correct, record["prompt"]
        assert edit_verdict(source, source, record).graded == 0, record["prompt"]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ((changed(CIRCLE, color="blue"), SQUARE), (1, 1, True)),
        ((CIRCLE, SQUARE), (0, 1, False)),  # nothing was done
        ((changed(CIRCLE, color="yellow"), SQUARE), (0.667, 1, False)),  # another colour
        ((changed(CIRCLE, color="blue", label="triangle"), SQUARE), (0.667, 1, False)),
        ((changed(CIRCLE, color="blue"), changed(SQUARE, color="blue")), (1, 0, False)),  # the other one too
        ((changed(CIRCLE, color="blue"),), (1, 0, False)),  # the other one is gone
        ((changed(CIRCLE, color="blue", x=40.0, y=16.0), SQUARE), (0, 0.5, False)),  # it moved
        ((SQUARE,), (0, 1, False)),
        ((changed(CIRCLE, color="blue"), SQUARE, changed(CIRCLE, x=46.0, y=14.0)), (1, 0.5, False)),  # one more
    ],
)
def test_recolour(shapes: tuple[Shape, ...], expected: tuple[float, float, bool]) -> None:
    record = edit_record("recolor", SCENE, 0, "blue")
    assert record["prompt"] == "make the circle blue"
    assert judged(record, *shapes) == expected


def test_remove_and_replace() -> None:
    remove = edit_record("remove", SCENE, 1)
    assert remove["prompt"] == "remove the square"
    assert judged(remove, CIRCLE) == (1, 1, True)
    assert judged(remove, CIRCLE, SQUARE) == (0, 1, False)
    assert judged(remove) == (1, 0, False)
    turn = edit_record("replace", SCENE, 1, "triangle")
    assert turn["prompt"] == "turn the square into a triangle"
    assert judged(turn, CIRCLE, changed(SQUARE, label="triangle")) == (1, 1, True)
    assert judged(turn, CIRCLE, changed(SQUARE, label="triangle", color="red"))[0] == 0.667
    assert judged(turn, CIRCLE, SQUARE)[0] == 0


def test_scenes_of_a_record() -> None:
    record = json.loads(json.dumps(edit_record("recolor", SCENE, 0, "blue")))
    assert source_scene(record) == SCENE
    assert edited_scene(record) == (changed(CIRCLE, color="blue"), SQUARE)


def test_training_and_held_out_share_no_scene() -> None:
    train, held_out = edit_records()
    assert (len(train), len(held_out)) == (384, 128)
    assert not {json.dumps(r["scene"]) for r in train} & {json.dumps(r["scene"]) for r in held_out}


def test_edits_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="the circle is red already"):
        edit_record("recolor", SCENE, 0, "red")
    with pytest.raises(ValueError, match="unknown edit 'paint': the world has recolor, remove, replace"):
        edit_record("paint", SCENE, 0, "blue")
    with pytest.raises(ValueError, match="must have one size"):
        edit_verdict(draw_scene(SCENE), draw_scene(SCENE, 32), edit_record("remove", SCENE, 0))
