"""What a failure is told as: one paragraph with its cause and what to change; the traceback goes to a file.

Nothing heavy is imported, so errors of torch and other libraries are known by the names of their classes.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shlex
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from flowrl.versions import version_text

LOG = "error.log"
"""The file of a run folder that holds the traceback of the error that stopped the run."""
SHOW = "FLOWRL_TRACEBACK"
"""Environment variable: set to 1, tracebacks are printed too."""

_MOST = 800  # characters of a foreign message that are shown
_ALLOCATION = re.compile(
    r"out of memory|can't allocate memory|not enough memory|cannot allocate memory|unable to allocate|ALLOC_FAILED",
    re.IGNORECASE,
)
_ASKED = re.compile(r"tried to allocate (\d+(?:\.\d+)? \w+)", re.IGNORECASE)
_LESS_MEMORY = (
    ("flowrl.training.heldout", "while evaluating",
     "lower eval.batch_size, then pipeline.vae_slice, and set pipeline.free_text_encoders=true"),
    ("flowrl.training.parts", "while loading",
     "set pipeline.dtype=bfloat16 and pipeline.free_text_encoders=true, and move large rewards to another machine "
     "(flowrl serve, reward remote)"),
    ("flowrl.training.scoring", "while decoding or scoring",
     "lower rollout_batch_size, then pipeline.vae_slice, and move large rewards to another machine (flowrl serve, "
     "reward remote)"),
    ("flowrl.training.paths", "while sampling",
     "lower rollout_batch_size, then pipeline.vae_slice, and set pipeline.free_text_encoders=true"),
    ("flowrl.recipes", "while training",
     "lower micro_batch_size, then rollout_batch_size, and set pipeline.gradient_checkpointing=true"),
    ("flowrl.commands.train", "in the run",
     "lower micro_batch_size, then rollout_batch_size, and set pipeline.gradient_checkpointing=true"),
    ("flowrl.rewards", "in a reward", "score fewer images at once (--batch-size, or the reward's own options)"),
    ("flowrl", "", "lower --batch-size, take --dtype bfloat16, or draw smaller images"),
)  # fmt: skip
"""Module on the way to the error -> what went on, and what needs less memory; the first that fits."""


class FlowrlError(ValueError):
    """What the Python functions raise: one paragraph that says what was given, what is allowed and what to change."""


def explain(error: BaseException) -> str:
    """One paragraph, without secrets: what went wrong and what to change."""
    return printable(without_secrets(_explained(error)))


def _explained(error: BaseException) -> str:
    names = {kind.__name__ for kind in type(error).__mro__}
    number = _errno(error)
    if out_of_memory(error):
        return _memory(error)
    if isinstance(error, SystemExit):
        return (
            f"sys.exit({'' if error.code is None else repr(error.code)}) was called{_where(error)}, which ends the "
            "command before its work is done: raise an error there instead, with words that say what is wrong"
        )
    if number in _WRITING:
        return f"a file could not be written: {_WRITING[number]}{_file(error)}. {_ADVICE[number]}"
    if isinstance(error, RecursionError):
        return (
            f"something is nested too deep or calls itself without an end{_where(error)}: look for a file or a "
            "configuration with many brackets in each other, or a function of yours that calls itself"
        )
    if isinstance(error, UnicodeEncodeError):
        return (
            f"{error.object[error.start : error.end]!r} cannot be written as {error.encoding} text{_where(error)}: set "
            "PYTHONIOENCODING=utf-8, or take the character out"
        )
    if isinstance(error, UnicodeDecodeError):
        return f"a file that is read as text is not {error.encoding} text (byte {error.start}){_where(error)}: {error}"
    if "UnpicklingError" in names:
        return (
            f"a file of weights is damaged, or holds Python objects beside its tensors, which are never run"
            f"{_where(error)}: take the model as .safetensors files. {_short(error)}"
        )
    if "SafetensorError" in names:
        return f"a .safetensors file is damaged or cut short{_where(error)}: get it again. {_short(error)}"
    if isinstance(error, OSError):
        return _os_error(error)
    if isinstance(error, ValueError):
        return str(error) or f"a value was refused without a word{_where(error)}"
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("flowrl"):
        return f"the Python package {error.name!r} is missing{_where(error)}: install it, or take what does not need it"
    if "TorchDynamoException" in names:
        return (
            f"the network's blocks could not be compiled: set pipeline.compile=none, which computes the same, slower. "
            f"{_short(error)}"
        )
    if re.search(r"connection (closed|reset) by peer|Broken pipe|heartbeat", str(error), re.IGNORECASE):
        return f"another process of this run ended, and says itself why: {_short(error)}"
    if re.search(r"CUDA error|device-side assert|HIP error|cudnn", str(error), re.IGNORECASE):
        return (
            f"the GPU reported an error{_where(error)}: start again, with CUDA_LAUNCH_BLOCKING=1 if it comes back, "
            f"which names the line. {_short(error)}"
        )
    return (
        f"an error that flowrl does not know stopped the command{_where(error)}: {type(error).__name__}: "
        f"{_short(error) or 'no message'}"
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is used up, itself or by what caused it; a ValueError speaks for itself."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, ValueError):
        kinds = {kind.__name__ for kind in type(seen).__mro__}
        if kinds & {"MemoryError", "OutOfMemoryError"} or _errno(seen) == errno.ENOMEM:
            return True
        if kinds & {"RuntimeError", "SafetensorError", "AcceleratorError"} and _ALLOCATION.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def told(error: BaseException, folder: Path | None = None) -> str:
    """The paragraph of an error; of one that nobody foresaw with the file that has the traceback.

    Args:
        error: what was raised.
        folder: of the run, for its `error.log`; None takes a file of its own in the folder for temporary files.
    """
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

    Processes of a run but the first write `error-<rank>.log`.

    Returns:
        The file; None where neither place can be written.
    """
    rank = os.environ.get("RANK", "0")
    text = "\n".join([
        time.strftime("%Y-%m-%dT%H:%M:%S%z"), shlex.join(["flowrl", *sys.argv[1:]]),
        f"{version_text()} on {platform.platform()}", "", *traceback.format_exception(error),
    ])  # fmt: skip
    data = without_secrets(text).encode("utf-8", "backslashreplace")
    if folder is not None:
        path = folder / (LOG if rank == "0" else f"error-{rank}.log")
        try:
            path.write_bytes(data)
        except OSError:
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
    """Who speaks on the terminal: flowrl, with its rank where several processes run."""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return "flowrl" if world == "1" else f"flowrl (process {rank} of {world})"


_WRITING = {
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "your quota of the disk is used up",
    errno.EFBIG: "it would be larger than files may be here",
    errno.EROFS: "the disk can only be read",
}
_ADVICE = {
    errno.ENOSPC: "Make room",
    errno.EDQUOT: "Make room, or ask for more",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or write to another disk",
    errno.EROFS: "Choose a folder on another disk",
}


def _errno(error: BaseException) -> int | None:
    """The number of the operating system's error, also where a library wrote it into its message."""
    if isinstance(error, OSError):
        return error.errno
    if type(error).__name__ == "SafetensorError":
        found = re.search(r"os error (\d+)", str(error))
        return int(found[1]) if found else None
    if "PytorchStreamWriter failed" in str(error):  # torch.save says no more
        return errno.ENOSPC
    if "inline_container" in str(error) and isinstance(error.__context__, OSError):  # that of the write before
        return error.__context__.errno
    return None


def _os_error(error: OSError) -> str:
    name = error.filename
    if error.errno is None or not isinstance(name, str | bytes):
        return str(error) or type(error).__name__
    path = Path(os.fsdecode(name))
    if error.errno == errno.ENOENT:
        beside = "" if path.is_absolute() else f" (seen from {_working_folder()})"
        return f"there is no {path}{beside}: check the path, or whether it was moved while the command ran"
    if error.errno in (errno.EACCES, errno.EPERM):
        if path.exists() and not os.access(path, os.R_OK):
            return f"{path} cannot be read: you have no right to; ask its owner, or change its mode (chmod)"
        return f"{path} cannot be written: you have no right to; choose another folder, or change its mode (chmod)"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{path} is there already, or lies in what is no folder: choose another place"
    if error.errno == errno.EMFILE:
        return f"too many files are open at once, {path} is one too many: raise the limit (ulimit -n)"
    return f"{path}: {os.strerror(error.errno)}"


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "a working folder that was removed"


def _file(error: BaseException) -> str:
    name = getattr(error, "filename", None)
    return f" ({name})" if isinstance(name, str) else ""


def _memory(error: BaseException) -> str:
    text, modules = str(error), _modules(error)
    whose = "the GPU's memory" if re.search(r"CUDA|HIP|MPS|GPU|XPU", text) else "this machine's memory"
    asked = _ASKED.search(text)
    more = f" ({_gib(asked[1])} more were asked for)" if asked else ""
    phase, advice = next(
        ((phase, advice) for start, phase, advice in _LESS_MEMORY if any(name.startswith(start) for name in modules)),
        ("", _LESS_MEMORY[-1][2]),
    )
    planned = "; 'flowrl plan CONFIG' says what a run needs" if "batch_size," in advice else ""
    return f"{whose} is used up{f' {phase}' if phase else ''}{more}: {advice}{planned}"


def _gib(amount: str) -> str:
    number, unit = amount.split()
    return f"{float(number) / 2**30:.2f} GiB" if unit == "bytes" else amount


def _modules(error: BaseException) -> list[str]:
    """Names of the modules between the handler and the error, and its causes."""
    found: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(found) < 2000:
        place = seen.__traceback__
        while place is not None:
            found.append(str(place.tb_frame.f_globals.get("__name__", "")))
            place = place.tb_next
        seen = seen.__cause__
    return found


def _where(error: BaseException) -> str:
    """The last line on the way to the error that is flowrl's or the user's, not a library's."""
    library = (sysconfig.get_path("stdlib"), "<")
    for line in reversed(traceback.extract_tb(error.__traceback__)):
        if "site-packages" not in line.filename and not line.filename.startswith(library):
            return f" (at {line.filename}:{line.lineno})"
    return ""


def _short(error: BaseException) -> str:
    """A foreign message in one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MOST else f"{text[:_MOST]} ..."


# ---- what is written for others to read ------------------------------------------------------------------------------

SECRET = "SECRET"
"""What stands where a secret stood."""
_SECRET_VARIABLES = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS")  # ends of names
_SHORTEST = 8  # letters of a variable's value that is looked for: a shorter one occurs in other words
_START = r"(?:(?<![A-Za-z0-9_])|(?<=%[0-9A-Fa-f]{2}))"  # of a word, in an encoded address too
_NAMES = (
    r"(?:(?:access|auth|api|bearer|github|hf|hub|id|private|refresh|secret|security|session|user|wandb)[_-]?)?token"
    r"|[\w-]{0,40}?(?:api|access|secret|private|signing)[_-]?key(?:[_-]?id)?|[\w-]{0,40}?(?:secret|passw(?:or)?d|pwd)"
    r"|[A-Z][A-Z0-9_]{0,60}?_(?:TOKEN|KEY)|client[_-]secret"
)
_EQUALS, _COLON, _AND = r"(?:=|%(?:25){0,4}3[Dd])", r"(?::|%(?:25){0,4}3[Aa])", r"(?:[?&;]|%(?:25){0,4}(?:3[Ff]|26))"
_SLASH, _AT = r"(?:\\?/|%(?:25){0,4}2[Ff])", r"%(?:25){0,4}40"
_VALUE = (
    r"(?!(?:None|null|true|false|TOKEN|SECRET)\b|[$<{*]|%(?:25){0,4}3[Dd])(?:(?!%(?:25){0,4}26)[^\s'\"&,;<>)\]}\\])+"
)
_SHAPES = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        # user:password@ of an address; the last @ before its path, as passwords may hold one
        (rf"(?<=[A-Za-z0-9])({_COLON}(?:(?<=https:)|(?<=http:)|{_SLASH}){_SLASH})(?!git@)"
         r"[^\s/\\?#'\"<>]{1,300}@", rf"\1{SECRET}@"),
        (rf"({_COLON}{_SLASH}{{2}})(?:(?!{_SLASH})[^\s/\\?#'\"<>&@]){{1,300}}({_AT})", rf"\1{SECRET}\2"),
        # a query's token
        (rf"({_AND}(?i:{_NAMES}|key|sig(?:nature)?|auth|pass|jwt|\w{{0,20}}access_?key_?id|x-(?:amz|goog)-[\w-]+)"
         rf"{_EQUALS}){_VALUE}", rf"\1{SECRET}"),
        # Authorization: Bearer ..., and a bearer's token without its header
        (r"(?i)((?:proxy-)?authorization\\?['\"]?\s*[:=,]\s*b?\\?['\"]?(?:bearer|basic|token|digest|apikey)(?:\s+|%20|\+))"
         rf"{_VALUE}", rf"\1{SECRET}"),
        (r"\b([Bb]earer(?:\s+|%20))(?=[\w.~+/-]{0,300}\d)[\w.~+/=-]{8,}", rf"\1{SECRET}"),
        # name=value, "name": "value", and name: value where the value has a digit
        (rf"({_START}(?i:{_NAMES})\\?['\"]?\s?{_EQUALS}\s?\\?['\"]?){_VALUE}", rf"\1{SECRET}"),
        (rf"({_START}(?i:{_NAMES})\\?['\"]\s*:\s*b?\\?['\"]){_VALUE}", rf"\1{SECRET}"),
        (rf"({_START}(?i:x-[\w-]{{0,40}}(?:key|token|secret)|(?:api|access|secret)[_-]key|passw(?:or)?d"
         rf"|(?:access|auth)[_-]token)\s*:\s+)(?=\S{{0,300}}\d)(?!\d+\b){_VALUE}", rf"\1{SECRET}"),
        # tokens that are known by their form
        (rf"{_START}hf_(?:(?=[A-Za-z]{{0,80}}\d)[A-Za-z0-9]{{8,}}|[A-Za-z0-9]{{20,}})", SECRET),
        (rf"{_START}sk-(?:(?=[A-Za-z_-]{{0,80}}\d)[\w-]{{16,}}|[A-Za-z]{{32,}})", SECRET),
        (rf"{_START}(?:gh[pousr]_\w{{16,}}|github_pat_\w{{20,}}|glpat-[\w-]{{16,}}|xox[abeprs]-[\w-]{{10,}})", SECRET),
        (rf"{_START}(?:(?:AKIA|ASIA)[0-9A-Z]{{16}}|AIza[\w-]{{35}}|eyJ[\w-]{{8,300}}\.eyJ[\w-]{{8,}}\.[\w-]+)", SECRET),
        (r"(?i)((?:api[_ -]?key|wandb|login)(?:\W{1,4}|\s+is\s+|\W+(?:api\W?)?key\W{1,4}|\W+login\W{1,3}))(?:local-)?"
         r"[0-9a-f]{40}\b", rf"\1{SECRET}"),
        (r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)", SECRET),
    )
)  # fmt: skip
_HINTS = re.compile(
    r"@|=|%(?:25){0,4}[34]|bearer|authorization|token|key|secret|passw|pwd|login|wandb|hf_|sk-|gh[pousr]_"
    r"|github_pat|glpat-|xox[abeprs]-|AKIA|ASIA|AIza|eyJ",
    re.IGNORECASE,
)
"""One of these is in whatever the shapes find."""
_SECRET_SETTINGS = re.compile(rf"(?:{_NAMES})\Z", re.IGNORECASE)
_remembered: set[str] = set()


def remember_secret(value: str) -> None:
    """A secret that was read from where its user named it: `without_secrets` knows it from now on."""
    if len(value) >= _SHORTEST:
        _remembered.add(value)


def without_secrets(text: str) -> str:
    """A text without passwords, tokens and keys, for whatever others may read: logs, pages, manifests, the terminal.

    Known are passwords in addresses, tokens in queries and headers, `name=value` of such names, tokens of a known form
    (`hf_`, `sk-`, `ghp_`, `AKIA`, ...), also percent-encoded, and the values of environment variables that are called
    a token, key, secret or password.
    """
    for value in _secret_values():
        text = text.replace(value, SECRET)
    if not _HINTS.search(text):  # as most texts
        return text
    for shape, by in _SHAPES:
        text = shape.sub(by, text)
    return text


def settings_without_secrets(value: Any) -> Any:
    """The same of all texts in nested settings; what its name calls a token or password is left out as a whole."""
    if isinstance(value, Mapping):
        return {name: _setting_without_secrets(name, part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [settings_without_secrets(part) for part in value]
    return without_secrets(value) if isinstance(value, str) else value


def _setting_without_secrets(name: object, value: Any) -> Any:
    called = isinstance(value, str) and value and _SECRET_SETTINGS.match(str(name))
    return SECRET if called else settings_without_secrets(value)


def _secret_values() -> list[str]:
    """Secrets by their exact words, longest first, as they are and as addresses hold them."""
    of_names = {os.environ[name].strip() for name in os.environ if name.upper().endswith(_SECRET_VARIABLES)}
    return _as_written(frozenset(value for value in of_names | _remembered if len(value) >= _SHORTEST))


@cache
def _as_written(values: frozenset[str]) -> list[str]:
    known = {value for value in values if not os.path.exists(value)}  # the place of a key is none
    return sorted(known | {quote(value, safe="") for value in known}, key=len, reverse=True)


_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufff9-\ufffb]"
)
"""Characters that move a cursor, colour a terminal, or turn text round; lines and tabs are none of them."""


def printable(text: str) -> str:
    """A text whose control characters, escape sequences and turns of direction are written out: `\\x1b`, `\\u202e`."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def one_line(text: str, most: int = 200) -> str:
    """What a stranger said as one printable line without secrets, cut at `most` letters."""
    flat = printable(without_secrets(" ".join(text.split())))
    return flat if len(flat) <= most else f"{flat[: most - 3]}..."


def say(*words: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print` for what holds words of others: without secrets, and nothing in it acts on the terminal."""
    print(printable(without_secrets(" ".join(map(str, words)))), end=end, file=file, flush=flush)
