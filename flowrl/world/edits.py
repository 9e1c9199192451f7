"""Editing in the embedded world: a source scene, an instruction, and a verifier of the result.

Shapes of a scene differ in label, so that "the circle" names one of them. A record is

    {"prompt": "make the circle blue", "tag": "recolor", "scene": [{"label", "color", "x", "y", "radius"}, ...],
     "target": 0, "color": "blue"}

with `target` the place of the shape that is edited. Tasks: `recolor` ("make the circle blue"), `remove` ("remove the
circle"), `replace` ("turn the circle into a square").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from flowrl.world.detector import color_of, detect_shapes
from flowrl.world.scene_prompts import Record
from flowrl.world.scenes import BACKGROUND, COLORS, LOOKS_LIKE, SHAPES, Shape, draw_scene, random_scene

TASKS = ("recolor", "remove", "replace")
"""Kinds of instructions."""

WORDS = ("make", "the", "remove", "turn", "into")
"""Words of instructions that images' prompts do not have."""

FAILED = {
    "recolor": "nothing was done, or the colour is red for yellow, green for blue, and the reverse",
    "remove": "nothing was done, or another shape is gone",
    "replace": "nothing was done, or it became the third shape",
}
"""By task, what an edit that failed shows, one as often as the other."""

_SPLIT_SEED = 45
_SAME_PLACE = 0.5  # least overlap (intersection over union) of boxes of one shape before and after
_CHANGED = 60.0  # 8-bit RGB distance above which a pixel counts as changed
_MOST_CHANGED = 0.03  # share of the pixels outside the edited shape that may change


@dataclass(frozen=True, kw_only=True, slots=True)
class EditVerdict:
    """Whether an edited image shows the requested edit.

    Attributes:
        done: in [0, 1], how much of the instruction holds at the place of the edited shape.
        kept: in [0, 1], how much of the rest is as it was.
        correct: both are 1.
    """

    done: float
    kept: float

    @property
    def correct(self) -> bool:
        """Whether the requested change happened, and nothing else changed."""
        return self.done == 1 and self.kept == 1

    @property
    def graded(self) -> float:
        """`(done + done * kept) / 2`: leaving all as it was earns nothing, and half is for keeping the rest."""
        return (self.done + self.done * self.kept) / 2


def edit_record(task: str, scene: Sequence[Shape], target: int, wish: str = "") -> Record:
    """A record; `wish` is the new colour (recolor) or the new label (replace). Raises ValueError: an unknown task, or a
    wish that is what the shape has already."""
    shape = scene[target]
    texts = {
        "recolor": f"make the {shape.label} {wish}",
        "remove": f"remove the {shape.label}",
        "replace": f"turn the {shape.label} into a {wish}",
    }
    if task not in texts:
        raise ValueError(f"unknown edit {task!r}: the world has {', '.join(TASKS)}")
    if wish in (shape.label, shape.color):
        raise ValueError(f"the {shape.label} is {wish} already: there is nothing to edit")
    record: Record = {"prompt": texts[task], "tag": task, "scene": [asdict(s) for s in scene], "target": target}
    return record | ({} if task == "remove" else {"color" if task == "recolor" else "label": wish})


def random_edit(rng: np.random.Generator, task: str | None = None) -> Record:
    """A random scene of one to three shapes and an instruction for it."""
    count = int(rng.integers(1, 4))
    labels = [str(label) for label in rng.permutation(list(SHAPES))[:count]]
    scene = random_scene({"include": [{"class": label, "count": 1} for label in labels]}, rng)
    target = int(rng.integers(count))
    names = list(TASKS if count < len(SHAPES) else TASKS[:2])  # with all shapes there, a new label would be a double
    chosen = task or names[int(rng.integers(len(names)))]
    if chosen == "replace" and count == len(SHAPES):
        scene, target = scene[:2], target % 2
    if chosen == "recolor":
        others = [color for color in COLORS if color != scene[target].color]
        return edit_record(chosen, scene, target, others[int(rng.integers(len(others)))])
    if chosen == "replace":
        free = [label for label in SHAPES if label not in {shape.label for shape in scene}]
        return edit_record(chosen, scene, target, free[int(rng.integers(len(free)))])
    return edit_record(chosen, scene, target)


def source_scene(record: Mapping[str, Any]) -> tuple[Shape, ...]:
    """The shapes of the source image."""
    return tuple(Shape(**shape) for shape in record["scene"])


def edited_scene(record: Mapping[str, Any]) -> tuple[Shape, ...]:
    """The shapes after the edit."""
    shapes, target = list(source_scene(record)), int(record["target"])
    if record["tag"] == "remove":
        return tuple(shapes[:target] + shapes[target + 1 :])
    shapes[target] = replace(
        shapes[target], color=record.get("color", shapes[target].color), label=record.get("label", shapes[target].label)
    )
    return tuple(shapes)


def failed_scene(record: Mapping[str, Any], rng: np.random.Generator) -> tuple[Shape, ...]:
    """The shapes after an edit that failed, see `FAILED`; where a scene leaves one way to fail, nothing was done."""
    scene, target = source_scene(record), int(record["target"])
    if rng.random() < 0.5:
        return scene
    if record["tag"] == "remove":
        others = [place for place in range(len(scene)) if place != target]
        gone = others[int(rng.integers(len(others)))] if others else len(scene)
        return tuple(shape for place, shape in enumerate(scene) if place != gone)
    shape = edited_scene(record)[target]
    if record["tag"] == "recolor":
        wrong = replace(shape, color=LOOKS_LIKE[shape.color])
    else:
        free = [label for label in SHAPES if label not in {other.label for other in scene} | {shape.label}]
        wrong = replace(shape, label=free[0]) if free else scene[target]
    return (*scene[:target], wrong, *scene[target + 1 :])


def draw_edit(record: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Source and edited image of a record, uint8 `[64, 64, 3]` each."""
    return draw_scene(source_scene(record)), draw_scene(edited_scene(record))


def edit_verdict(image: np.ndarray, source: np.ndarray, record: Mapping[str, Any]) -> EditVerdict:
    """Judges an edited image.

    `done` of recolor and replace is the mean of three points at the edited shape's place: an object is there, it has
    the label that it should have, and the colour; of remove it is 1 where no object is left there. `kept` is the mean,
    over the other shapes and the ground, of what is as it was: a shape with its label, colour and place, the ground
    with at most 3 % of its pixels changed and no new object on it.

    Args:
        image: uint8 `[H, W, 3]`, the result.
        source: uint8 `[H, W, 3]`, of the same size.
        record: an edit record, in coordinates of 64 x 64 pixels.
    """
    if image.shape != source.shape:
        raise ValueError(f"the result {image.shape} and its source {source.shape} must have one size")
    factor = image.shape[0] / 64
    before, after, target = source_scene(record), edited_scene(record), int(record["target"])
    found = detect_shapes(image)
    place = _box(before[target], factor)
    left, top, right, bottom = place  # looked at with a margin of 2 pixels
    window = slice(max(0, int(top - 2)), int(bottom + 2) + 1), slice(max(0, int(left - 2)), int(right + 2) + 1)
    here = max((d for d in found if _overlap(d.box, place) >= _SAME_PLACE), key=lambda d: d.score, default=None)
    if record["tag"] == "remove":
        shown = np.linalg.norm(image[window].astype(np.float64) - np.asarray(BACKGROUND), axis=-1) > _CHANGED
        done = float(here is None and float(shown.mean()) <= 0.1)
    elif here is None:
        done = 0.0
    else:
        color, old, wanted = color_of(image, here), before[target], after[target]
        undone = {"recolor": color == old.color, "replace": here.label == old.label}[record["tag"]]
        done = 0.0 if undone else (1 + (here.label == wanted.label) + (color == wanted.color)) / 3
    others = [shape for number, shape in enumerate(before) if number != target]
    checks = [
        any(
            d.label == shape.label
            and color_of(image, d) == shape.color
            and _overlap(d.box, _box(shape, factor)) >= _SAME_PLACE
            for d in found
        )
        for shape in others
    ]
    extra = len(found) > len(others) + (here is not None)
    different = np.linalg.norm(image.astype(np.float64) - source.astype(np.float64), axis=-1) > _CHANGED
    outside = np.ones(different.shape, dtype=bool)
    outside[window] = False
    checks.append(not extra and float(different[outside].mean()) <= _MOST_CHANGED)
    return EditVerdict(done=done, kept=sum(checks) / len(checks))


def _box(shape: Shape, factor: float) -> tuple[float, float, float, float]:
    x, y, r = shape.x * factor, shape.y * factor, shape.radius * factor
    return (x - r, y - r, x + r, y + r)


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    common = width * height
    return common / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common)


def edit_records() -> tuple[list[Record], list[Record]]:
    """Training and held-out records: 384 and 128 scenes with an instruction each, tasks in turn, no scene in both."""
    return _records(384, 0), _records(128, 1)


def _records(count: int, split: int) -> list[Record]:
    return [
        random_edit(np.random.default_rng((_SPLIT_SEED, split, number)), TASKS[number % len(TASKS)])
        for number in range(count)
    ]
