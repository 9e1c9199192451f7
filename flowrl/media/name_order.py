"""The order of files that belong to the lines of another file: that of the numbers in their names.

2.png  10.png       by value, where letter by letter 10.png would come first
1.png  01.png       have no order: refused
a_1.png  a_2.png  b_1.png    have two, by name and by number: refused
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

_DIGITS = re.compile(r"([0-9]+)")
_CURE = "rename the files so that one number counts them all, or name each in a .jsonl file (file, prompt)"
Key = tuple[str | int, ...]


def natural_key(name: str) -> Key:
    """A name with its numbers as numbers; keys of any two names compare."""
    return tuple(int(part) if place % 2 else part for place, part in enumerate(_DIGITS.split(name)))


def natural_order(paths: Iterable[Path], root: Path) -> list[Path]:
    """Files below a folder, by the numbers in the names of the files and of the folders that they lie in."""
    return sorted(paths, key=lambda path: [natural_key(name) for name in path.relative_to(root).parts])


def check_order(ordered: Iterable[Path], root: Path) -> None:
    """Refuses names that have no one order, where the order says what belongs to which file.

    Args:
        ordered: files below `root`, as `natural_order` gives them.
        root: the folder.

    Raises:
        ValueError: two names of a folder that are one but for zeros or the ending, or names whose numbers run against
            the order of their letters; names both.
    """
    inside: dict[Path, dict[str, Path]] = {}
    for path in ordered:
        parts = path.relative_to(root).parts
        for depth, name in enumerate(parts):
            inside.setdefault(root.joinpath(*parts[:depth]), {}).setdefault(name, path)
    for folder, names in inside.items():
        _check_folder(folder, [Path(name).stem if folder / name == path else name for name, path in names.items()])


def _check_folder(folder: Path, names: list[str]) -> None:
    known: dict[Key, str] = {}
    for name in names:
        if (other := known.setdefault(natural_key(name), name)) is not name:
            raise ValueError(f"{folder} holds {other} and {name}, of which neither comes first: {_CURE}.")
    numbered = [name for name in names if _DIGITS.search(name)]
    if len({_DIGITS.sub("", name) for name in numbered}) < 2:
        return
    for one, other in pairwise(numbered):
        if [*map(int, _DIGITS.findall(other))] < [*map(int, _DIGITS.findall(one))]:
            raise ValueError(
                f"{folder}: by name {one} comes before {other}, by number after it, so the order of names does not "
                f"tell which prompt is whose: {_CURE}."
            )
