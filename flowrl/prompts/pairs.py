"""Preference pairs from files: a prompt, the image that was preferred, and the one that was not.

A JSONL file holds one object per line; paths of images are relative to the file:

    {"prompt": "a photo of a red circle", "winner": "images/0001.png", "loser": "images/0002.png"}

A line may have `margin`, by how much the winner is better. Further keys are left alone. A
folder stands for the file `pairs.jsonl` in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.prompts.prompt_files import read_objects
from flowrl.prompts.source_images import read_image
from flowrl.prompts.text_checks import check_text
from flowrl.runtime.shapes import Float

FILE = "pairs.jsonl"
"""The file that is read where a folder is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One line of a file of pairs."""

    prompt: str
    winner: Path
    loser: Path
    margin: float = 1.0


def read_pairs(path: Path) -> list[Pair]:
    """Reads a file of pairs, or `pairs.jsonl` of a folder; blank lines are skipped, images are not opened.

    Raises:
        ValueError: there is no such file, it holds no pair, or a line is bad; names file and line.
    """
    file = path / FILE if path.is_dir() else path
    if file.suffix != ".jsonl":
        raise ValueError(f"{file}: pairs come from a .jsonl file, or from a folder that holds {FILE}")
    pairs = [_parse(file.parent, where, row) for where, row in read_objects(file)]
    if not pairs:
        raise ValueError(f'{file}: holds no pair: write one {{"prompt": ..., "winner": ..., "loser": ...}} per line')
    return pairs


def _parse(folder: Path, where: str, row: Any) -> Pair:
    texts = {key: row.get(key) if isinstance(row, dict) else None for key in ("prompt", "winner", "loser")}
    wrong = [key for key, text in texts.items() if not isinstance(text, str) or not text.strip()]
    if wrong:
        raise ValueError(
            f"{where}: needs an object with prompt, winner and loser, each a text that is not empty; what is wrong: "
            f"{', '.join(wrong)}"
        )
    check_text(str(texts["prompt"]), where)
    winner, loser = (folder / str(texts[key]) for key in ("winner", "loser"))
    if winner == loser:
        raise ValueError(f"{where}: winner and loser are the same image, {winner}: a pair needs two")
    for image in (winner, loser):
        if not image.is_file():
            raise ValueError(f"{where}: there is no image {image}; paths are relative to the file of pairs")
    margin = row.get("margin", 1.0)
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise ValueError(f"{where}: margin must be a finite number, got {margin!r}")
    return Pair(prompt=str(texts["prompt"]), winner=winner, loser=loser, margin=float(margin))


def load_images(paths: Sequence[Path]) -> Float[Tensor, " b 3 h w"]:
    """Images of one size as float32 in [0, 1], as `flowrl.prompts.source_images.read_image` gives them.

    Raises:
        ValueError: one cannot be read, or they differ in size; names it.
    """
    images = [read_image(path) for path in paths]
    for path, image in zip(paths, images, strict=True):
        if image.shape != images[0].shape:
            sizes = " and ".join(f"{one.shape[2]} x {one.shape[1]}" for one in (images[0], image))
            raise ValueError(f"{path}: its size differs from that of {paths[0]} ({sizes}): resize one of them")
    return torch.stack(images)
