"""Prompt sets that shipped configurations name and that do not ship: where they are published, and how to get them."""

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
    """In its repository."""
    megabytes: float | None = None
    """Of the download; None where we could not look."""
    rows: int | None = None
    """Prompts that it gives; None where we could not look."""
    sha256: str = ""
    """Of the file at the set's revision; "" where we could not look."""
    first: int | None = None
    """The lines that are kept, from the top; None keeps all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """A set of prompts under the name that `flowrl data get` takes."""

    about: str
    """What it holds."""
    publisher: str
    """Who publishes it: OWNER/NAME of a repository."""
    licence: str
    """What the publisher states."""
    place: str = ""
    """Either "github" or "hub" where `flowrl data get` fetches it; "" where you get or make it yourself."""
    revision: str = "main"
    """Commit or branch of the repository."""
    files: Mapping[str, PublishedFile] = field(default_factory=dict)
    """Name of the local file -> the published one."""
    by_hand: tuple[str, ...] = ()
    """Names of the local files where nothing fetches them."""
    how: str = ""
    """What to do then."""
    ships: tuple[str, str] | None = None
    """Prompts that ship with flowrl and serve the same purpose, to train on and to evaluate on; None where none do."""

    @property
    def names(self) -> tuple[str, ...]:
        """Local files, as configurations name them."""
        return (*self.files, *self.by_hand)

    @property
    def megabytes(self) -> float | None:
        """Of the download; None where a file's size is unknown."""
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
    """The set of a file in the folder `data`, as a configuration has it, by its name; None where no set has it."""
    folder, _, name = path.rpartition("/")
    return next((key for key, found in PROMPT_SETS.items() if folder == "data" and name in found.names), None)


def advice_on(path: str) -> str:
    """What to do about a file that is not there; "" where no set has it."""
    name = set_of_file(path)
    if name is None:
        return ""
    found = PROMPT_SETS[name]
    way = f"'flowrl data get {name}' fetches it" if found.place else f"'flowrl data list {name}' says how to get it"
    instead = f"; {found.ships['_test' in path]} ships and needs no download" if found.ships else ""
    return f"{way} ({found.about}; from {found.publisher}, licence {found.licence}){instead}"
