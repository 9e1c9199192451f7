"""Folders of pictures by the naming rules of several benchmarks, and pictures put under such names.

{index}_{sample}.png      UniGenBench: the prompt's index in its file, samples from 0
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flowrl.generation.folders import Picture


def numbered_name(index: int, sample: int) -> str:
    """`{index}_{sample}.png`."""
    return f"{index}_{sample}.png"


def read_numbered(folder: Path, prompts: Mapping[int, str], samples: int) -> list[Picture]:
    """The pictures `{index}_{sample}.png` of prompts by index, in their order.

    Raises:
        ValueError: no folder, or a picture is missing; says which and how many.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give one with pictures named {{index}}_{{sample}}.png.")
    wanted = [(index, sample) for index in prompts for sample in range(samples)]
    missing = [numbered_name(*key) for key in wanted if not (folder / numbered_name(*key)).is_file()]
    if missing:
        named = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(wanted)} pictures ({named}): draw them all first, or lower "
            f"--samples or --num-prompts; nothing was judged."
        )
    return [
        Picture(file=numbered_name(index, sample), path=folder / numbered_name(index, sample), index=index,
                sample=sample, record={"prompt": prompts[index]})
        for index, sample in wanted
    ]  # fmt: skip


def put(pictures: Sequence[Picture], folder: Path, names: Iterable[str]) -> list[Path]:
    """Puts pictures into a folder under other names, as further links to the same files where the disk allows it."""
    folder.mkdir(parents=True, exist_ok=True)
    placed = []
    for picture, name in zip(pictures, names, strict=True):
        place = folder / name
        if not (place.exists() and os.path.samefile(place, picture.path)):
            place.unlink(missing_ok=True)
            try:
                os.link(picture.path, place)
            except OSError:  # another disk, or one without links
                shutil.copy2(picture.path, place)
        placed.append(place)
    return placed
