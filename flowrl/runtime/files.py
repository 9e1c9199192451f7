"""Files that appear whole or not at all and survive a power cut, folders with one owner, links that lead out of a
folder, text and JSON whose errors name their file."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import struct
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from re import Pattern
from typing import Any, BinaryIO

from flowrl.runtime.call import call_words
from flowrl.runtime.disk_errors import disk_words
from flowrl.runtime.scrubbing import say as print
from flowrl.runtime.scrubbing import without_secrets

LOCK = ".lock"
"""The file of a folder that its owner holds locked."""
_HELD = b'{"pid": '
"""How the text of a lock that is held begins."""
DEEPEST = 100
"""Brackets within brackets that JSON may have: nothing here needs more, and readers of records go down by recursion."""


_HALF = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
"""Names of files that `replacing` had begun when its process was killed."""


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A stream that becomes the file at its end; after an error inside, the earlier file stays.

    Each writer has its own temporary file, so two at once do not mix. A missing folder is made. The file replaces a
    link; the link's target stays.

    Args:
        durable: flush the bytes to disk before the name, and the name before returning: the file survives a power cut
        whole. Otherwise it may be empty then; use that for what is cheap to make again.

    Raises ValueError: something other than a file is there.
    """
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise ValueError(f"{path} is {what}, so no file can be written there: give another path")
    make_folder(path.parent)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as stream:  # with the mode that the umask asks for; files of tempfile ignore it
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, path)
        if durable:
            sync(path.parent)
    finally:  # also after an interrupt nothing is left behind
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a text file in one step: a reader, a crash or a power cut sees the old text or the new, never half."""
    with replacing(path) as stream:
        stream.write(text.encode())


def sync(path: Path) -> None:
    """Waits until the disk keeps a file's content or a folder's names; does nothing where file systems cannot."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        if path.is_dir():  # Windows opens none, and a folder that may be written need not be readable
            return
        raise
    try:
        os.fsync(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Waits until the disk keeps everything in a folder that other libraries wrote. Skips links."""
    for place, _, names in os.walk(folder):
        for name in names:
            if not os.path.islink(path := os.path.join(place, name)):
                sync(Path(path))
        sync(Path(place))


def make_folder(folder: Path) -> None:
    """Makes a missing folder and those above it, and waits until the disk keeps their names."""
    missing = []
    place = folder
    while not place.exists():
        missing.append(place)
        place = place.parent
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync(made.parent)


def opened(path: Path) -> BinaryIO:
    """A file to read and append to, made if it is missing. It follows no link and opens no pipe or device. Raises
    ValueError: something else is there."""
    if os.path.lexists(path) and (what := _other_than_file(path)):
        raise ValueError(f"{path} is {what}, and flowrl writes nothing through it: remove it")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o666)
    return os.fdopen(handle, "a+b")


def _other_than_file(path: Path) -> str:
    """What a path is, in words; "" for a file."""
    mode = os.lstat(path).st_mode
    if stat.S_ISREG(mode):
        return ""
    return "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"


def leads_out(folder: Path, parts: Collection[str] = (), *, loose: Collection[str] = (), deep: int = 9) -> str:
    """What leads out of a folder, in words: the first link that ends outside, directly or through other links, or a
    pipe or device; "" if nothing does. The folder itself may be a link.

    Args:
        folder: it may be missing.
        parts: names in it to look at; all of them without.
        loose: names of folders that may hold such links.
        deep: how many levels of folders to look into.
    """
    home = os.path.realpath(folder)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    for entry in entries:
        if parts and entry.name not in parts:
            continue
        if found := _leads_out(entry, home, loose, deep):
            return found
    return ""


def _leads_out(entry: os.DirEntry[str], home: str, loose: Collection[str], deep: int) -> str:
    """`leads_out` of one name in a folder."""
    if entry.is_symlink():
        end = os.path.realpath(entry.path)
        outside = os.path.commonpath([home, end]) != home
        return f"{_below(entry.path, home)} is a link out of the run folder" if outside else ""
    if entry.is_dir():
        if deep == 0 or entry.name in loose:
            return ""
        inside = sorted(os.scandir(entry.path), key=lambda inner: inner.name)
        return next((found for inner in inside if (found := _leads_out(inner, home, loose, deep - 1))), "")
    return "" if entry.is_file() else f"{_below(entry.path, home)} is a pipe or a device"


def _below(path: str, home: str) -> str:
    return os.path.relpath(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)), home)


def refuse_foreign(path: Path, *, own: bool | Pattern[str], flag: str = "`out`") -> None:
    """Refuses to replace a file that the command did not write. The rule for every command with an output path:

    it writes a path that is free or an empty file, and replaces only what it recognises as its own.

    Args:
        own: whether the command wrote what is there, or a pattern that its files hold.
        flag: the flag that named the file, for the message.
    """
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return
    if not isinstance(own, bool):
        own = path.is_file() and own.search(path.read_text(encoding="utf-8", errors="replace")) is not None
    if not own:
        raise ValueError(
            f"{path} is there already and is nothing that this command wrote, so it will not be overwritten: give "
            f"another {flag}, or move it away"
        )


@contextmanager
def locked(folder: Path, busy: str) -> Iterator[BinaryIO]:
    """Keeps other processes out of a folder, which it makes if missing; the file `LOCK` names the owner.

    A process that inherits the open file holds the lock too: it is free when the last of them has ended, in whatever
    way. On a file system without locks a note goes to standard error, and work goes on.

    Raises ValueError: another process holds it (its id is named; `busy` says what it may be), or `LOCK` is not a file
    of this kind, and nothing was written.
    """
    make_folder(folder)
    path = folder / LOCK
    with opened(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{busy} is still at work in {folder}{_holder(path)}: wait for it, or end it first"
            ) from error
        except OSError as error:
            print(
                f"{folder}: this file system has no locks ({error.strerror}), so nothing keeps a second process "
                "out: start none",
                file=sys.stderr,
            )
        lock.seek(0)
        if (before := lock.read(len(_HELD)).strip(b"\0")) and not _HELD.startswith(before):
            raise ValueError(f"{path} is not a lock of flowrl and will not be overwritten: move it away")
        lock.truncate(0)
        command = without_secrets(call_words())
        lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "command": command}).encode())
        lock.flush()
        try:
            yield lock
        finally:
            lock.truncate(0)


def _holder(path: Path) -> str:
    """The holder that a lock file names, in brackets; "" if it names none."""
    for _ in range(5):
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            return f" (process {said['pid']} on {said['host']}: {said['command']})"
        except (OSError, ValueError, KeyError, TypeError):  # another program holds it, or it is about to be written
            time.sleep(0.05)
    return ""


def at_work(folder: Path) -> dict[str, Any] | None:
    """The owner of a folder, by its lock file: `pid`, `host`, `command`; None if there is none, or if the process is of
    this machine and has ended. It never takes the lock: even a try could keep the next owner out."""
    try:
        if _other_than_file(folder / LOCK):
            return None
        said = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        process = int(said["pid"])
        found = {"pid": process, "host": str(said["host"]), "command": str(said["command"])}
        if found["host"] == socket.gethostname():
            os.kill(process, 0)
    except PermissionError:  # it exists and belongs to another user
        return found
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return found


def is_taken(folder: Path) -> bool:
    """Whether a path is no folder free to write into, with at most a lock and files that a killed process had begun."""
    return os.path.lexists(folder) and (not folder.is_dir() or any(True for _ in contents(folder)))


def contents(folder: Path) -> Iterator[Path]:
    """What a folder holds besides its lock and files that a killed process had begun."""
    for path in folder.iterdir():
        own = path.name == LOCK or _HALF.fullmatch(path.name)
        if not own or _other_than_file(path):
            yield path


def nearest_folder(path: Path) -> Path:
    """The path if it is a folder, else the nearest folder above it: its disk would hold the path."""
    place = path.expanduser().absolute()
    while not place.is_dir():
        place = place.parent
    return place


def refuse_unwritable(folder: Path, *, flag: str = "`out`") -> None:
    """Refuses a folder (it may be missing) that could not be made or written into, as far as can be known without
    trying; `flag` named it, for the message."""
    place = folder.expanduser().absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"{folder} cannot be a folder, since {place} is not one: give another {flag}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} cannot be written: nothing can be written into {place}: give another {flag}")


def free_bytes(path: Path) -> int:
    """Room on the disk that a path is on, or would be made on."""
    return shutil.disk_usage(nearest_folder(path)).free


def read_text(path: Path) -> str:
    """A text file in UTF-8, with or without a byte order mark. Raises ValueError: it is missing, is not a file (reading
    a pipe might never end), or is not UTF-8."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device: copy what it gives into a file"
        raise ValueError(f"{path}: cannot be read, it is {what}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {disk_words(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text ({error}): save it as UTF-8") from error


def parse_json(text: str, where: str, *, finite: bool = True) -> Any:
    """The value of a JSON text.

    Args:
        text: all of a file, or a line of it.
        where: file, or file and line, for messages.
        finite: refuse NaN and infinity, which JSON does not have; files of diffusers hold them (Sana's scheduler).

    Raises ValueError: not JSON, a key twice, NaN, infinity, a number beyond 1e308, half a character (a lone surrogate),
    or nested too deep.
    """
    try:
        finite_alone: Any = {"parse_constant": _no_constant, "parse_int": _number, "parse_float": _number}
        value = json.loads(text, object_pairs_hook=_each_key_once, **(finite_alone if finite else {}))
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.strip() else ""
        raise ValueError(f"{where}: not valid JSON ({error.msg} at {line}column {error.colno})") from error
    except RecursionError as error:
        raise ValueError(f"{where}: brackets are nested more than {DEEPEST} deep: flatten it") from error
    except ValueError as error:  # of the hooks, and numbers of thousands of digits
        raise ValueError(f"{where}: {error}") from error
    if text.count("[") + text.count("{") > DEEPEST and _depth(value) > DEEPEST:
        raise ValueError(f"{where}: brackets are nested more than {DEEPEST} deep: flatten it")
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ValueError(f"{where}: {half} is half a character: write both halves, or none") from error
    return value


def read_json(path: Path, advice: str = "", *, finite: bool = True) -> dict[str, Any]:
    """The object that a JSON file holds; `advice` tells what to do about a bad file, `finite` is as for `parse_json`.
    Raises ValueError: as `read_text` and `parse_json`, or it does not hold an object."""
    try:
        value = parse_json(read_text(path), str(path), finite=finite)
        if not isinstance(value, dict):
            raise ValueError(f"{path}: must hold an object {{...}}, it holds {_kind(value)}")
    except ValueError as error:
        raise ValueError(f"{error}: {advice}" if advice else str(error)) from error
    return value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, one a line; skips blank lines. Raises ValueError: as `read_json`, with the line."""
    rows = []
    for number, line in numbered_lines(read_text(path)):
        where = f"{path}, line {number}"
        rows.append(parse_json(line, where))
        if not isinstance(rows[-1], dict):
            raise ValueError(f"{where}: must hold an object {{...}}, it holds {_kind(rows[-1])}")
    return rows


def numbered_lines(text: str) -> list[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1."""
    # Not splitlines, which also cuts at characters such as U+2028 that JSON strings may hold.
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"names {next(key for key in keys if keys.count(key) > 1)!r} twice: keep one of them")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON knows no {name}: write a number, or null")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:9]}... is beyond 1e308: write a smaller number, or null")
    return int(text) if text.lstrip("-").isdigit() else value


def _depth(value: Any) -> int:
    """How deep lists and objects are nested; without recursion, which it guards."""
    deep, level = 0, [value]
    while level := [part for part in level if isinstance(part, dict | list)]:
        deep += 1
        level = [part for parts in level for part in (parts.values() if isinstance(parts, dict) else parts)]
    return deep


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "null", bool: "true or false"}.get(type(value), "a number")


def plain(value: Any) -> Any:
    """A value in JSON's types, also from dataclasses; null for what is not finite."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def safetensors_parameters(file: Path) -> int:
    """Elements of the tensors in a safetensors file, from its header. Raises ValueError: the file is another one."""
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < size < 2**30:
            raise ValueError(f"{file} is not a safetensors file: download or save it again")
        header = parse_json(stream.read(size).decode("utf-8", "replace"), str(file))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
