"""A user's own reward, loaded from a Python file by path.

    rewards: [{file: my/rewards.py, function: sharpness, weight: 0.5, options: {radius: 3}}]

The number of positional parameters decides how the function is called; options are its keyword-only parameters:

    def sharpness(images, prompts, metadata, *, radius=2):      # three: returns B numbers
    def sharpness(inputs, *, radius=2):                         # one: takes RewardInputs, returns RewardOutput

`images` is a float32 tensor [B, 3, H, W] in [0, 1] without gradient, on the device of the run; `prompts` and `metadata`
are lists of B. The numbers may be a list, an array or a tensor; NaN marks an item as failed. A keyword-only parameter
called `device` is given the device of the run.

The file is imported under a private module name, so it may be called `rewards.py` and collides with nothing. Its folder
is not put on the import path. A relative path starts at the working directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flowrl.config.options import build_options, options_class, unknown_name
from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, output_of
from flowrl.rewards.outputs import check_output


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
        content = hashlib.sha256(Path(self.file).read_bytes()).hexdigest()[:12]
        return FunctionReward(
            name=self.function,
            score=partial(_score, user=self, scorer=partial(self.scorer, **options)),
            needs=frozenset({"images", "prompts", "metadata", "group_ids", "sample_ids"}),
            version=f"user_file:{Path(self.file).name}:{self.function}:sha256-{content}:"
            f"{dict(sorted(options.items()))!r}",
        )


def user_file_options(file: str, function: str, options: Mapping[str, Any]) -> UserFile:
    """Imports the file and checks that the function is there, how it is called, and the options.

    Raises:
        ValueError: naming file and function, and the user's own line if the file cannot be imported.
    """
    where = f"reward {file}:{function}"
    scorer = _load(file, function)
    # The number of positional parameters, 1 or 3.
    parameters = inspect.signature(scorer).parameters.values()
    number = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if number not in (1, 3) or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        given = ", ".join(str(p) for p in parameters)
        raise ValueError(
            f"{where}: the parameters must be (images, prompts, metadata) or (inputs), and options after a bare *, got "
            f"({given})."
        )
    build_options(options_class(scorer, reserved=("device",)), options, owner=where)
    return UserFile(file=file, function=function, scorer=scorer, num_arguments=number, options=dict(options))


def _load(file: str, function: str) -> Callable[..., Any]:
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"reward file {file!r} does not exist (looked in {Path.cwd()}): give a path to a Python file.")
    # Path and content make the name: a file is run once however often it is asked for, and again once it was changed.
    identity = str(path.resolve()).encode() + b"\0" + path.read_bytes()
    private = f"_flowrl_user_{hashlib.sha256(identity).hexdigest()[:16]}"
    if private not in sys.modules:
        _import(path, private, file)
    module = sys.modules[private]
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    if function not in vars(module):
        raise ValueError(f"reward file {file!r}: {unknown_name('function', function, names)}")
    scorer = vars(module)[function]
    if not callable(scorer):
        raise ValueError(f"reward file {file!r}: {function} is a {type(scorer).__name__}, not a function.")
    return scorer


def _import(path: Path, private: str, file: str) -> None:
    """Runs a user's file as module `private`."""
    spec = importlib.util.spec_from_file_location(private, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward file {file!r} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module  # dataclasses and pickle look a class's module up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises, the message must lead there
        del sys.modules[private]
        raise ValueError(f"reward file {file!r} cannot be imported: {_users_line(error, file)}") from error


def _users_line(error: Exception, file: str) -> str:
    """What was raised and the innermost line of the user's own file that led to it."""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).name == Path(file).name:
        return f"{what}\n  {file}:{error.lineno}: {(error.text or '').strip()}"
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == Path(file).resolve()
    ]
    return f"{what}\n  {file}:{frames[-1].lineno}: {frames[-1].line}" if frames else what


def _score(inputs: RewardInputs, *, user: UserFile, scorer: Callable[..., Any]) -> RewardOutput:
    where = f"reward {user.file}:{user.function}"
    arguments = (inputs,) if user.num_arguments == 1 else (inputs.images.detach(), inputs.prompts, inputs.metadata)
    try:
        with torch.no_grad():
            result = scorer(*arguments)
    except Exception as error:  # whatever a user's function raises, the message must lead there
        raise ValueError(f"{where} raised {_users_line(error, user.file)}") from error
    if user.num_arguments == 1:
        return check_output(result, len(inputs), where.removeprefix("reward "))
    return output_of(_as_numbers(result, inputs, where).tolist(), inputs)


def _as_numbers(result: Any, inputs: RewardInputs, where: str) -> torch.Tensor:
    batch = len(inputs)
    try:
        values = torch.as_tensor(result, dtype=torch.float32, device=inputs.images.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{where} must return {batch} numbers, one per image, got {type(result).__name__}: {error}"
        ) from error
    if values.shape != (batch,):
        raise ValueError(f"{where} must return {batch} numbers, one per image, got shape {list(values.shape)}.")
    return values
