"""A head that learns to name what a denoiser's tokens are about to show, while the denoiser learns; it is not shipped.

From a layer in the middle of the network it tells, for each patch of 8 x 8 pixels, the ground or which shape in which
colour covers it. The network has to know early what goes where, which it otherwise learns late: representation
alignment (Yu et al., arXiv 2410.06940) with drawn label maps in the place of another network's features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from flowrl.runtime.shapes import UInt8
from flowrl.world.scenes import COLORS, SHAPES, SIZE, Shape, outline

CELLS = 8
"""Patches along each side of an image."""
LABELS = 1 + len(SHAPES) * len(COLORS)
"""The ground, and every shape in every colour."""

_LEAST = 0.25  # share of a patch that a shape has to cover
_GROUND_WEIGHT = 0.2  # most patches are ground


def label_map(shapes: Sequence[Shape]) -> UInt8[np.ndarray, " 8 8"]:
    """What each patch of a scene shows: 0 for the ground, else `1 + 4 shape + colour` of what covers most of it."""
    names = list(COLORS)
    canvas = Image.new("L", (SIZE, SIZE), 0)
    pen = ImageDraw.Draw(canvas)
    for shape in shapes:
        label = 1 + SHAPES.index(shape.label) * len(names) + names.index(shape.color)
        pen.polygon(outline(shape.label, shape.x, shape.y, shape.radius), fill=label)
    side = SIZE // CELLS
    patches = np.asarray(canvas).reshape(CELLS, side, CELLS, side).transpose(0, 2, 1, 3).reshape(CELLS, CELLS, -1)
    counts = (patches[..., None] == np.arange(1, LABELS)).sum(axis=2)
    covered = counts.max(axis=-1) >= _LEAST * side * side
    return np.where(covered, 1 + counts.argmax(axis=-1), 0).astype(np.uint8)


class LabelHead(nn.Module):
    """Reads the newest output of a layer; `error` is the cross-entropy of the labels of its tokens."""

    def __init__(
        self, layer: nn.Module, width: int, tokens: Callable[[Any], Tensor], *, side: int = 1, seed: int = 0
    ) -> None:
        """Hooks itself to a layer; `tokens` picks tokens `[b, n, width]` of its output, of `side x side` patches each,
        row by row."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.linear = nn.Linear(width, side**2 * LABELS)
        self._side = side
        self._seen: list[Tensor] = []
        self._hook = layer.register_forward_hook(lambda *call: self._seen.append(tokens(call[2])))

    def error(self, labels: UInt8[Tensor, " b *frames 8 8"]) -> Tensor:
        """Mean cross-entropy over the tokens of the newest call, the ground with weight 0.2."""
        weight = torch.ones(LABELS)
        weight[0] = _GROUND_WEIGHT
        scores = self.linear(self._seen.pop().float())
        self._seen.clear()
        cells = labels.unfold(-2, self._side, self._side).unfold(-2, self._side, self._side)  # token by token
        return nn.functional.cross_entropy(scores.reshape(-1, LABELS), cells.long().flatten(), weight=weight)

    def remove(self) -> None:
        """Takes the hook away."""
        self._hook.remove()
