"""Where a run may be written: a free folder, or one that holds nothing. Nothing heavy is imported here."""

from __future__ import annotations

import shlex
from pathlib import Path

from flowrl.files import LOCK, is_taken, locked

RUNS = Path("runs")
"""Where runs go that were given no folder."""


def make_free_folder(name: str, parent: Path = RUNS) -> Path:
    """Makes `runs/<name>-<n>` with the first free n; two runs that start at once get two folders."""
    number = 1
    while True:
        folder = parent / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def refuse_taken(folder: Path) -> None:
    """Refuses a run folder that holds anything; says who is at work in it where somebody is.

    Raises:
        ValueError: with the ways on.
    """
    if is_taken(folder) and (folder / LOCK).is_file():
        with locked(folder, "another run"):
            pass
    refuse_full(folder)


def refuse_full(folder: Path) -> None:
    """Refuses a run folder that holds anything.

    Raises:
        ValueError: with the two ways on.
    """
    if is_taken(folder):
        raise ValueError(
            f"the run folder {folder} is not empty, and nothing in it will be overwritten: continue it with "
            f"'flowrl train resume={shlex.quote(str(folder))}', or choose another folder with out="
        )
