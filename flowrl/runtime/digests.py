"""Files of a folder, through links, and a digest of what is in each."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from pathlib import Path

KEPT_FROM = 2**26
"""Bytes from which the digest of a file's content is kept on disk: reading less takes no time that is felt."""


def files_below(folder: Path) -> dict[str, Path]:
    """All files of a folder and of those in it, by their relative names, in the order of the parts of these.

    Links to files and to folders are followed, but for a link to a folder that it lies in. Of two links to one folder
    each has its files.
    """
    found: dict[str, Path] = {}

    def walk(place: Path, name: str, above: frozenset[tuple[int, int]]) -> None:
        status = place.stat()
        here = (status.st_dev, status.st_ino)
        if here in above:
            return
        for path in place.iterdir():
            if path.is_dir():
                walk(path, f"{name}{path.name}/", above | {here})
            elif path.is_file():
                found[f"{name}{path.name}"] = path

    walk(folder, "", frozenset())
    return {name: found[name] for name in sorted(found, key=lambda name: name.split("/"))}


_Stamp = tuple[int, int, int, int, int]
_SETTLED = 2 * 10**9  # nanoseconds: a file written in the tick of the clock in which it was read may bear the same time
_digests: dict[_Stamp, str] = {}


def file_stamp(status: os.stat_result) -> _Stamp:
    """What no write to a file leaves as it was: beside length and time of change, which a copy may bring along, the
    file's number and the time at which the system last changed anything of it, which no program can set."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def content_digest(path: Path) -> str:
    """SHA-256 of all of a file's content, of links that of what they lead to.

    A file that has not changed since (`file_stamp`) is not read again: by this process, or by a later one where it
    holds `KEPT_FROM` bytes or more, whose digests are kept in `flowrl/digests` of the user's cache folder.

    Raises ValueError: it cannot be read.
    """
    try:
        with path.open("rb") as stream:
            stamp = file_stamp(os.fstat(stream.fileno()))
            large = stamp[2] >= KEPT_FROM
            if known := _digests.get(stamp) or (_kept_digests().get(stamp) if large else None):
                return known
            settled = stamp[4] < time.time_ns() - _SETTLED
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if settled and file_stamp(os.fstat(stream.fileno())) == stamp:
                _digests[stamp] = digest
                if large:
                    _keep_digest(stamp, digest)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give a file that is there") from error
    return digest


def _digests_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flowrl" / "digests"


@functools.cache
def _kept_digests() -> dict[_Stamp, str]:
    """Those of earlier processes; a line that is none, of a process that was killed, is passed over."""
    try:
        lines = [line.split() for line in _digests_file().read_text("utf-8", "replace").splitlines()]
    except OSError:  # there is none yet, or it is somebody else's: files are read again
        return {}
    rows = [line for line in lines if len(line) == 6 and len(line[5]) == 64 and all(map(str.isdigit, line[:5]))]
    return {(int(a), int(b), int(c), int(d), int(e)): digest for a, b, c, d, e, digest in rows}


def _keep_digest(stamp: _Stamp, digest: str) -> None:
    file = _digests_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:  # one short line in one write: writers do not mix
            stream.write(f"{' '.join(map(str, stamp))} {digest}\n")
    except OSError:  # no place to keep it: the next process reads the file again
        pass
