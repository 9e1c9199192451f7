"""Follows run folders while they grow: every read continues where the last one ended.

It reads only whole lines of metrics, so it never sees part of a row. If a file became shorter or was replaced, the run
was continued from a checkpoint: it is read again, as another generation. Links out of a folder are refused.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.runs.run_data import METRICS, Row, RunData, rows_of, run_of
from flowrl.runtime.failures import LOG
from flowrl.runtime.files import at_work, leads_out

DEEPEST = 3
"""Depth of the search for runs in a given folder; those of a comparison lie two deep."""
MOST_RUNS = 500
SILENT = 120.0
"""Seconds without a row after which an active run counts as silent, or ten of its iterations if that is longer."""
_PARTS = ("config.yaml", "manifest.json", "summary.json", METRICS, "samples", "eval", LOG)


@dataclass(kw_only=True, slots=True, eq=False)
class Followed:
    """A run folder, and the data read so far."""

    folder: Path
    name: str
    number: int
    rows: list[Row] = field(default_factory=list)
    broken: int = 0
    generation: int = 0
    version: tuple[object, ...] = ()
    kept: dict[str, tuple[object, str]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _file: tuple[int, int] = (0, 0)
    _offset: int = 0
    _run: tuple[object, RunData] | None = None

    @property
    def was_read(self) -> bool:
        """Whether the existing rows have been read once."""
        return bool(self.version)

    def refuse_links(self) -> None:
        """Refuses a run with a link out of its folder, without reading it. Raises ValueError: names the part."""
        if found := leads_out(self.folder, _PARTS, deep=1):
            raise ValueError(f"{found}, which is not followed")

    def refresh(self) -> None:
        """Reads new data. Raises ValueError: a link leads out of the folder. Raises OSError: it cannot be read."""
        with self.lock:
            self.refuse_links()
            self._read_on()
            times = (self._time(name) for name in _PARTS if name != METRICS)
            self.version = (self.generation, self._offset, *times)

    def run(self) -> RunData:
        """The run as reports see it, as of the last `refresh`."""
        with self.lock:
            if self._run is None or self._run[0] != self.version:
                self._run = (self.version, run_of(self.folder, self.rows, self.broken))
            return self._run[1]

    def written(self) -> int:
        """Time of the last write to its metrics, or to the folder."""
        return self._time(METRICS) or self._time("")

    def holder(self) -> dict[str, Any] | None:
        """The process that uses the folder."""
        return at_work(self.folder)

    def silent_for(self, usual: float) -> float:
        """Seconds since the metrics were written; 0 if that is not long for iterations of `usual` seconds."""
        try:
            age = time.time() - (self.folder / METRICS).stat().st_mtime
        except OSError:
            return 0.0
        return age if age > max(SILENT, 10 * usual) else 0.0

    def _read_on(self) -> None:
        path = self.folder / METRICS
        if not path.is_file():
            return
        with path.open("rb") as stream:
            now = os.fstat(stream.fileno())
            if (now.st_dev, now.st_ino) != self._file or now.st_size < self._offset:
                self.generation += 1
                self.rows, self.broken, self._offset = [], 0, 0
                self._file = (now.st_dev, now.st_ino)
            stream.seek(self._offset)
            content = stream.read()
        whole = content[: content.rfind(b"\n") + 1]
        rows, broken = rows_of(whole.decode("utf-8", "replace"), METRICS)
        self.rows += rows
        self.broken += broken
        self._offset += len(whole)

    def _time(self, name: str) -> int:
        try:
            return (self.folder / name).stat().st_mtime_ns
        except OSError:
            return 0


@dataclass(kw_only=True, slots=True, eq=False)
class Watched:
    """The runs in the given folders. It finds new ones as they appear; a run keeps its number."""

    given: Sequence[Path]
    found: list[Followed] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> list[Followed]:
        """Looks for runs, and returns all found so far in the order of their numbers."""
        with self.lock:
            known = {run.folder for run in self.found}
            for root in self.given:
                for folder in _runs_below(root, DEEPEST):
                    if folder not in known and len(self.found) < MOST_RUNS:
                        known.add(folder)
                        name, inside = folder.resolve().name, folder.relative_to(root).as_posix()
                        if folder != root:
                            name = f"{root.resolve().name}/{inside}" if len(self.given) > 1 else inside
                        self.found.append(Followed(folder=folder, name=name, number=len(self.found)))
            return list(self.found)


def _runs_below(root: Path, deep: int) -> Iterator[Path]:
    """Folders with a configuration and metrics, or the manifest that a run begins with."""
    if (root / "config.yaml").is_file() and any((root / name).is_file() for name in (METRICS, "manifest.json")):
        yield root
        return
    if deep == 0:
        return
    try:
        inside = sorted(
            entry.name
            for entry in os.scandir(root)
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
        )
    except OSError:  # gone, or nobody may look into it
        return
    for name in inside:
        yield from _runs_below(root / name, deep - 1)
