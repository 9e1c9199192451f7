"""Procedurally drawn scenes of coloured shapes, 64 x 64 pixels on a light ground.

A scene is a tuple of `Shape`s that do not touch. `draw_scene` paints it, `random_scene` places shapes so that a
GenEval record (`include` clauses with counts, colours and positions) holds in the image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SIZE = 64
"""Width and height of a scene in pixels."""

SHAPES = ("circle", "square", "triangle")
"""The three shapes; they play the part of GenEval's object classes."""

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (222, 44, 44),
    "yellow": (232, 184, 0),
    "green": (40, 168, 72),
    "blue": (48, 92, 220),
}
"""The four colours (8-bit RGB); their names are among GenEval's ten."""

LOOKS_LIKE = {"red": "yellow", "yellow": "red", "green": "blue", "blue": "green"}
"""Colour -> the colour that replaces it in a wrong caption or edit."""

BACKGROUND = (236, 236, 236)
"""The ground that every scene is drawn on (8-bit RGB)."""

_OVERSAMPLE = 4
_GAP = 3.0  # least distance in pixels between the bounding circles' boxes
_MIN_RADIUS, _MAX_RADIUS = 8.0, 13.0
_CROWDED_MAX_RADIUS = {1: 14.0, 2: 12.0, 3: 11.0, 4: 10.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One upright shape: centre `(x, y)` and half-size `radius` in pixels; y points down."""

    label: str
    color: str
    x: float
    y: float
    radius: float


def outline(label: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Corner points of a shape whose bounding box is the square of half-size `radius` around `(x, y)`. Raises
    ValueError: `label` is none of `SHAPES`."""
    if label == "square":
        corners = [(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)]
    elif label == "triangle":
        corners = [(0.0, -1.0), (1.0, 1.0), (-1.0, 1.0)]
    elif label == "circle":
        angles = np.linspace(0.0, 2.0 * np.pi, 48, endpoint=False)
        corners = [(float(np.cos(a)), float(np.sin(a))) for a in angles]
    else:
        raise ValueError(f"unknown shape {label!r}: the world has {', '.join(SHAPES)}")
    return [(x + radius * dx, y + radius * dy) for dx, dy in corners]


def draw_scene(shapes: Sequence[Shape], size: int = SIZE) -> np.ndarray:
    """Paints shapes with anti-aliased edges; returns a uint8 array `[size, size, 3]` (RGB)."""
    scale = _OVERSAMPLE * size / SIZE
    image = Image.new("RGB", (_OVERSAMPLE * size, _OVERSAMPLE * size), BACKGROUND)
    pen = ImageDraw.Draw(image)
    for shape in shapes:
        points = outline(shape.label, shape.x, shape.y, shape.radius)
        pen.polygon([(px * scale, py * scale) for px, py in points], fill=COLORS[shape.color])
    return np.asarray(image.reduce(_OVERSAMPLE))


def _place(labels: Sequence[tuple[str, str]], rng: np.random.Generator) -> tuple[Shape, ...] | None:
    """One attempt to place all shapes at random without touching; None if one finds no room."""
    largest = _CROWDED_MAX_RADIUS.get(len(labels), _MIN_RADIUS)
    shapes: list[Shape] = []
    for label, color in labels:
        for _ in range(40):
            radius = float(rng.uniform(_MIN_RADIUS, largest))
            x, y = rng.uniform(radius + 1.5, SIZE - radius - 1.5, size=2)
            shape = Shape(label=label, color=color, x=float(x), y=float(y), radius=radius)
            gaps = (max(abs(shape.x - o.x), abs(shape.y - o.y)) - shape.radius - o.radius for o in shapes)
            if all(gap >= _GAP for gap in gaps):
                shapes.append(shape)
                break
        else:
            return None
    return tuple(shapes)


def _holds(relation: str, subject: Shape, reference: Shape) -> bool:
    """Whether the subject lies clearly and mainly in the named direction of the reference."""
    dx, dy = subject.x - reference.x, subject.y - reference.y
    along = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[relation]
    across = abs(dy) if relation in ("left of", "right of") else abs(dx)
    return along > 1.3 * across and along > subject.radius + reference.radius + _GAP


def random_scene(metadata: Mapping[str, Any], rng: np.random.Generator) -> tuple[Shape, ...]:
    """A random scene in which a GenEval record's `include` holds, whose positions refer to clauses of one object each.
    Raises ValueError: no arrangement was found in 1000 attempts (more than four shapes do not fit)."""
    labels, colors = [], list(COLORS)
    for clause in metadata["include"]:
        for _ in range(int(clause["count"])):  # a colour that the record leaves open is drawn
            labels.append((str(clause["class"]), str(clause.get("color") or colors[rng.integers(len(colors))])))
    positions = [(i, clause["position"]) for i, clause in enumerate(metadata["include"]) if clause.get("position")]
    for _ in range(1000):
        shapes = _place(labels, rng)
        if shapes is None:
            continue
        if all(_holds(relation, shapes[i], shapes[k]) for i, (relation, k) in positions):
            return shapes
    raise ValueError(f"no arrangement found for {metadata.get('prompt', metadata)!r}: at most 4 shapes fit a scene")
