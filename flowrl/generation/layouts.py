"""Reads folders of images by the naming rules of several benchmarks, and puts images under such names.

{index}_{sample}.png      UniGenBench: the prompt's index in its file, samples from 0
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flowrl.generation.folders import ImageFile


def numbered_name(index: int, sample: int) -> str:
    """`{index}_{sample}.png`."""
    return f"{index}_{sample}.png"


def read_numbered(folder: Path, prompts: Mapping[int, str], samples: int) -> list[ImageFile]:
    """The images `{index}_{sample}.png` of prompts by index, in order. Raises ValueError: no folder, or images are
    missing; the message says which and how many."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give one with images named {{index}}_{{sample}}.png.")
    wanted = [(index, sample) for index in prompts for sample in range(samples)]
    names = [numbered_name(*key) for key in wanted]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        named = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(wanted)} images ({named}): draw them all first, or lower "
            f"`samples` or `num_prompts`; nothing was judged."
        )
    return [
        ImageFile(file=name, path=folder / name, prompt=prompts[index], index=index, sample=sample)
        for (index, sample), name in zip(wanted, names, strict=True)
    ]


def put(images: Sequence[ImageFile], folder: Path, names: Iterable[str]) -> list[Path]:
    """Puts images into a folder under other names or paths within it, as hard links if the disk allows it."""
    folder.mkdir(parents=True, exist_ok=True)
    placed = []
    for image, name in zip(images, names, strict=True):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if not (place.exists() and os.path.samefile(place, image.path)):
            place.unlink(missing_ok=True)
            try:
                os.link(image.path, place)
            except OSError:  # another disk, or one without links
                shutil.copy2(image.path, place)
        placed.append(place)
    return placed
