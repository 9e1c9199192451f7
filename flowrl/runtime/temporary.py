"""Temporary folders of a process. If it is killed, the next folder of the same kind removes what it left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

_OWNER = "flowrl.lock"
"""The file in a folder that says whose it is: locked as long as that process lives."""


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder whose name begins with `prefix`, removed at the end of its `with` or of the process."""

    def __init__(self, prefix: str) -> None:
        super().__init__(suffix=None, prefix=prefix, dir=without_abandoned(tempfile.gettempdir(), prefix))
        self._lock = claim(Path(self.name))

    def cleanup(self) -> None:
        super().cleanup()
        self._lock.close()


def claim(folder: Path) -> IO[bytes]:
    """Marks a folder as that of a live process, as long as the file that it returns is open."""
    lock = (folder / _OWNER).open("wb")
    with suppress(OSError):  # a disk without locks: folders of killed runs stay
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def without_abandoned(parent: str, prefix: str) -> str:
    """Returns `parent` without the folders `prefix*` that ended processes of this user had claimed."""
    for folder in Path(parent).glob(f"{prefix}*"):
        with suppress(OSError):  # not claimed, in use, or on a disk without locks
            if folder.is_symlink() or (folder / _OWNER).lstat().st_uid != os.getuid():
                continue
            with (folder / _OWNER).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    return parent
