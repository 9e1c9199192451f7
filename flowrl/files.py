"""Files that appear whole or not at all, folders with one owner, and what JSON can hold."""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream that becomes the file at its end; if anything is raised inside, what was there before stays.

    Each writer has a place of its own, so that two at once do not mix. The folder is made where it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        os.chmod(temporary, 0o644)  # mkstemp keeps a file to its owner; it is for whoever may read the folder
        os.replace(temporary, path)
    finally:  # an interrupt too leaves nothing behind
        Path(temporary).unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a text file in one step: a reader, or a crash, sees the old text or the new, never half."""
    with replacing(path) as stream:
        stream.write(text.encode())


@contextmanager
def locked(folder: Path, busy: str) -> Iterator[IO[str]]:
    """Keeps other processes out of a folder, which is made where it is missing.

    A process that inherits the open file holds the lock too: it is free when the last of them has ended.

    Raises:
        ValueError: somebody holds it; `busy` says who that may be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{busy} is still at work in {folder}: wait for it, or end it first") from error
        yield lock


def plain(value: Any) -> Any:
    """Numbers, text, lists and mappings that JSON knows, of dataclasses too; null for what is not finite."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
