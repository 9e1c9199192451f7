"""Images that are a grid of sub-figures: reads the grid from a prompt, and splits an image into cells.

Prompts have the form of PaCo-RL's (arXiv 2512.04784): a theme, then a label and a text per cell,

    A 2x2 grid of one fox. The style stays the same. [TOP]-[LEFT]: it sleeps. [TOP]-[RIGHT]: it runs. ...

Letters: B images of [H, W] pixels, n cells of each, [h, w] the size of a cell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from torch import Tensor

from flowrl.prompts.loading import Prompt
from flowrl.runtime.shapes import Shaped

MAX_CELLS = 36  # "1024x1024" in a prompt is a size and no grid

# Of ASCII digits, letters and blanks only: a grid may be named in the midst of a text without blanks, such as Chinese.
_SHAPE = re.compile(r"(?<![\w.])(\d{1,2})\s*[xX\u00d7\u2a09]\s*(\d{1,2})(?![\w.]*\d)", re.ASCII)
_LABEL = re.compile(r"[.\"]\s+[A-Z0-9\-\[\]]+:")


def grid_shape(text: str) -> tuple[int, int] | None:
    """Rows and columns of the first grid that a text names ("2x2", "3 x 4", "2\u00d72"), else None. Single cells, which
    have no pairs, and more than `MAX_CELLS`, an image's size, do not count."""
    for rows, columns in _SHAPE.findall(text):
        if 2 <= int(rows) * int(columns) <= MAX_CELLS:
            return int(rows), int(columns)
    return None


def check_grid(grid: str | None) -> None:
    """Refuses an option `grid` that names no grid."""
    if grid is not None and grid_shape(grid) is None:
        raise ValueError(f"grid must be ROWSxCOLUMNS of 2 to {MAX_CELLS} cells, such as 2x2, got {grid!r}.")


def split_grid(images: Shaped[Tensor, " B 3 H W"], rows: int, columns: int) -> Shaped[Tensor, " B n 3 h w"]:
    """The cells of images, row by row: n = rows * columns of [floor(H / rows), floor(W / columns)] pixels.

    Drops the remainder at the bottom and the right. Carries gradient.

    Raises ValueError: if there are more rows or columns than pixels.
    """
    batch, channels, *size = images.shape
    height, width = (size[0] // rows, size[1] // columns) if rows >= 1 and columns >= 1 else (0, 0)
    if not (height and width):
        raise ValueError(f"an image of {size} pixels has no {rows}x{columns} cells.")
    cut = images[..., : rows * height, : columns * width]
    cells = cut.reshape(batch, channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
    return cells.reshape(batch, rows * columns, channels, height, width)


def cell_pairs(cells: int) -> list[tuple[int, int]]:
    """All `cells (cells - 1) / 2` pairs of cells, by their places, the earlier one first."""
    return list(combinations(range(cells), 2))


def theme(prompt: str) -> str:
    """The part of a prompt about all cells: the text before the first label."""
    return _sentence(_LABEL.split(prompt)[0])


def sub_prompts(prompt: str) -> list[str]:
    """The parts of a prompt that describe one cell each, in order: after a sentence's end and a label of capitals,
    digits, dashes and brackets with a colon: "... 2x2 grid. [LEFT]: a cat. [RIGHT]: a dog." A full stop before a label
    belongs to the text that it ends, as in PaCo-RL."""
    return [_sentence(part) for part in _LABEL.split(prompt)[1:]]


def _sentence(text: str) -> str:
    text = text.strip()
    return text if not text or text.endswith(".") else text + "."


def cell_prompts(prompt: str, metadata: Mapping[str, Any]) -> list[Prompt]:
    """Prompts of the cells, in order: `sub_prompts` of the metadata, or else those in the prompt.

    An entry of `sub_prompts` is as a line of a prompt file: a text, or the cell's metadata with `prompt`.

    Raises ValueError: if `sub_prompts` is something else.
    """
    own = metadata.get("sub_prompts")
    if own is None:
        return [Prompt(text=text, metadata={}) for text in sub_prompts(prompt)]
    found = list[Prompt]()
    for entry in own if isinstance(own, list) else [None]:
        record: dict[str, Any] = entry if isinstance(entry, dict) else {}
        text = record.get("prompt") if record else entry
        if not isinstance(text, str):
            raise ValueError(
                f"metadata field sub_prompts must be a list of texts, or of objects with a text under prompt, one per "
                f"cell, got {own!r}."
            )
        found.append(Prompt(text=text, metadata=record))
    return found
