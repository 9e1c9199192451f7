"""Files that appear whole or not at all, folders with one owner, and what JSON can hold."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

LOCK = ".lock"
"""The file of a folder that its owner holds locked."""


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
    """Keeps other processes out of a folder, which is made where it is missing; the file `LOCK` says who is in it.

    A process that inherits the open file holds the lock too: it is free when the last of them has ended, however that
    came. On a file system without locks that is said on standard error, and work goes on.

    Raises:
        ValueError: somebody holds it, with their process id; `busy` says what they may be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{busy} is still at work in {folder}{_holder(folder / LOCK)}: wait for it, or end it first"
            ) from error
        except OSError as error:
            print(
                f"{folder}: this file system has no locks ({error.strerror}), so that nothing keeps a second process "
                "out: start none",
                file=sys.stderr,
            )
        lock.truncate(0)
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "command": command}, lock)
        lock.flush()
        try:
            yield lock
        finally:
            lock.truncate(0)


def _holder(path: Path) -> str:
    """What a lock file says of its holder, in brackets; nothing where it says nothing."""
    for _ in range(5):
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            return f" (process {said['pid']} on {said['host']}: {said['command']})"
        except (OSError, ValueError, KeyError, TypeError):  # held by something else, or about to be written
            time.sleep(0.05)
    return ""


def is_taken(folder: Path) -> bool:
    """Whether a path is something else than a folder that may be written into: one that holds no more than a lock."""
    return folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir()))


def plain(value: Any) -> Any:
    """Numbers, text, lists and mappings that JSON knows, of dataclasses too; null for what is not finite."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
