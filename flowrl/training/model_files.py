"""What tells models, LoRAs and images on disk apart without reading gigabytes; nothing heavy is imported here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.config.locations import at_revision, is_path, split_revision
from flowrl.config.sections import PipelineConfig
from flowrl.config.train import resolve_path

MODEL = "model"
"""Folder of a run that trained all weights of a network: the model with them, as stock diffusers opens it."""
_ENDS = 2**20  # bytes at both ends of a file that its digest covers, beside its length


def files_of(place: Path) -> dict[str, Path]:
    """A file under its name, or all of a folder under their relative ones, but for hidden ones and texts (.md)."""
    if place.is_file():
        return {place.name: place}
    found = {path.relative_to(place): path for path in sorted(place.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path
        for name, path in found.items()
        if name.suffix != ".md" and not any(part.startswith(".") for part in name.parts)
    }


def add_file(digest: Any, path: Path, name: str) -> None:
    """Adds to a `hashlib` digest a file's name, its length, and a megabyte at both ends.

    Weights that were trained further differ there too.
    """
    size = path.stat().st_size
    digest.update(f"{name}:{size}:".encode())
    with path.open("rb") as file:
        digest.update(file.read(_ENDS))
        if size > _ENDS:
            file.seek(max(_ENDS, size - _ENDS))
            digest.update(file.read(_ENDS))


def digest_of_file(path: Path) -> str:
    """A short digest of a file as `add_file` sees it."""
    digest = hashlib.sha256()
    add_file(digest, path, "")
    return digest.hexdigest()[:16]


def encoders_digest(model: str, others: Sequence[str]) -> str:
    """What tells the parts of a model that embed prompts from those of another: a digest of files, or a hub's commit.

    Args:
        model: folder or hub id.
        others: parts that do not embed, of which only the configuration counts.

    Raises:
        ValueError: a hub id that is not in this machine's cache, of which nothing tells which weights it has.
    """
    if not Path(model).exists():
        commit = hub_commit(model)
        if commit is None:
            raise ValueError(
                f"prompts.cache: nothing on this machine tells which weights {model} has: set pipeline.model to a "
                "folder that it was downloaded to, or remove prompts.cache"
            )
        return f"{model}@{commit}"
    digest = hashlib.sha256()
    for name, path in files_of(Path(model)).items():
        if name.partition("/")[0] not in others or path.suffix == ".json":
            add_file(digest, path, name)
    return digest.hexdigest()


def hub_commit(model: str) -> str | None:
    """The commit of a hub repository in this machine's cache; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repo, revision = split_revision(model)
    try:
        index = try_to_load_from_cache(repo, "model_index.json", revision=revision)
    except HFValidationError:
        return None
    return Path(index).parent.name if isinstance(index, str) else None


def model_location(model: str) -> str:
    """What a family's `load` takes: the path of an asset or of what is written as a path, else the text, a hub id."""
    return str(resolve_path(model)) if is_path(model) else model


def location_of(settings: PipelineConfig) -> str:
    """The location of the model that a configuration names, at its revision.

    Raises:
        ValueError: a revision of a file or folder.
    """
    return at_revision(model_location(settings.model), settings.revision)
