"""Digests of models, LoRAs and images on disk, each file read once; imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flowrl.config.locations import split_revision
from flowrl.config.train import option_path
from flowrl.runtime.digests import content_digest, files_below, text_digest

MODEL = "model"
"""Folder of a run that trained all weights of a network: the model with them, as stock diffusers opens it."""
_ENDS = 2**20  # bytes at both ends of a file; digests of earlier versions cover only these and its length
_LONGEST = 1024  # characters of a text that may be a path
_AT_ONCE = 8  # files to read at once


def files_of(place: Path) -> dict[str, Path]:
    """A file under its name, or all files of a folder under relative names, except hidden ones and texts (.md). It
    follows linked folders: a text encoder or autoencoder that several models share is part of each."""
    if place.is_file():
        return {place.name: place}
    return {
        name: path
        for name, path in files_below(place).items()
        if path.suffix != ".md" and not any(part.startswith(".") for part in name.split("/"))
    }


def add_file(digest: Any, path: Path, name: str) -> None:
    """Adds to a `hashlib` digest a file's name, its length, and its content."""
    _add_ends(digest, path, name)
    if path.stat().st_size > 2 * _ENDS:
        digest.update(content_digest(path).encode())


def _add_ends(digest: Any, path: Path, name: str) -> None:
    size = path.stat().st_size
    digest.update(f"{name}:{size}:".encode())
    with path.open("rb") as file:
        digest.update(file.read(_ENDS))
        if size > _ENDS:
            file.seek(max(_ENDS, size - _ENDS))
            digest.update(file.read(_ENDS))


def digest_of_file(path: Path) -> str:
    """A short digest of a file's length and content; of what is more than the two megabytes at its ends, which are all
    that seals of earlier versions cover, a second one stands behind a dash."""
    digest = hashlib.sha256()
    _add_ends(digest, path, "")
    ends = digest.hexdigest()[:16]
    return ends if path.stat().st_size <= 2 * _ENDS else f"{ends}-{content_digest(path)[:16]}"


def add_files(digest: Any, files: Mapping[str, Path]) -> None:
    """Adds each file under its name as `add_file` does; reads several large ones at once."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(digest_of_file, files.values()))  # the content of large files is then known
    for name, path in files.items():
        add_file(digest, path, name)


def digests_of(place: Path) -> dict[str, str]:
    """`digest_of_file` of each of `files_of`; reads several large files at once."""
    files = files_of(place)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(files, pool.map(digest_of_file, files.values()), strict=True))


def same_digest(before: str | None, now: str | None) -> bool:
    """Whether two results of `digest_of_file` mean the same content, as far as both tell."""
    if before is None or now is None or ("-" in before) == ("-" in now):
        return before == now
    return before.partition("-")[0] == now.partition("-")[0]


def named_files(options: Any, name: str = "") -> dict[str, str]:
    """A digest of every file, or folder of files, that options of a reward name on this machine, by dotted option. A
    reward's own version may cover only some of its weights; this covers everything it could load."""
    if isinstance(options, Mapping | list | tuple):
        pairs = options.items() if isinstance(options, Mapping) else enumerate(options)
        return {key: found for part, one in pairs for key, found in named_files(one, f"{name}.{part}").items()}
    try:
        place = option_path(options) if isinstance(options, str) and 0 < len(options) <= _LONGEST else None
        if place is None or not place.exists():
            return {}
    except (OSError, ValueError):  # a text that cannot be a path
        return {}
    return {name.removeprefix("."): text_digest(json.dumps(digests_of(place), sort_keys=True))}


def encoders_digest(model: str, others: Sequence[str]) -> str:
    """The identity of a model's parts that embed prompts: a digest of files, or a hub's commit. Of the `others`, which
    do not embed, only the configuration counts. Raises ValueError: a hub id that is not in this machine's cache."""
    if not Path(model).exists():
        commit = hub_commit(model)
        if commit is None:
            raise ValueError(
                f"prompts.cache: nothing on this machine says which weights {model} has: set pipeline.model to a "
                "folder that it was downloaded to, or remove prompts.cache"
            )
        return f"{model}@{commit}"
    digest, files = hashlib.sha256(), files_of(Path(model))
    left_out = [name for name, path in files.items() if name.partition("/")[0] in others and path.suffix != ".json"]
    add_files(digest, {name: path for name, path in files.items() if name not in left_out})
    return digest.hexdigest()


def hub_commit(model: str) -> str | None:
    """The commit of a hub repository in this machine's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repo, revision = split_revision(model)
    try:
        index = try_to_load_from_cache(repo, "model_index.json", revision=revision)
    except HFValidationError:
        return None
    return Path(index).parent.name if isinstance(index, str) else None
