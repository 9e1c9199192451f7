"""Lists the samples of a run by iteration, and finds the file of one of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flowrl.runs.run_data import iteration_of, shown_prompts

MOST_PROMPTS = 64
_FILE = re.compile(r"\d{1,6}\.(png|mp4)")


def samples_of(folder: Path) -> dict[str, Any]:
    """`prompts`, texts with seeds by number, and `iterations`, the names of files of each sampling that is there."""
    samples = folder / "samples"
    found: dict[int, list[str]] = {}
    for path in samples.glob("iteration_*"):
        number = iteration_of(path)
        if number is not None and path.is_dir() and not path.is_symlink():
            names = sorted(file.name for file in path.iterdir() if _FILE.fullmatch(file.name))
            if names:
                found[number] = [name for name in names if int(name.partition(".")[0]) < MOST_PROMPTS]
    prompts = shown_prompts(samples, [])[:MOST_PROMPTS]
    return {
        "prompts": [
            {"prompt": str(entry.get("prompt", number)), "seed": str(entry.get("seed", ""))}
            for number, entry in enumerate(prompts)
        ],
        "iterations": {str(number): found[number] for number in sorted(found)},
    }


def sample_file(folder: Path, iteration: int, name: str) -> Path | None:
    """The file of a sample; None if there is none, or if it lies outside the folder."""
    if not _FILE.fullmatch(name):
        return None
    path = folder / "samples" / f"iteration_{iteration:06d}" / name
    inside = path.resolve().is_relative_to((folder / "samples").resolve()) and not (folder / "samples").is_symlink()
    return path if inside and path.is_file() else None
