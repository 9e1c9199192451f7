"""The order of files that belong to the lines of another file, by the numbers in their names.

2.png  10.png       by value, where letter by letter 10.png would come first
1.png  01.png       have no order: refused
a_1.png  a_2.png  b_1.png    have two, by name and by number: refused
0.5.png  0.25.png            have two as well
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

_DIGITS = re.compile(r"(\d+)")  # of any script
_DECIMAL = re.compile(r"\d[.,]\d")
_CURE = "rename the files so that one number counts them all, or name each in a .jsonl file (file, prompt)"
Key = tuple[str | int, ...]


def natural_key(name: str) -> Key:
    """A name with its numbers as numbers; keys of any two names compare."""
    return tuple(int(part) if place % 2 else part for place, part in enumerate(_DIGITS.split(name)))


def is_hidden(path: Path, root: Path) -> bool:
    """Whether systems or editors left a file below a folder: `._1.png`, `.ipynb_checkpoints`."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.relative_to(root).parts)


def natural_order(paths: Iterable[Path], root: Path) -> list[Path]:
    """Files below a folder, sorted by the numbers in their names and in the names of their folders."""
    return sorted(paths, key=lambda path: [natural_key(name) for name in path.relative_to(root).parts])


def check_order(ordered: Iterable[Path], root: Path) -> None:
    """Refuses names without a unique order if the order matches files with lines. Raises ValueError: two names of a
    folder differ only in zeros or the ending, or numbers and letters give different orders; the message names both."""
    inside: dict[Path, dict[str, Path]] = {}
    for path in ordered:
        parts = path.relative_to(root).parts
        for depth, name in enumerate(parts):
            inside.setdefault(root.joinpath(*parts[:depth]), {}).setdefault(name, path)
    for folder, names in inside.items():
        stems = {name: Path(name).stem if folder / name == path else name for name, path in names.items()}
        _check_folder(folder, stems)


def _check_folder(folder: Path, stems: Mapping[str, str]) -> None:
    """`stems` are names in their order, with what is left of each without its ending."""
    known: dict[Key, str] = {}
    for name, stem in stems.items():
        if (other := known.setdefault(natural_key(stem), name)) != name:
            raise ValueError(f"{folder} holds {other} and {name}, of which neither comes first: {_CURE}.")
    numbered = [(name, stem) for name, stem in stems.items() if _DIGITS.search(stem)]
    one_kind = len({_DIGITS.sub("", stem) for _, stem in numbered}) < 2
    if one_kind and not any(_DECIMAL.search(stem) for _, stem in numbered):
        return
    twice = [
        (one, other)
        for (one, before), (other, after) in pairwise(numbered)
        if [*map(int, _DIGITS.findall(after))] < [*map(int, _DIGITS.findall(before))]
    ]
    letters = sorted(name for name, _ in numbered)
    twice += [(one, other) for one, (other, _) in zip(letters, numbered, strict=True) if one != other]
    for one, other in twice[:1]:
        raise ValueError(
            f"{folder}: by name {one} comes before {other}, by number after it, so the order of names does not "
            f"tell which prompt is whose: {_CURE}."
        )
