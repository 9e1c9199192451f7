"""A journal of answers: one JSON object per line, written at once, read again by the next run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from flowrl.runtime.files import parse_json, write_atomically

Row = dict[str, Any]


class Journal:
    """Answers about images, by key; a context that closes its file. Every identity (whatever an answer depends on
    besides its key: judge, thresholds, templates) has its own file, so judges never mix. Drops a cut last line."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """Opens `folder/journal-<hash of identity>.jsonl`. Raises ValueError: a line before the last cannot be read."""
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
        self.path = folder / f"journal-{digest[:10]}.jsonl"
        self.rows: dict[str, Row] = {}
        if not (self.path.is_file() and b"\n" in self.path.read_bytes()):  # a first line is never an answer
            write_atomically(self.path, json.dumps({"identity": dict(identity)}) + "\n")
        self._read()
        self._file = self.path.open("ab", buffering=0)

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with self.path.open("rb+") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.decode("utf-8", "replace").split("\n")[1:-1], start=2):
            try:
                entry = parse_json(line, f"{self.path}, line {number}")
                self.rows[entry["key"]] = entry["row"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.path}, line {number} cannot be read: delete the file, the answers are asked for again."
                ) from error

    def add(self, key: str, row: Row, *, durable: bool = False) -> None:
        """Writes an answer to the file before the next question; it survives a power cut if `durable`. Raises OSError:
        it could not be written; the file holds no part of it."""
        line, begun = (json.dumps({"key": key, "row": row}) + "\n").encode(), self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
            if durable:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(begun)
            raise
        self.rows[key] = row

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
