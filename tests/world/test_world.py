"""The embedded world: what is drawn is what the record asks for, and the detector reads it back from pixels."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from flowrl.benchmarks.geneval import wording
from flowrl.benchmarks.geneval.metadata import TASKS
from flowrl.benchmarks.geneval.rules import Detection, verdict
from flowrl.world import scene_prompts as prompts
from flowrl.world import scenes
from flowrl.world.captions import neighbour
from flowrl.world.detector import color_of, detect_shapes
from flowrl.world.scenes import COLORS, SHAPES, Shape, draw_scene, random_scene

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "prompts"


def records_of_every_kind(count: int) -> list[prompts.Record]:
    rng = np.random.default_rng(0)
    groups = [[record for group in by_task for record in group] for by_task in prompts.combinations().values()]
    return [groups[i % 6][int(rng.integers(len(groups[i % 6])))] for i in range(count)]


def seen(image: np.ndarray) -> list[tuple[str, str]]:
    return sorted((d.label, color_of(image, d)) for d in detect_shapes(image))


def test_detector_agrees_with_what_was_drawn() -> None:
    rng = np.random.default_rng(1)
    agreed = correct = 0
    records = records_of_every_kind(300)
    for record in records:
        shapes = random_scene(record, rng)
        image = draw_scene(shapes)
        agreed += seen(image) == sorted((s.label, s.color) for s in shapes)
        correct += verdict(detect_shapes(image), record, color_of=partial(color_of, image)).correct
    assert agreed >= 0.995 * len(records)
    assert correct >= 0.99 * len(records)


def test_boxes_and_masks_lie_where_the_shape_was_drawn() -> None:
    for label in SHAPES:
        shape = Shape(label=label, color="blue", x=30.0, y=24.0, radius=10.0)
        (found,) = detect_shapes(draw_scene([shape]))
        assert found.label == label
        assert found.score > 0.9
        x1, y1, x2, y2 = found.box
        assert abs((x1 + x2) / 2 - 30.0) <= 1.5
        assert y1 >= 13
        assert y2 <= 35.5
        assert found.mask is not None
        assert found.mask[int(y1) : int(y2), int(x1) : int(x2)].sum() == found.mask.sum()


@pytest.mark.parametrize("color", list(COLORS))
def test_colors_survive_blur_and_noise(color: str) -> None:
    from PIL import Image, ImageFilter

    rng = np.random.default_rng(2)
    image = draw_scene([Shape(label="square", color=color, x=32.0, y=32.0, radius=11.0)])
    blurred = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(1.0)), dtype=np.float64)
    noisy = np.clip(blurred + rng.normal(0, 8, blurred.shape), 0, 255).astype(np.uint8)
    assert seen(noisy) == [("square", color)]


def test_empty_ground_foreign_ground_and_specks_hold_nothing() -> None:
    empty = draw_scene([])
    assert detect_shapes(empty) == []
    assert detect_shapes(np.full((64, 64, 3), (20, 90, 200), dtype=np.uint8)) == []
    speck = empty.copy()
    speck[30:33, 30:33] = (0, 0, 0)
    assert detect_shapes(speck) == []


def test_a_smear_between_two_outlines_scores_below_the_counting_threshold() -> None:
    image = draw_scene([Shape(label="circle", color="red", x=32.0, y=32.0, radius=12.0)]).copy()
    mask = np.zeros((64, 64), dtype=bool)
    mask[20:44, 20:44] = True  # a square whose corners are cut half way to a circle
    for corner in ((20, 20), (20, 43), (43, 20), (43, 43)):
        yy, xx = np.mgrid[:64, :64]
        mask &= np.abs(yy - corner[0]) + np.abs(xx - corner[1]) > 5
    image[mask] = COLORS["red"]
    (found,) = detect_shapes(image)
    assert found.score < 0.9


def test_color_of_needs_a_mask() -> None:
    with pytest.raises(ValueError, match="mask"):
        color_of(draw_scene([]), Detection("circle", box=(0, 0, 9, 9), score=1.0))


def test_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="hexagon"):
        scenes.outline("hexagon", 0, 0, 1)


def test_records_use_genevals_wording() -> None:
    assert wording.single_object("triangle")["prompt"] == "a photo of a triangle"
    assert wording.two_object("triangle", "circle")["prompt"] == "a photo of a triangle and a circle"
    assert wording.counting("triangle", 3) == {
        "tag": "counting",
        "include": [{"class": "triangle", "count": 3}],
        "exclude": [{"class": "triangle", "count": 4}],
        "prompt": "a photo of three triangles",
    }
    assert wording.position("triangle", "left of", "circle") == {
        "tag": "position",
        "include": [{"class": "circle", "count": 1}, {"class": "triangle", "count": 1, "position": ["left of", 0]}],
        "prompt": "a photo of a triangle left of a circle",
    }
    attributed = wording.color_attr("triangle", "red", "circle", "blue")
    assert attributed["prompt"] == "a photo of a red triangle and a blue circle"


def meaning(record: prompts.Record) -> str:
    """The record with the order of its clauses taken out."""
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    clauses = record["include"]
    if record["tag"] == "position":
        reference, subject = clauses
        a, relation, b = subject["class"], subject["position"][0], reference["class"]
        return str(min((a, relation, b), (b, opposite[relation], a)))
    return record["tag"] + str(sorted(json.dumps(clause, sort_keys=True) for clause in clauses))


def test_held_out_meanings_are_never_trained_on() -> None:
    train, held_out = prompts.split()
    assert tuple(train) == TASKS == tuple(held_out)
    for task in ("two_object", "colors", "position", "color_attr"):
        assert held_out[task]
        assert not {meaning(r) for r in train[task]} & {meaning(r) for r in held_out[task]}
    for task in TASKS:  # of these two the wordings are held out
        assert not {r["prompt"] for r in train[task]} & {r["prompt"] for r in held_out[task]}
    trained = {r["prompt"] for r in prompts.train_records()}
    assert trained <= {r["prompt"] for records in train.values() for r in records}


def test_the_held_out_list_has_as_many_of_each_task() -> None:
    counts = [sum(r["tag"] == task for r in prompts.eval_records()) for task in TASKS]
    assert counts == [80] * 6


def test_the_held_out_list_has_20_prompts_of_each_task_in_many_words() -> None:
    _, held_out = prompts.split()
    listed = {task: {r["prompt"] for r in prompts.eval_records() if r["tag"] == task} for task in TASKS}
    assert listed == {task: {record["prompt"] for record in records} for task, records in held_out.items()}
    assert [len(listed[task]) for task in TASKS] == [20] * 6  # what intervals have to go by
    for task in TASKS:
        openings = [next(o for o in prompts.OPENINGS if text.startswith(f"{o} ")) for text in listed[task]]
        assert set(openings) == set(prompts.OPENINGS)
        assert max(openings.count(opening) for opening in prompts.OPENINGS) <= 3
    shipped = (ASSETS / "world_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in shipped] == prompts.eval_records()


def test_a_neighbour_differs_in_one_thing_and_its_scene_is_wrong() -> None:
    rng = np.random.default_rng(4)
    for record in records_of_every_kind(120):
        shown = neighbour(record, rng)
        assert shown["tag"] == record["tag"]
        assert meaning(shown) != meaning(record)
        pixels = draw_scene(random_scene(shown, rng))
        assert not verdict(detect_shapes(pixels), record, color_of=partial(color_of, pixels)).correct
    with pytest.raises(ValueError, match="the world has single_object"):
        neighbour({"tag": "grid", "include": []}, rng)


def test_shapes_do_not_touch_and_stay_inside() -> None:
    rng = np.random.default_rng(3)
    for record in records_of_every_kind(200):
        shapes = random_scene(record, rng)
        for i, a in enumerate(shapes):
            assert a.radius <= min(a.x, a.y, scenes.SIZE - a.x, scenes.SIZE - a.y)
            for b in shapes[:i]:
                assert max(abs(a.x - b.x), abs(a.y - b.y)) >= a.radius + b.radius + 3


def test_a_scene_that_cannot_be_placed_is_refused() -> None:
    crowd = {"include": [{"class": "circle", "count": 30}], "prompt": "thirty circles"}
    with pytest.raises(ValueError, match="thirty circles"):
        random_scene(crowd, np.random.default_rng(0))
