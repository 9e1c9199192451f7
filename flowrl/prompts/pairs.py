"""Reads images with their prompts from files: single ones, or preference pairs of winner and loser.

A JSONL file holds one object per line; paths of images are relative to the file:

    {"prompt": "a photo of a red circle", "winner": "images/0001.png", "loser": "images/0002.png"}
    {"prompt": "a photo of a red circle", "image": "images/0001.png"}

A pair may have `margin`, by how much the winner is better, and `source`, an image that both are compared with. Other
keys are kept. A folder stands for `pairs.jsonl` or `images.jsonl` in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.prompts.prompt_files import read_objects
from flowrl.prompts.source_images import Size, read_image
from flowrl.prompts.text_checks import check_text
from flowrl.runtime.shapes import Float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One line of a file of pairs."""

    prompt: str
    winner: Path
    loser: Path
    margin: float = 1.0
    record: Mapping[str, Any] = field(default_factory=dict)
    """The object of its line; the path of its `source` is that of a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One line of a file of images."""

    prompt: str
    image: Path


def read_pairs(path: Path) -> list[Pair]:
    """Reads a file of pairs, or `pairs.jsonl` of a folder; blank lines are skipped, images are not opened. Raises
    ValueError: there is no such file, it holds no pair, or a line is bad; names file and line."""
    found = []
    for where, row, prompt, (winner, loser) in _read(path, "pairs", "winner", "loser"):
        if winner == loser:
            raise ValueError(f"{where}: winner and loser are the same image, {winner}: a pair needs two")
        margin = 1.0 if row.get("margin") is None else row["margin"]
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not math.isfinite(margin):
            raise ValueError(f"{where}: margin must be a finite number, got {margin!r}")
        if (named := row.get("source")) is not None:
            source = (path if path.is_dir() else path.parent) / str(named)
            if not isinstance(named, str) or not source.is_file():
                raise ValueError(f"{where}: there is no image {source}, the source; paths are relative to the file")
            row |= {"source": source}
        found.append(Pair(prompt=prompt, winner=winner, loser=loser, margin=float(margin), record=row))
    return found


def read_shown(path: Path) -> list[Shown]:
    """Reads a file of images with their prompts, or `images.jsonl` of a folder; as `read_pairs`."""
    return [Shown(prompt=prompt, image=image) for _, _, prompt, (image,) in _read(path, "images", "image")]


def _read(path: Path, what: str, *keys: str) -> Iterator[tuple[str, dict[str, Any], str, list[Path]]]:
    """Reads each line of a file of pairs or images: its place, its object, the prompt, and the images under `keys`."""
    file = path / f"{what}.jsonl" if path.is_dir() else path
    if file.suffix != ".jsonl":
        raise ValueError(f"{file}: {what} come from a .jsonl file, or from a folder that holds {what}.jsonl")
    rows = read_objects(file)
    if not rows:
        line = ", ".join(f'"{key}": ...' for key in ("prompt", *keys))
        raise ValueError(f"{file}: holds no {what}: write one {{{line}}} per line")
    for where, row in rows:
        texts: dict[str, Any] = {key: row.get(key) if isinstance(row, dict) else None for key in ("prompt", *keys)}
        wrong = [key for key, text in texts.items() if not isinstance(text, str) or not text.strip()]
        if wrong:
            raise ValueError(
                f"{where}: needs an object with {', '.join(('prompt', *keys[:-1]))} and {keys[-1]}, each a text that "
                f"is not empty; what is wrong: {', '.join(wrong)}"
            )
        check_text(texts["prompt"], where)
        images = [file.parent / texts[key] for key in keys]
        for image in images:
            if not image.is_file():
                raise ValueError(f"{where}: there is no image {image}; paths are relative to the file")
        yield where, row, texts["prompt"], images


def load_images(paths: Sequence[Path], size: Size | None = None) -> Float[Tensor, " b 3 h w"]:
    """Loads images of one size, or resized to `size`, with `flowrl.prompts.source_images.read_image`. Raises
    ValueError: one cannot be read, or they differ in size; the message names it."""
    images = [read_image(path, size) for path in paths]
    for path, image in zip(paths, images, strict=True):
        if image.shape != images[0].shape:
            sizes = " and ".join(f"{one.shape[2]} x {one.shape[1]}" for one in (images[0], image))
            raise ValueError(f"{path}: its size differs from that of {paths[0]} ({sizes}): resize one of them")
    return torch.stack(images)
