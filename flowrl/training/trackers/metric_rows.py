"""`metrics.jsonl` of a run: written row by row, sealed by checkpoints, and checked before a run continues."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.runtime.files import make_folder, opened, parse_json, replacing, sync
from flowrl.runtime.scrubbing import say as print

ROWS = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """The rows of a checkpoint: bytes from the file's start, and their SHA-256 (None: an older version kept none)."""

    size: int = 0
    digest: str | None = None


class MetricRows:
    """The rows of a run at work, kept compressed: if the file is removed, replaced or cut, the next row restores it."""

    def __init__(self, folder: Path, kept: bytes = b"") -> None:
        """Begins a file; `kept` are the rows to continue from, which are all that the file holds now."""
        self.path, self.size = folder / ROWS, 0
        self._digest, self._packer, self._packed = hashlib.sha256(), zlib.compressobj(1), bytearray()
        self._note(kept)

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a row. Raises ValueError: a link or a pipe is in the file's place."""
        self._look()
        line = (json.dumps(row) + "\n").encode()
        with opened(self.path) as file:
            file.write(line)
        self._note(line)

    def seal(self) -> Sealed:
        """Waits until the disk keeps all rows; returns what a checkpoint records of them."""
        self._look()
        if self.size:
            sync(self.path)
            sync(self.path.parent)
        return Sealed(size=self.size, digest=self._digest.hexdigest())

    def _note(self, data: bytes) -> None:
        self.size += len(data)
        self._digest.update(data)
        self._packed += self._packer.compress(data)

    def _look(self) -> None:
        """Restores the file if it is not what was written, judging by its length."""
        there = self.path.exists() or self.path.is_symlink()
        if self.path.is_file() and not self.path.is_symlink():
            size = self.path.stat().st_size
            if size == self.size:
                return
            what = f"was changed (it had {size} bytes, {self.size} were written)"
        elif there:
            what = "was replaced"
        elif self.size:
            what = "was removed"
        else:
            return  # nothing was written yet
        kept = ""
        if there:
            place = set_aside(self.path.parent, [self.path])
            kept = f"; what was there is kept in {place}"
        self._packed += self._packer.flush(zlib.Z_SYNC_FLUSH)
        with replacing(self.path) as stream:
            stream.write(zlib.decompressobj().decompress(bytes(self._packed)))
        advice = "Leave the file alone until the run has ended"
        said = f"{self.path} {what} while the run was at work: all rows were put back{kept}. {advice}"
        print(said, file=sys.stderr, flush=True)


def rows_fault(data: bytes | None, sealed: Sealed) -> str:
    """What is wrong with the rows of a checkpoint, in words; "" if they are whole. `data` is the content of
    `metrics.jsonl`, None if it is missing, and `sealed` what the checkpoint records of its rows."""
    if data is None and sealed.size:
        return f"{ROWS} is not there"
    data = data or b""
    if len(data) < sealed.size:
        return f"{ROWS} has {len(data)} bytes, and {sealed.size} belong to it"
    own = data[: sealed.size]
    if sealed.digest is not None and hashlib.sha256(own).hexdigest() == sealed.digest:
        return ""
    if number := _first_unreadable(own):
        return f"line {number} of {ROWS} cannot be read"
    return "" if sealed.digest is None else f"{ROWS} does not match its checksum: a row has changed"


def readable(data: bytes) -> bytes:
    """The lines that hold a row."""
    return b"".join(line + b"\n" for line in data.split(b"\n") if line.strip() and _is_row(line))


def tail_fault(data: bytes, size: int) -> bool:
    """Whether something after the first `size` bytes is not a row."""
    tail = data[size:]
    return bool(tail) and bool(_first_unreadable(tail))


def _first_unreadable(data: bytes) -> int:
    """The number of the first line that is not a whole row, from 1; 0 if all are."""
    *lines, rest = data.split(b"\n")
    bad = next((number for number, line in enumerate(lines, start=1) if not _is_row(line)), 0)
    return bad or (len(lines) + 1 if rest else 0)


def _is_row(line: bytes) -> bool:
    if not line.strip():
        return True  # between rows, from an editor
    try:
        return isinstance(parse_json(line.decode(), ROWS), dict)
    except ValueError:  # also where it is not UTF-8
        return False


def set_aside(run_folder: Path, paths: list[Path]) -> Path:
    """Puts things of a run folder into a new `damaged-<n>` in it, under their relative paths; returns that folder.
    Folders move. Files are copied, and then overwritten in place: a power cut in between loses nothing."""
    number = 1
    while (place := run_folder / f"damaged-{number}").exists():
        number += 1
    make_folder(place)
    for path in paths:
        target = place / path.relative_to(run_folder)
        make_folder(target.parent)
        if path.is_file() and not path.is_symlink():
            shutil.copyfile(path, target)
            sync(target)
        else:
            path.rename(target)
            sync(path.parent)
        sync(target.parent)
    return place
