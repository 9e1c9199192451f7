"""What the differentiable scorer learns from: random scenes with every kind of flaw, their labels, corruptions.

Scenes are drawn that prompts alone would not give: up to six shapes of many sizes; outlines turned, stretched, dented,
bitten or half way between two shapes; colours half way between two; faded and touching shapes, specks, foreign grounds.
GenEval's judge of the embedded world says what each of them shows, so that the scorer agrees with it on flaws too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flowrl.benchmarks.geneval.rules import MIN_COUNTING_SCORE, MIN_SCORE
from flowrl.rewards.embedded.attributes import GRID, MAX_COUNT, PAIRS
from flowrl.runtime.shapes import Float, UInt8
from flowrl.world.detector import color_of, detect_shapes
from flowrl.world.scenes import BACKGROUND, COLORS, SHAPES, SIZE


def signed_distance(label: str, dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    """How far outside a shape's edge (negative: inside) points at (dx, dy) from its centre lie, in pixels."""
    if label == "circle":
        return np.hypot(dx, dy) - radius
    if label == "square":
        return np.maximum(np.abs(dx), np.abs(dy)) - radius
    return np.maximum(dy - radius, (2 * np.abs(dx) - dy - radius) / np.sqrt(5.0))


def training_scene(rng: np.random.Generator) -> UInt8[np.ndarray, " 64 64 3"]:
    """A random image for training; see step 1 of the module's text. Four in ten hold faultless shapes only."""
    flawed = rng.random() < 0.6
    rows, columns = np.mgrid[0:SIZE, 0:SIZE] + 0.5
    foreign = rng.random() < 0.04
    ground = rng.uniform(0, 255, 3) if foreign else np.asarray(BACKGROUND) + rng.normal(0, 4, 3)
    canvas = np.broadcast_to(ground, (SIZE, SIZE, 3)).copy()
    number = int(rng.choice(7, p=(0.04, 0.22, 0.27, 0.17, 0.16, 0.09, 0.05)))
    label, color = (int(rng.integers(k)) if rng.random() < p else None for k, p in ((3, 0.45), (4, 0.3)))
    gap = rng.uniform(-5, 3) if flawed and rng.random() < 0.2 else 3.0
    placed: list[tuple[float, float, float]] = []
    for _ in range(number):
        largest = {1: 15, 2: 13, 3: 12}.get(number, 10)
        radius = rng.uniform(2, 6) if flawed and rng.random() < 0.07 else rng.uniform(6, largest)
        place = _free_place(radius, gap, placed, rng)
        if place is None:
            continue
        x, y = place
        placed.append((x, y, radius))
        shape = int(rng.integers(3)) if label is None else label
        where = SHAPES[shape], columns - x, rows - y, radius
        distance = _flawed_outline(*where, rng) if flawed else signed_distance(*where)
        paint = _paint(int(rng.integers(4)) if color is None else color, (columns - x) / radius, flawed, rng)
        opacity = rng.uniform(0.1, 1.0) if flawed and rng.random() < 0.15 else 1.0
        canvas += opacity * np.clip(0.5 - distance, 0.0, 1.0)[..., None] * (paint - canvas)
    return np.clip(np.round(canvas), 0, 255).astype(np.uint8)


def _free_place(
    radius: float, gap: float, placed: Sequence[tuple[float, float, float]], rng: np.random.Generator
) -> tuple[float, float] | None:
    """A random centre that keeps a gap to shapes (x, y, radius); None after 40 tries."""
    for _ in range(40):
        x, y = rng.uniform(radius, SIZE - radius, 2)
        if all(max(abs(x - a), abs(y - b)) - radius - r >= gap for a, b, r in placed):
            return x, y
    return None


def _flawed_outline(label: str, dx: np.ndarray, dy: np.ndarray, radius: float, rng: np.random.Generator) -> np.ndarray:
    """`signed_distance` of a shape that is, each with some probability, turned, stretched, mixed, dented or bitten."""
    if rng.random() < 0.2:
        angle = rng.normal(0, 0.4)
        dx, dy = dx * np.cos(angle) - dy * np.sin(angle), dx * np.sin(angle) + dy * np.cos(angle)
    if rng.random() < 0.3:
        stretch = np.exp(rng.normal(0, 0.25))
        dx, dy = dx * stretch, dy / stretch
    distance = signed_distance(label, dx, dy, radius)
    if rng.random() < 0.35:
        other = SHAPES[(SHAPES.index(label) + int(rng.integers(1, 3))) % 3]
        distance = distance + rng.random() * (signed_distance(other, dx, dy, radius) - distance)
    if rng.random() < 0.35:
        turns, phase = int(rng.integers(2, 6)), rng.uniform(0, 2 * np.pi)
        distance = distance + radius * rng.uniform(0, 0.2) * np.cos(turns * np.arctan2(dy, dx) + phase)
    if rng.random() < 0.1:
        angle = rng.uniform(0, 2 * np.pi)
        bite = signed_distance("circle", dx - radius * np.cos(angle), dy - radius * np.sin(angle), radius / 2)
        distance = np.maximum(distance, -bite)
    return distance


def _paint(color: int, across: np.ndarray, flawed: bool, rng: np.random.Generator) -> np.ndarray:
    """A colour [3], or colours [64, 64, 3]: now and then mixed with another one, evenly or from side to side."""
    palette = np.asarray(list(COLORS.values()), dtype=np.float64)
    paint = palette[color] + rng.normal(0, 8, 3)
    kind = rng.random() if flawed else 1.0
    if kind > 0.3:
        return paint
    share = rng.random() if kind < 0.15 else 1 / (1 + np.exp(4 * (across - rng.uniform(-1, 1))))[..., None]
    return paint + share * (palette[rng.integers(4)] - paint)


def labels_of(image: UInt8[np.ndarray, " 64 64 3"]) -> tuple[np.ndarray, np.ndarray]:
    """What the judge sees: counts `[2, 15]` and cells `[12, 8, 8]`, the share of each cell that a pair covers. Counts
    are at most 5. Row 0 takes all objects, row 1 those clear enough for GenEval's counting task: an unclear one is a
    fraction of an object."""
    counts = np.zeros((2, len(PAIRS) + len(SHAPES)), dtype=np.int64)
    cells = np.zeros((len(PAIRS), GRID, GRID))
    side = SIZE // GRID
    for found in detect_shapes(image):
        if found.score <= MIN_SCORE or found.mask is None:
            continue
        pair = PAIRS.index((found.label, color_of(image, found)))
        levels = slice(0, 2) if found.score > MIN_COUNTING_SCORE else slice(0, 1)
        counts[levels, [[pair], [len(PAIRS) + SHAPES.index(found.label)]]] += 1
        cells[pair] += found.mask.reshape(GRID, side, GRID, side).mean(axis=(1, 3))
    return counts.clip(max=MAX_COUNT), cells


def corrupt(images: Float[Tensor, " b 3 64 64"], generator: torch.Generator) -> Float[Tensor, " b 3 64 64"]:
    """Blur, an autoencoder's softness, tint, drift and noise, each for some of the images; what they show stays."""
    batch = len(images)

    def some(share: float, high: float) -> Tensor:
        chosen = torch.rand(batch, 1, 1, 1, generator=generator) < share
        return chosen * torch.rand(batch, 1, 1, 1, generator=generator) * high

    deviation = 0.1 + some(0.5, 1.4)
    steps = torch.arange(SIZE)[:, None] - torch.arange(SIZE)
    blur = torch.exp(-0.5 * (steps / deviation) ** 2)
    blur = blur / blur.sum(dim=-1, keepdim=True)  # [b, 1, 64, 64], one Gaussian per image
    images = blur @ images @ blur.transpose(2, 3)
    coarse = F.interpolate(F.avg_pool2d(images, 2), scale_factor=2.0, mode="bilinear", align_corners=False)
    images = images + some(0.3, 1.0) * (coarse - images)
    tint = torch.randn(batch, 3, 1, 1, generator=generator)
    drift = F.interpolate(
        torch.randn(batch, 3, GRID, GRID, generator=generator), scale_factor=8.0, mode="bilinear", align_corners=False
    )
    noise = torch.randn(images.shape, generator=generator)
    images = images + some(0.5, 0.05) * tint + some(0.5, 0.06) * drift + some(0.5, 0.08) * noise
    return images.clamp(0.0, 1.0)
