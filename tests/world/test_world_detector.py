"""The detector on whole batches: what a plain reading finds, image by image and pixel by pixel, to the last bit."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter
from scipy import ndimage

from flowrl.benchmarks.geneval.rules import Detection
from flowrl.world.blobs import label_blobs
from flowrl.world.detector import color_of, detect_in_batch
from flowrl.world.scenes import BACKGROUND, COLORS, SHAPES, Shape, draw_scene, outline

Found = tuple[str, tuple[float, ...], float, str, frozenset[tuple[int, int]]]  # label, box, score, colour, pixels


def drawn(count: int, seed: int) -> np.ndarray:
    """Images `[count, 64, 64, 3]`: up to five shapes that may overlap or be cut off, blurred, noisy, tinted; noise."""
    rng = np.random.default_rng(seed)
    images = []
    for _ in range(count):
        shapes = [
            Shape(
                label=SHAPES[rng.integers(3)], color=list(COLORS)[rng.integers(4)], x=float(rng.uniform(0, 64)),
                y=float(rng.uniform(0, 64)), radius=float(rng.uniform(2, 20)),
            )
            for _ in range(rng.integers(6))
        ]  # fmt: skip
        blurred = Image.fromarray(draw_scene(shapes)).filter(ImageFilter.GaussianBlur(float(rng.choice([0, 0, 1, 2]))))
        noise = rng.normal(0, rng.choice([0, 0, 10, 30, 80]), (64, 64, 3)) + rng.normal(0, rng.choice([0, 20, 40]), 3)
        images.append(np.clip(np.asarray(blurred) + noise, 0, 255).astype(np.uint8))
    images[::50] = [rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in images[::50]]
    return np.stack(images)


def blobs(objects: set[tuple[int, int]]) -> list[set[tuple[int, int]]]:
    """Pixels that hang together by their sides, in the order of their first pixels."""
    left, found = set(objects), []
    for start in sorted(objects):
        if start not in left:
            continue
        left.discard(start)
        blob, edge = {start}, [start]
        while edge:
            y, x = edge.pop()
            for pixel in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if pixel in left:
                    left.discard(pixel)
                    blob.add(pixel)
                    edge.append(pixel)
        found.append(blob)
    return found


def ideal(label: str) -> np.ndarray:
    points = np.asarray(outline(label, 0, 0, 1))
    spans = [(axis - axis.min()) / (axis.max() - axis.min()) * 95 for axis in points.T]
    canvas = Image.new("L", (96, 96))
    ImageDraw.Draw(canvas).polygon([(float(x), float(y)) for x, y in zip(*spans, strict=True)], fill=255)
    return np.asarray(canvas.reduce(4), dtype=np.float64) / 255


def plainly(image: np.ndarray, ideals: dict[str, np.ndarray]) -> list[Found]:
    """What the module says a detection is, with integers and sets."""
    border = [image[:2].reshape(-1, 3), image[-2:].reshape(-1, 3), image[:, 0], image[:, -1]]
    columns = np.sort(np.concatenate(border).astype(int), axis=0)
    ground2 = columns[len(columns) // 2] + columns[len(columns) // 2 - 1]  # twice the median
    if ((ground2 - 2 * np.asarray(BACKGROUND)) ** 2).sum() > 4 * 60**2:
        return []
    far = ((2 * image.astype(int) - ground2) ** 2).sum(-1) > 4 * 70**2
    found = []
    for blob in blobs(set(zip(*(axis.tolist() for axis in np.nonzero(far)), strict=True))):
        ys, xs = zip(*blob, strict=True)
        top, left, bottom, right = min(ys), min(xs), max(ys) + 1, max(xs) + 1
        if min(bottom - top, right - left) < 6 or len(blob) < 24:
            continue
        crop = np.zeros((bottom - top, right - left), dtype=np.uint8)
        crop[[y - top for y in ys], [x - left for x in xs]] = 255
        grid = np.asarray(Image.fromarray(crop).resize((24, 24), Image.Resampling.BOX), dtype=np.float64) / 255
        fit = [np.minimum(grid, one).sum() / np.maximum(grid, one).sum() for one in ideals.values()]
        share = 1 / sum(np.exp((one - max(fit)) / 0.03) for one in fit)
        inner = {(y, x) for y, x in blob if {(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)} <= blob}
        median = np.median([image[pixel] for pixel in sorted(inner or blob)], axis=0)
        color = min(COLORS, key=lambda name: sum((median - np.asarray(COLORS[name])) ** 2))
        box = (float(left), float(top), float(right), float(bottom))
        score = float(share * min(1.0, max(fit) / 0.8))
        found.append((list(ideals)[int(np.argmax(fit))], box, score, color, frozenset(blob)))
    return sorted(found, key=lambda one: -one[2])


def read(image: np.ndarray, detection: Detection) -> Found:
    assert detection.mask is not None
    pixels = zip(*(axis.tolist() for axis in np.nonzero(detection.mask)), strict=True)
    return detection.label, detection.box, detection.score, color_of(image, detection), frozenset(pixels)


@pytest.mark.slow
def test_a_batch_is_read_as_its_images_one_by_one() -> None:
    images, ideals = drawn(500, seed=3), {label: ideal(label) for label in SHAPES}
    seen: Counter[str] = Counter()
    for image, detections in zip(images, detect_in_batch(images), strict=True):
        found = [read(image, detection) for detection in detections]
        assert found == plainly(image, ideals)
        seen.update(name for label, _, _, color, _ in found for name in (label, color))
        seen["none"] += not found
    assert set(seen) == {*SHAPES, *COLORS, "none"}
    assert min(seen.values()) > 50, "the drawn images must show all there is to see"


def test_blobs_of_neighbouring_images_and_of_touching_corners_stay_apart() -> None:
    """The first image is ended by a blob, the next begins with one at the same place; two blobs meet at a corner."""
    images = np.full((2, 64, 64, 3), BACKGROUND, dtype=np.uint8)
    images[0, 54:64, 20:30] = images[1, :10, 20:30] = COLORS["red"]
    images[1, 10:20, 30:40] = COLORS["blue"]
    boxes = [sorted(detection.box for detection in detections) for detections in detect_in_batch(images)]
    assert boxes == [[(20, 54, 30, 64)], [(20, 0, 30, 10), (30, 10, 40, 20)]]


def test_blobs_are_those_of_scipy_with_its_numbers() -> None:
    neighbours = np.stack([np.zeros((3, 3)), ndimage.generate_binary_structure(2, 1), np.zeros((3, 3))])
    random = np.random.default_rng(0)
    masks = [random.random(random.integers(1, 20, 3) // (5, 1, 1) + (1, 0, 0)) < random.random() for _ in range(200)]
    serpent = np.zeros((1, 41, 41), dtype=bool)  # one component that winds through all rows
    serpent[0, ::2] = serpent[0, 1::4, -1] = serpent[0, 3::4, 0] = True
    for mask in [*masks, serpent, np.zeros((2, 5, 5), dtype=bool), np.ones((2, 5, 5), dtype=bool)]:
        labels, _ = ndimage.label(mask, structure=neighbours)
        large = np.bincount(labels.ravel()) >= 3
        large[0] = False
        labels = (np.cumsum(large) * large)[labels]
        found, places = label_blobs(mask, 3)
        assert np.array_equal(found, labels)
        assert places == [(image.start, rows, columns) for image, rows, columns in ndimage.find_objects(labels)]
