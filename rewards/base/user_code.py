"""A user's own functions: loaded from a file by path, and called so that nothing they do to the process stays.

If a user's file or function changes one of `_SETTINGS`, it is restored, and the user is told once by name. The import
path and the states of the random generators are restored silently. Inside a call the global generators of Python,
numpy and torch start from a seed that counters name, so random rewards are the same after a resume. Paths that the file
added to the import path are there again.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flowrl.config.options import unknown_name
from flowrl.runtime.randomness import Part, counter_seed
from flowrl.runtime.scrubbing import say as print
from flowrl.runtime.syntax import parse_python

IMPORT_SECONDS, CALL_SECONDS = 10.0, 60.0
"""Seconds after which a wait is explained: an endless loop looks like hard work."""

_said: set[tuple[str, str]] = set()  # (owner, setting): each is reported once
_paths: dict[str, list[str]] = {}  # module -> the import path as its file left it


class _Setting(NamedTuple):
    """A setting of the whole process that other code relies on."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return None


_SETTINGS = (
    _Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting(
        "the default device",
        torch.get_default_device,
        lambda v: torch.set_default_device(None if v.type == "cpu" else v),  # a named CPU would slow every call down
    ),
    _Setting("the grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting(
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1]),
    ),
    _Setting("the precision of products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _Setting("the working directory", _working_directory, lambda v: os.chdir(v or ".")),
)


def load_function(file: str, function: str, *, what: str = "reward") -> Callable[..., Any]:
    """A function of a user's file, imported under a private module name; `what` names its purpose in messages."""
    path, owner = Path(file), f"{what} file {file!r}"
    if not path.is_file():
        raise ValueError(f"{owner} does not exist (looked in {Path.cwd()}): give a path to a Python file.")
    # Path and content make the name: a file runs once however often it is loaded, and again after it has changed.
    identity = str(path.resolve()).encode() + b"\0" + path.read_bytes()
    private = f"_flowrl_user_{hashlib.sha256(identity).hexdigest()[:16]}"
    if private not in sys.modules:
        spec = importlib.util.spec_from_file_location(private, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{owner} is not a Python file: its name must end in .py.")
        # Dataclasses and pickle look a class's module up here.
        sys.modules[private] = importlib.util.module_from_spec(spec)
        try:
            with unchanged_process(owner), saying_what_is_awaited(f"the import of {owner}", IMPORT_SECONDS):
                # Not by Python's cache of compiled files: it misses a change of the same length within a second.
                exec(compile(path.read_bytes(), str(path), "exec"), vars(sys.modules[private]))
                _paths[private] = list(sys.path)
        except BaseException as error:
            del sys.modules[private]
            if isinstance(error, KeyboardInterrupt):
                raise
            raise ValueError(f"{owner} cannot be imported: {_users_line(error, file)}") from error
    module = sys.modules[private]
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    if function not in vars(module):
        raise ValueError(f"{owner}: {unknown_name('function', function, names)}")
    scorer = vars(module)[function]
    if not callable(scorer):
        raise ValueError(f"{owner}: {function} is of type {type(scorer).__name__}, not a function.")
    _paths[file] = _paths[private]
    return scorer


def content_of(file: str) -> str:
    """A short digest of a user's file, and of the modules in its folder that it or one of these imports."""
    path = Path(file)
    found = {path: path.read_bytes()}
    waiting = [path]
    while waiting:
        for other in _imports(found[waiting.pop()], path.parent):
            if other not in found:
                found[other] = other.read_bytes()
                waiting.append(other)
    beside = [(str(other.relative_to(path.parent)), found[other]) for other in sorted(found) if other != path]
    content = found[path] + repr(beside).encode() * bool(beside)
    return hashlib.sha256(content).hexdigest()[:12]


def _imports(source: bytes, folder: Path) -> Iterator[Path]:
    """The files of a folder that a Python file imports from it; all files of an imported package."""
    try:
        tree = parse_python(source)
    except (SyntaxError, ValueError):  # a file that nothing could import
        return
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
        for name in {name.partition(".")[0] for name in names if name}:
            place = folder / name
            yield from sorted(place.rglob("*.py")) if place.is_dir() else filter(Path.is_file, [folder / f"{name}.py"])


def call_function(
    function: Callable[..., Any], *arguments: Any, file: str, where: str, counters: tuple[Part, ...]
) -> Any:
    """Calls a user's function; returns its result, without gradient.

    Args:
        function: as `load_function` gave it, perhaps with options bound.
        arguments: copies that nobody else reads.
        file: the file that defines it.
        where: file and function, for messages.
        counters: numbers that seed this call's random generators.

    Raises ValueError: the function raised anything, even `SystemExit`; names the innermost line of the user's file.
    """
    try:
        with (
            unchanged_process(where, path=_paths.get(file), seed=counter_seed("user code", *counters)),
            saying_what_is_awaited(where, CALL_SECONDS),
            torch.no_grad(),
        ):
            return function(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the message must lead to the line, whatever the user's function raises
        raise ValueError(f"{where} raised {_users_line(error, file)}") from error


@contextmanager
def unchanged_process(owner: str, *, path: list[str] | None = None, seed: int | None = None) -> Iterator[None]:
    """Restores the settings of the process, its import path and its random generators afterwards.

    Args:
        owner: whose code runs inside, for the message about restored settings.
        path: the import path inside; None leaves it.
        seed: of the global random generators inside; None leaves them.
    """
    before = [setting.read() for setting in _SETTINGS]
    import_path, python, numpy = list(sys.path), random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        if path is not None:
            sys.path[:] = path
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
        try:
            yield
        finally:
            sys.path[:] = import_path
            random.setstate(python)
            np.random.set_state(numpy)
            for setting, was in zip(_SETTINGS, before, strict=True):
                now = setting.read()
                if now != was:
                    setting.write(was)
                    _say_once(owner, f"changed {setting.name} to {now}; it was put back to {was}")


def _say_once(owner: str, what: str) -> None:
    if (owner, what) not in _said:
        _said.add((owner, what))
        print(f"flowrl: {owner} {what}", file=sys.stderr, flush=True)


@contextmanager
def saying_what_is_awaited(what: str, seconds: float) -> Iterator[None]:
    """Tells once on standard error what it waits for, if the code inside takes longer than `seconds`."""
    timer = threading.Timer(seconds, _say_once, (what, f"is still at work after {seconds:g} s; Ctrl-C stops it"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _users_line(error: BaseException, file: str) -> str:
    """The error, and the innermost line of the user's own file that led to it."""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        what += " (it must not end the program: raise an error, or give NaN for items that fail)"
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).name == Path(file).name:
        return f"{what}\n  {file}:{error.lineno}: {(error.text or '').strip()}"
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == Path(file).resolve()
    ]
    return f"{what}\n  {file}:{frames[-1].lineno}: {frames[-1].line}" if frames else what
