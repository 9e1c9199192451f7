"""A detector for the embedded world: boxes, labels, masks and colours of shapes, read from pixels.

Blobs are connected components of what differs from the ground; each is compared with ideal outlines of the shapes
in its own bounding box. The score is how clearly one outline fits best, on the scale that GenEval's thresholds expect:
a clean shape scores above 0.95 (GenEval asks for 0.9 when counting, 0.3 otherwise).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from flowrl.benchmarks.geneval.detections import Detection
from flowrl.world.scenes import BACKGROUND, COLORS, SHAPES, outline

_FOREGROUND = 70.0  # distance from the ground (8-bit RGB, Euclidean) above which a pixel belongs to an object
_GROUND_DRIFT = 60.0  # a ground further than this from the world's own is no scene of this world
_MIN_SIDE, _MIN_AREA = 6, 24  # pixels; smaller specks are no objects
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


def _ground(image: np.ndarray) -> np.ndarray:
    """The ground's colour: the median of the image's border, channel by channel."""
    border = np.concatenate([image[:2].reshape(-1, 3), image[-2:].reshape(-1, 3), image[:, 0], image[:, -1]])
    return np.median(border, axis=0)


def _overlaps(mask: np.ndarray) -> np.ndarray:
    """Soft intersection over union `[3]` of a cropped mask with each template."""
    resized = Image.fromarray((mask * 255).astype(np.uint8)).resize((_TEMPLATE, _TEMPLATE), Image.Resampling.BOX)
    grid = np.asarray(resized, dtype=np.float64) / 255.0
    templates = _templates()
    return np.minimum(templates, grid).sum(axis=(1, 2)) / np.maximum(templates, grid).sum(axis=(1, 2))


def detect_shapes(image: np.ndarray) -> list[Detection]:
    """Finds the shapes of an image.

    Args:
        image: uint8 `[H, W, 3]`, RGB.

    Returns:
        Detections by falling score; boxes in pixels, `(x1, y1, x2, y2)` with the far edges exclusive; `mask` is a bool
        array `[H, W]`. An image whose ground is not the world's light grey has none.
    """
    pixels = image.astype(np.float64)
    ground = _ground(pixels)
    if np.linalg.norm(ground - np.asarray(BACKGROUND)) > _GROUND_DRIFT:
        return []
    labels, count = ndimage.label(np.linalg.norm(pixels - ground, axis=-1) > _FOREGROUND)
    found = []
    for index, window in enumerate(ndimage.find_objects(labels, max_label=count), start=1):
        mask = labels[window] == index
        height, width = mask.shape
        if min(height, width) < _MIN_SIDE or mask.sum() < _MIN_AREA:
            continue
        overlap = _overlaps(mask)
        weights = np.exp((overlap - overlap.max()) / _TEMPERATURE)
        best = int(overlap.argmax())
        score = float(weights[best] / weights.sum() * min(1.0, overlap[best] / _FULL_OVERLAP))
        whole = np.zeros(labels.shape, dtype=bool)
        whole[window] = mask
        top, left = window[0].start, window[1].start
        box = (float(left), float(top), float(left + width), float(top + height))
        found.append(Detection(SHAPES[best], box=box, score=score, mask=whole))
    return sorted(found, key=lambda detection: -detection.score)


def color_of(image: np.ndarray, detection: Detection) -> str:
    """The world's colour nearest to the median colour of a detection's inner pixels.

    The outermost ring is left out where the object is thick enough, since anti-aliasing blends it with the ground.
    """
    mask = detection.mask
    if mask is None:
        raise ValueError("the shape detector's colours need a detection with a mask; this one has none")
    inner = ndimage.binary_erosion(mask)
    chosen = image[inner if inner.any() else mask].astype(np.float64)
    median = np.median(chosen, axis=0)
    names = list(COLORS)
    distances = [float(np.linalg.norm(median - np.asarray(COLORS[name]))) for name in names]
    return names[int(np.argmin(distances))]
