"""Files of a folder, through links, and a digest of each."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

KEPT_FROM = 2**26
"""Bytes from which the digest of a file's content is kept on disk: reading less takes no time that is felt."""


def files_below(folder: Path) -> dict[str, Path]:
    """All files of a folder and its subfolders, by relative name, sorted by the parts of the names.

    Follows links to files and folders, except a link to a folder above itself. A folder linked twice is listed twice.
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
_SETTLED = 2 * 10**9  # nanoseconds: a file written in the same clock tick as it was read may have the same time
_digests: dict[_Stamp, str] = {}


def file_stamp(status: os.stat_result) -> _Stamp:
    """What every write to a file changes: length and modification time, which a copy may keep, and the file's number
    and the time of its last change of any kind, which no program can set."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def text_digest(text: str, letters: int = 16) -> str:
    """The beginning of the SHA-256 of a text, which may hold what is no Unicode."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:letters]


def content_digest(path: Path) -> str:
    """SHA-256 of a file's content; of a link, that of its target.

    An unchanged file (`file_stamp`) is not read again by this process. From `KEPT_FROM` bytes on later processes do not
    read it either: `flowrl/digests` in the user's cache folder keeps its digest.

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
                    kept = _digests_file()
                    with suppress(OSError):  # nowhere to keep it: the next process reads the file again
                        kept.parent.mkdir(parents=True, exist_ok=True)
                        with kept.open("a", encoding="utf-8") as lines:  # a short line in one write: writers do not mix
                            lines.write(f"{' '.join(map(str, stamp))} {digest}\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give a file that is there") from error
    return digest


def _digests_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flowrl" / "digests"


@functools.cache
def _kept_digests() -> dict[_Stamp, str]:
    """Digests of earlier processes; skips broken lines, which a killed process may leave."""
    try:
        lines = [line.split() for line in _digests_file().read_text("utf-8", "replace").splitlines()]
    except OSError:  # it does not exist yet, or is not ours: files are read again
        return {}
    rows = [line for line in lines if len(line) == 6 and len(line[5]) == 64 and all(map(str.isdigit, line[:5]))]
    return {(int(a), int(b), int(c), int(d), int(e)): digest for a, b, c, d, e, digest in rows}
