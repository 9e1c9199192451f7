"""Words for a failure: one paragraph with its cause and what to change. The traceback goes to a file.

It imports nothing heavy, so it knows errors of torch and other libraries by the names of their classes.
"""

from __future__ import annotations

import errno
import io
import os
import platform
import re
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from flowrl.runtime.call import call_words
from flowrl.runtime.disk_errors import DISK, FULL, WORDS, system_words
from flowrl.runtime.extras import remedy
from flowrl.runtime.files import replacing
from flowrl.runtime.scrubbing import printable, say, without_secrets
from flowrl.runtime.versions import version_text

LOG = "error.log"
"""The file of a run folder that holds the traceback of the error that stopped the run."""
SHOW = "FLOWRL_TRACEBACK"
"""Environment variable: set to 1, tracebacks are printed too."""

MAX_TOLD = 18
"""Mistakes that one message names."""
_LONGEST_NAME = 300  # characters shown of a file's name
_MOST = 800  # characters shown of a foreign message
_ALLOCATION, _LOST_PROCESS = (
    re.compile("|".join(WORDS[kind]), re.IGNORECASE) for kind in ("allocation", "lost_process")
)
"""What is said where memory is used up; what gloo, NCCL and torch's store say of a process that is gone."""
_ASKED = re.compile(r"tried to allocate (\d+(?:\.\d+)? \w+)", re.IGNORECASE)


class Faults(ValueError):
    """One fault as a paragraph, or several (`faults`) with a line each."""

    def __init__(
        self, *faults: str, head: str = "what is asked for has", what: str = "mistakes", more: str = ""
    ) -> None:
        """The line above several faults has `head`, their number and `what`; `more` follows the last."""
        self.faults = tuple(dict.fromkeys(faults))
        count = len(self.faults)
        lines = [f"{head} {count} {what}", *self.faults[:MAX_TOLD]]
        lines += [f"and {count - MAX_TOLD} more"] if count > MAX_TOLD else []
        one = f"{self.faults[0]}{f'. {more}' if more else ''}" if count == 1 else ""
        super().__init__(one or "\n  ".join([*lines, *([more] if more else [])]))


def faults_of(error: Exception) -> tuple[str, ...]:
    """The faults that an error holds, each a paragraph."""
    return error.faults if isinstance(error, Faults) else (explain(error),)


def found_by(*checks: Callable[[], object]) -> list[str]:
    """What checks refuse, each fault once: a check raises a ValueError, or an OSError of a file."""
    found = dict[str, None]()
    for check in checks:
        try:
            check()
        except (ValueError, OSError) as error:
            found |= dict.fromkeys(faults_of(error))
    return list(found)


class FlowrlError(ValueError):
    """What the Python functions raise: one paragraph with what was given, what is allowed and what to change."""


def explain(error: BaseException) -> str:
    """One paragraph, without secrets: what went wrong and what to change."""
    return printable(without_secrets(_explained(error)))


def _explained(error: BaseException) -> str:
    names = {kind.__name__ for kind in type(error).__mro__}
    number = _errno(error)
    if out_of_memory(error):
        return _memory(error)
    if number in DISK:
        what, advice = DISK[number]
        deed = "written" if number in FULL else "read or written"
        name = _file_name(error)
        file = _where(error) if name is None else f" ({name if len(name) < _LONGEST_NAME else f'...{name[-99:]}'})"
        return f"a file could not be {deed}: {what}{file}. {advice}"
    if known := next((words for kind, words in WORDS["kinds"].items() if kind in names), ""):
        return known.format(error=error, where=_where(error), short=_short(error))
    if isinstance(error, OSError):
        return _os_error(error)
    if said := _python_error(error):
        return said
    if lost_process(error):
        return (
            "another process of this run ended or cannot be reached. Its own output, on the terminal or in its log, "
            "has the reason. If that says nothing, it was killed from outside: lack of memory (dmesg names it), the "
            "scheduler, or a failure of its machine"
        )
    if re.search(r"CUDA error|device-side assert|HIP error|cudnn", str(error), re.IGNORECASE):
        return (
            f"the GPU reported an error{_where(error)}: start again, with CUDA_LAUNCH_BLOCKING=1 if it comes back, "
            f"which names the line. {_short(error)}"
        )
    return (
        f"an error that flowrl does not know stopped the command{_where(error)}: {type(error).__name__}: "
        f"{_short(error) or 'no message'}"
    )


def _python_error(error: BaseException) -> str:
    """Words for an error of Python itself, by its attributes; "" for others."""
    if isinstance(error, SystemExit):
        return (
            f"sys.exit({'' if error.code is None else repr(error.code)}) was called{_where(error)}, which ends the "
            "command before its work is done: raise an error there instead, with words that say what is wrong"
        )
    if isinstance(error, UnicodeEncodeError):
        return (
            f"{error.object[error.start : error.end]!r} cannot be written as {error.encoding} text{_where(error)}: set "
            "PYTHONIOENCODING=utf-8, or take the character out"
        )
    if isinstance(error, ValueError):
        return str(error) or f"a value was refused without a word{_where(error)}"
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("flowrl"):
        return f"the Python package {error.name!r} is missing{_where(error)}: {remedy(error.name)}, or do without"
    return ""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, means that memory is used up; a ValueError has its own words."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, ValueError):
        kinds = {kind.__name__ for kind in type(seen).__mro__}
        if kinds & {"MemoryError", "OutOfMemoryError"} or _errno(seen) == errno.ENOMEM:
            return True
        if kinds & {"RuntimeError", "SafetensorError", "AcceleratorError"} and _ALLOCATION.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def lost_process(error: BaseException) -> bool:
    """Whether an error means that another process of the run, with which this one exchanged numbers, is gone."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return "RuntimeError" in kinds and _LOST_PROCESS.search(str(error)) is not None


def describe_error(error: BaseException, folder: Path | None = None) -> str:
    """The paragraph of an error. For an unforeseen one it names the file with the traceback: `error.log` in the run's
    folder, or a new file in the temporary folder if `folder` is None."""
    paragraph = explain(error)
    if os.environ.get(SHOW, "") not in ("", "0"):
        say("".join(traceback.format_exception(error)), end="", file=sys.stderr)
    foreseen = isinstance(error, ValueError | OSError) and not isinstance(error, UnicodeError)
    log = None if foreseen and folder is None else write_error_log(folder, error)
    if foreseen or log is None:
        return paragraph
    return f"{paragraph.rstrip('.')}. The traceback is in {log}"


def write_error_log(folder: Path | None, error: BaseException) -> Path | None:
    """Writes an error with its traceback to `error.log` of a folder, or to a file for temporary files.

    Processes other than the first write `error-<rank>.log`.

    Returns the file; None if neither place can be written.
    """
    rank = os.environ.get("RANK", "0")
    text = "\n".join([
        time.strftime("%Y-%m-%dT%H:%M:%S%z"), call_words(),
        f"{version_text()} on {platform.platform()}", "", *traceback.format_exception(error),
    ])  # fmt: skip
    data = without_secrets(text).encode("utf-8", "backslashreplace")
    if folder is not None and folder.is_dir():
        path = folder / (LOG if rank == "0" else f"error-{rank}.log")
        try:
            with replacing(path) as stream:  # not through a link that lies there
                stream.write(data)
        except (OSError, ValueError):
            pass
        else:
            return path
    try:
        handle, name = tempfile.mkstemp(prefix="flowrl-error-", suffix=".log")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
    except OSError:
        return None
    return Path(name)


def speaker() -> str:
    """The speaker's name on the terminal: flowrl, with its rank if several processes run."""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return "flowrl" if world == "1" else f"flowrl (process {rank} of {world})"


def _errno(error: BaseException) -> int | None:
    """The operating system's error number, also if a library has it only in its message."""
    if isinstance(error, OSError):
        return error.errno
    if type(error).__name__ == "SafetensorError":
        found = re.search(r"os error (\d+)", str(error))
        return int(found[1]) if found else None
    written = "PytorchStreamWriter failed" in str(error)
    if (written or "inline_container" in str(error)) and isinstance(error.__context__, OSError):
        return error.__context__.errno  # that of the write before
    return errno.ENOSPC if written else None  # torch.save says no more


def _os_error(error: OSError) -> str:
    if error.errno is None:
        return str(error) or type(error).__name__
    if isinstance(error, ConnectionError):
        return (
            f"a connection failed{_where(error)}: {system_words(error)}. See whether the program at its other end is "
            "there, and what it says"
        )
    name = _file_name(error)
    if name is None:
        return f"the system refused what was asked of it{_where(error)}: {system_words(error)}"
    path = Path(name)
    if error.errno == errno.ENOENT:
        try:
            beside = "" if path.is_absolute() else f" (seen from {Path.cwd()})"
        except OSError:
            beside = " (seen from a working folder that was removed)"
        return f"there is no {path}{beside}: check the path, or whether it was moved while the command ran"
    if error.errno in (errno.EACCES, errno.EPERM):
        if os.path.exists(path) and not os.access(path, os.R_OK):
            return f"{path} cannot be read: you have no right to; ask its owner, or change its mode (chmod)"
        return f"{path} cannot be written: you have no right to; choose another folder, or change its mode (chmod)"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{path} is there already, or lies in what is no folder: choose another place"
    return f"{path}: {system_words(error)}"


def _file_name(error: BaseException) -> str | None:
    """The file that an error names; if it names none, the open file that was being read or written."""
    name = error.filename if isinstance(error, OSError) else None
    if isinstance(name, str | bytes):
        return os.fsdecode(name)
    places = list(traceback.walk_tb(error.__traceback__))
    for frame, _ in reversed(places):
        for value in frame.f_locals.values():
            if isinstance(value, io.IOBase):
                opened = getattr(value, "name", None)  # of one in memory there is none
                if isinstance(opened, str | bytes):
                    return os.fsdecode(opened)
    return None


def _memory(error: BaseException) -> str:
    modules: list[str] = []  # between the handler and the error, and its causes
    seen: BaseException | None = error
    while seen is not None and len(modules) < 2000:
        place = seen.__traceback__
        while place is not None:
            modules.append(str(place.tb_frame.f_globals.get("__name__", "")))
            place = place.tb_next
        seen = seen.__cause__
    text = str(error)
    whose = "the GPU's memory" if re.search(r"CUDA|HIP|MPS|GPU|XPU", text) else "this machine's memory"
    more = ""
    if asked := _ASKED.search(text):
        number, unit = asked[1].split()
        amount = f"{float(number) / 2**30:.2f} GiB" if unit == "bytes" else asked[1]
        more = f" ({amount} more were asked for)"
    cures: dict[str, list[str]] = WORDS["less_memory"]
    phase, advice = cures[next((m for m in cures if any(name.startswith(m) for name in modules)), "flowrl")]
    planned = "; 'flowrl plan CONFIG' says what a run needs" if "batch_size," in advice else ""
    return f"{whose} is used up{f' {phase}' if phase else ''}{more}: {advice}{planned}"


def _where(error: BaseException) -> str:
    """The last line of flowrl or of the user, not of a library, on the way to the error."""
    library = (sysconfig.get_path("stdlib"), "<")
    for line in reversed(traceback.extract_tb(error.__traceback__)):
        if "site-packages" not in line.filename and not line.filename.startswith(library):
            return f" (at {line.filename}:{line.lineno})"
    return ""


def _short(error: BaseException) -> str:
    """A foreign message in one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MOST else f"{text[:_MOST]} ..."
