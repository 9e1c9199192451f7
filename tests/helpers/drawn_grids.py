"""Grids of the embedded world, drawn: one shape per cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.world.scene_grids import CELLS, COLUMNS, ROWS, asked_objects
from flowrl.world.scenes import SIZE, Shape, draw_scene

_MIN_RADIUS, _MAX_RADIUS = 12.0, 22.0  # of a scene of 64 pixels, which a cell shrinks to half
_MARGIN = 3.0


def random_grid(record: Mapping[str, Any], rng: np.random.Generator) -> tuple[Shape, ...]:
    """The shape of each cell, of random size and place, so that a grid's record holds; in pixels of a whole scene."""
    shapes = []
    for label, color in asked_objects(record):
        radius = float(rng.uniform(_MIN_RADIUS, _MAX_RADIUS))
        x, y = rng.uniform(radius + _MARGIN, SIZE - radius - _MARGIN, size=2)
        shapes.append(Shape(label=label, color=color, x=float(x), y=float(y), radius=radius))
    return tuple(shapes)


def draw_grid(shapes: Sequence[Shape]) -> np.ndarray:
    """Paints one shape a cell, row by row; returns a uint8 array `[64, 64, 3]` (RGB)."""
    cells = [draw_scene([shape], SIZE // ROWS) for shape in shapes]
    rows = [np.concatenate(cells[start : start + COLUMNS], axis=1) for start in range(0, CELLS, COLUMNS)]
    return np.concatenate(rows)
