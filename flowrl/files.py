"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
