"""A detector for the embedded world: boxes, labels, masks and colours of shapes, read from pixels.

Blobs are connected components of what differs from the ground; each is compared with ideal outlines of the shapes
in its own bounding box. The score is how clearly one outline fits best, on the scale that GenEval's thresholds expect:
a clean shape scores above 0.95 (GenEval asks for 0.9 when counting, 0.3 otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from flowrl.benchmarks.geneval.rules import Detection
from flowrl.world.blobs import label_blobs
from flowrl.world.scenes import BACKGROUND, COLORS, SHAPES, outline

_FOREGROUND = 70.0  # distance from the ground (8-bit RGB, Euclidean) above which a pixel belongs to an object
_GROUND_DRIFT = 60.0  # a ground further than this from the world's own is not a scene of this world
_MIN_SIDE, _MIN_AREA = 6, 24  # pixels; smaller specks are not objects
_TEMPLATE = 24  # side of the grid on which outlines are compared
_TEMPERATURE = 0.03  # of the soft-max over overlaps
_FULL_OVERLAP = 0.80  # overlap (intersection over union) that counts as a perfect fit


@lru_cache(maxsize=1)
def _templates() -> np.ndarray:
    """Ideal masks `[3, 24, 24]` in [0, 1] of the shapes, each filling its own bounding box."""
    masks = []
    for label in SHAPES:
        points = np.asarray(outline(label, 0.0, 0.0, 1.0))
        low, high = points.min(axis=0), points.max(axis=0)
        canvas = Image.new("L", (4 * _TEMPLATE, 4 * _TEMPLATE))
        scaled = (points - low) / (high - low) * (4 * _TEMPLATE - 1)
        ImageDraw.Draw(canvas).polygon([(float(x), float(y)) for x, y in scaled], fill=255)
        masks.append(np.asarray(canvas.reduce(4), dtype=np.float64) / 255.0)
    return np.stack(masks)


def _squared_distance(pixels: np.ndarray, color: np.ndarray) -> np.ndarray:
    """Squared Euclidean distance over the last axis. Exact in float32 for 8-bit pixels and half levels."""
    color = color.astype(np.float32)
    return np.asarray(sum(np.square(pixels[..., channel] - color[..., channel]) for channel in range(3)))


def _best_fits(masks: Sequence[np.ndarray]) -> tuple[list[int], list[float]]:
    """The shape that fits each cropped mask best, and its score."""
    side = (_TEMPLATE, _TEMPLATE)
    resized = [Image.fromarray(mask.astype(np.uint8) * 255).resize(side, Image.Resampling.BOX) for mask in masks]
    grids, templates = np.stack([np.asarray(one) for one in resized])[:, None] / 255.0, _templates()
    common, either = np.minimum(templates, grids).sum(axis=(2, 3)), np.maximum(templates, grids).sum(axis=(2, 3))
    overlap = np.asarray(common / either)  # [masks, templates]
    weights = np.exp((overlap - overlap.max(axis=1, keepdims=True)) / _TEMPERATURE)
    best = overlap.argmax(axis=1)
    each = np.arange(len(masks))
    fit = np.minimum(1.0, overlap[each, best] / _FULL_OVERLAP)
    return best.tolist(), (weights[each, best] / weights.sum(axis=1) * fit).tolist()


def detect_in_batch(images: np.ndarray) -> list[list[Detection]]:
    """Finds the shapes of images of one size; each image is judged by itself.

    Args:
        images: uint8 `[B, H, W, 3]`, RGB.

    Returns for each image its detections by falling score; boxes in pixels, `(x1, y1, x2, y2)` with the far edges
    exclusive; `mask` is a bool array `[H, W]`. An image whose ground is not the world's light grey has none.
    """
    sides = (images[:, :2], images[:, -2:], images[:, :, :1], images[:, :, -1:])
    border = np.concatenate([side.reshape(len(images), -1, 3) for side in sides], axis=1)
    ground = np.median(border, axis=1)  # [B, 3], whole or half levels
    of_this_world = _squared_distance(ground, np.asarray(BACKGROUND)) <= _GROUND_DRIFT**2
    objects = _squared_distance(images, ground[:, None, None]) > _FOREGROUND**2
    labels, places = label_blobs(objects & of_this_world[:, None, None], _MIN_AREA)
    windows, masks = [], []
    for index, window in enumerate(places, start=1):
        if min(side.stop - side.start for side in window[1:]) >= _MIN_SIDE:
            windows.append(window)
            masks.append(labels[window] == index)
    found: list[list[Detection]] = [[] for _ in images]
    if masks:
        for (image, rows, columns), mask, best, score in zip(windows, masks, *_best_fits(masks), strict=True):
            whole = np.zeros(images.shape[1:3], dtype=bool)
            whole[rows, columns] = mask
            box = (float(columns.start), float(rows.start), float(columns.stop), float(rows.stop))
            found[image].append(Detection(SHAPES[best], box=box, score=score, mask=whole))
    return [sorted(detections, key=lambda detection: -detection.score) for detections in found]


def detect_shapes(image: np.ndarray) -> list[Detection]:
    """Finds the shapes of one image, uint8 `[H, W, 3]`; see `detect_in_batch`."""
    return detect_in_batch(image[None])[0]


def color_of(image: np.ndarray, detection: Detection) -> str:
    """The world's colour nearest to the median colour of a detection's inner pixels, without the outermost ring of a
    thick object, which anti-aliasing blends with the ground."""
    mask = detection.mask
    if mask is None:
        raise ValueError("the shape detector's colours need a detection with a mask; this one has none")
    around = np.zeros((mask.shape[0] + 2, mask.shape[1] + 2), dtype=bool)  # nothing lies outside the image
    around[1:-1, 1:-1] = mask
    inner = mask & around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:]
    median = np.median(image[inner if inner.any() else mask], axis=0)
    return list(COLORS)[int(_squared_distance(np.asarray(list(COLORS.values())), median).argmin())]
