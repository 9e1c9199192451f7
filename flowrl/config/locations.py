"""The location of a model as a text: a folder, a single file, a hub id, or a hub id at a revision (``ID@REVISION``)."""

from __future__ import annotations

import re
from pathlib import Path

_PINNED = re.compile(r"([\w.-]+(?:/[\w.-]+)?)@(\S+)")


def at_revision(model: str, revision: str | None) -> str:
    """A location with its revision; only a hub id has one. Raises ValueError: the model is a local file or folder."""
    if revision is None:
        return model
    if Path(model).exists() or is_path(model):
        raise ValueError(f"pipeline.revision ({revision}) is for models on the hub, and {model} is not one: remove it")
    return f"{model}@{revision}"


def is_path(model: str) -> bool:
    """Whether a location is written as a path or an asset, and so is not a hub id even if nothing is there."""
    return model.startswith(("asset:", "/", "./", "../", "~"))


def hub_id(location: str) -> str | None:
    """The hub id of a location, without its revision; None for a local place or an asset."""
    if is_path(location) or Path(location).expanduser().exists() or location.count("/") != 1:
        return None
    return split_revision(location)[0]


def split_revision(location: str) -> tuple[str, str | None]:
    """A location without its revision, and the revision, or None if it has none."""
    found = None if Path(location).exists() else _PINNED.fullmatch(location)
    return (location, None) if found is None else (found[1], found[2])
