"""A user's own reward, loaded from a Python file by path.

    rewards: [{file: my/rewards.py, function: sharpness, weight: 0.5, options: {radius: 3}}]

The number of positional parameters decides how the function is called; options are its keyword-only parameters:

    def sharpness(images, prompts, metadata, *, radius=2):      # three: returns B numbers
    def sharpness(inputs, *, radius=2):                         # one: takes RewardInputs, returns RewardOutput

`images` is a float32 tensor [B, 3, H, W] in [0, 1] without gradient, on the device of the run; `prompts` and `metadata`
are lists of B. The numbers may be a list, an array or a tensor; NaN marks an item as failed. A keyword-only parameter
called `device` receives the device of the run.

The file is imported under a private module name, so it may be called `rewards.py` and collides with nothing. Its folder
is not put on the import path. A relative path starts at the working directory.

A function may write into its arguments, which are copies. Its changes to the process are undone
(`flowrl.rewards.base.user_file`).

If a user's file or function changes one of `_SETTINGS`, it is restored, and the user is told once by name. The import
path and the states of the random generators are restored silently. Inside a call the global generators of Python,
numpy and torch start from a seed that counters name, so random rewards are the same after a resume. Paths that the file
added to the import path are there again.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowrl.config.options import build_options, options_class, unknown_name
from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, with_images
from flowrl.rewards.base.outputs import changed_output, check_output, lacks_numbers
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
        try:
            nodes = [*ast.walk(parse_python(found[waiting.pop()]))]
        except (SyntaxError, ValueError):  # a file that nothing could import
            continue
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        for name in {name.partition(".")[0] for name in names}:  # of an imported package all files
            place = path.parent / name
            for other in place.rglob("*.py") if place.is_dir() else [place.with_name(f"{name}.py")]:
                if other not in found and other.is_file():
                    found[other] = other.read_bytes()
                    waiting.append(other)
    beside = [(str(other.relative_to(path.parent)), found[other]) for other in sorted(found) if other != path]
    content = found[path] + repr(beside).encode() * bool(beside)
    return hashlib.sha256(content).hexdigest()[:12]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class UserFile:
    """A checked function of a user's file and its options; made by `user_file_options`."""

    file: str
    function: str
    scorer: Callable[..., Any]
    num_arguments: int
    options: Mapping[str, Any]

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; its name is the function's. A keyword-only parameter `device` gets the device."""
        options = dict(self.options)
        if "device" in inspect.signature(self.scorer).parameters:
            options["device"] = device
        content = content_of(self.file)
        scorer = partial(self.scorer, **options)

        def score(inputs: RewardInputs) -> RewardOutput:
            where, own = f"reward {self.file}:{self.function}", copy_inputs(inputs)
            arguments = (own,) if self.num_arguments == 1 else (own.images, own.prompts, own.metadata)
            counters = (
                self.function,
                inputs.iteration,
                *inputs.group_ids[:1].tolist(),
                *inputs.sample_ids[:1].tolist(),
            )
            result = call_function(scorer, *arguments, file=self.file, where=where, counters=counters)
            if self.num_arguments == 1:
                output = check_output(result, len(inputs), where.removeprefix("reward "))
                return changed_output(output, lambda tensor: tensor.detach().clone())
            batch = len(inputs)
            if isinstance(result, Tensor) and (said := lacks_numbers(result)):
                raise ValueError(f"{where} must return {batch} numbers, one per image, and returned {said}.")
            try:
                values = torch.as_tensor(np.array(result) if isinstance(result, np.ndarray) else result)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise ValueError(
                    f"{where} must return {batch} numbers, one per image, got {_describe(result)}: {error}"
                ) from error
            if values.is_complex():
                raise ValueError(
                    f"{where} must return {batch} real numbers, got complex ones: return their size, or a part."
                )
            if values.shape != (batch,):
                raise ValueError(f"{where} must return {batch} numbers, one per image, got shape {list(values.shape)}.")
            return output_of(values.detach().float().tolist(), inputs)

        return FunctionReward(
            name=self.function,
            score=score,
            needs=frozenset({"images", "prompts", "metadata", "group_ids", "sample_ids"}),
            version=f"user_file:{Path(self.file).name}:{self.function}:sha256-{content}:"
            f"{dict(sorted(self.options.items()))!r}",
        )


def user_file_options(file: str, function: str, options: Mapping[str, Any]) -> UserFile:
    """Imports the file and checks that the function exists, its parameters, and the options."""
    where = f"reward {file}:{function}"
    scorer = load_function(file, function)
    parameters = inspect.signature(scorer).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variable = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    if len(names) not in (1, 3) or names == ["images"] or variable:
        raise ValueError(
            f"{where}: the parameters must be (images, prompts, metadata) or (inputs), and options after a bare *, got "
            f"{inspect.signature(scorer)}."
        )
    build_options(options_class(scorer, reserved=("device",)), options, owner=where)
    return UserFile(file=file, function=function, scorer=scorer, num_arguments=len(names), options=dict(options))


def copy_inputs(inputs: RewardInputs) -> RewardInputs:
    """A copy of the inputs without gradient: writing into it spoils nothing."""
    return replace(
        with_images(inputs, lambda images: images.detach().clone()),
        prompts=list(inputs.prompts),
        metadata=deepcopy(inputs.metadata),
        group_ids=inputs.group_ids.clone(),
        sample_ids=inputs.sample_ids.clone(),
    )


def _describe(result: Any) -> str:
    """What a function returned instead of numbers, and what to return instead if that is clear."""
    kind = type(result).__name__
    if isinstance(result, (list, tuple, np.ndarray)):
        if any(value is None for value in result):
            return f"{kind} with None in it (give NaN, float('nan'), for an item that failed)"
        return f"{kind} of {', '.join(dict.fromkeys(type(value).__name__ for value in result)) or 'nothing'}"
    if result is None:
        return f"{kind} (is a return missing?)"
    if isinstance(result, Coroutine):
        result.close()
        return f"{kind} (write def, not async def)"
    if isinstance(result, (Iterator, Mapping, Set)):
        return f"{kind} (make a list of its numbers, in the order of the images)"
    return kind
