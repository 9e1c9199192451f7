"""Prompt sets that shipped configurations name but that do not ship: where they are published, and how to get them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flowrl.config.strict_yaml import read_mapping

HUB = "hub"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedFile:
    """A file of a repository."""

    path: str
    """Path in its repository."""
    megabytes: float | None = None
    """Size of the download; None if we could not check."""
    rows: int | None = None
    """Number of prompts in it; None if we could not check."""
    sha256: str = ""
    """Hash of the file at the set's revision; "" if we could not check."""
    first: int | None = None
    """Number of first lines to keep; None keeps all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """A set of prompts, named as for `flowrl data get`."""

    about: str
    """Description of its contents."""
    publisher: str
    """Who publishes it: OWNER/NAME of a repository."""
    licence: str
    """Licence as the publisher states it."""
    place: str = ""
    """"github" or "hub" if `flowrl data get` fetches it; "" if you get or make it yourself."""
    revision: str = "main"
    """Commit or branch of the repository."""
    files: Mapping[str, PublishedFile] = field(default_factory=dict)
    """Name of the local file -> the published one."""
    by_hand: tuple[str, ...] = ()
    """Names of the local files if nothing fetches them."""
    how: str = ""
    """What to do in that case."""
    ships: tuple[str, str] | None = None
    """Prompts that ship with flowrl and serve the same purpose, to train on and to evaluate on; None if none do."""

    @property
    def names(self) -> tuple[str, ...]:
        """Local files, as configurations name them."""
        return (*self.files, *self.by_hand)

    @property
    def megabytes(self) -> float | None:
        """Size of the download; None if a file's size is unknown."""
        sizes = [file.megabytes for file in self.files.values()]
        return None if None in sizes else sum(size for size in sizes if size is not None)


PROMPT_SETS: dict[str, PromptSet] = {
    name: PromptSet(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in row.items() if key != "files"},  # type: ignore[arg-type]
        files={own: PublishedFile(**file) for own, file in row.get("files", {}).items()},
    )
    for name, row in read_mapping(Path(__file__).with_suffix(".yaml")).items()
}
"""Name -> set, from `prompt_sets.yaml`."""


def set_of_file(path: str) -> str | None:
    """The set with a file that a configuration has in the folder `data`, by its name; None if no set has it."""
    folder, _, name = path.rpartition("/")
    return next((key for key, found in PROMPT_SETS.items() if folder == "data" and name in found.names), None)


def advice_on(path: str) -> str:
    """What to do about a missing file; "" if no set has it."""
    name = set_of_file(path)
    if name is None:
        return ""
    found = PROMPT_SETS[name]
    way = f"'flowrl data get {name}' fetches it" if found.place else f"'flowrl data list {name}' says how to get it"
    instead = f"; {found.ships['_test' in path]} ships and needs no download" if found.ships else ""
    return f"{way} ({found.about}; from {found.publisher}, licence {found.licence}){instead}"
