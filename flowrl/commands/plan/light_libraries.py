"""Imports of torch and diffusers without what only loading and training need.

diffusers takes transformers, PEFT, SciPy and Triton with it where they are installed, and torch's compiler for its
decorators, which is most of the seconds that a plan would take. It does without each of them where it is absent, and
its networks are the same then.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from flowrl.private_names import COMPILER, LIGHT_MODULES, forget_disabled

_ABSENT = ("bitsandbytes", "peft", "scipy", COMPILER, "torchao", "torchvision", "transformers", "triton")
_FLEX = {"torch.nn.attention.flex_attention": SimpleNamespace(BlockMask=object, create_block_mask=None)}
"""Attention by SymPy's expressions, of no family here; diffusers takes a class from it for its annotations."""
_MODULE = ("flowrl", "__main__.py")


def import_lightly() -> None:
    """Imports what the networks of all model families are built and counted with, where this process is the command.

    While they are imported some packages are absent; afterwards everything can be imported as ever, but diffusers does
    not take those packages up any more. So nothing is done in somebody's script, which may go on to load a model, or
    where torch or diffusers are there already.
    """
    command = Path(sys.argv[0]).parts[-2:]
    if {"torch", "diffusers"} & set(sys.modules) or not (command[-1:] == ("flowrl",) or command == _MODULE):
        return
    import torch

    absent = {name: None for name in _ABSENT if name not in sys.modules}
    counter = logging.getLogger("torch.utils.flop_counter")  # it warns of Triton's absence
    level = counter.level
    counter.setLevel(logging.ERROR)
    in_place: dict[str, Any] = absent | _FLEX
    sys.modules.update(in_place)
    try:
        with (
            patch.object(importlib.metadata, "packages_distributions", dict),  # reads the files of every package
            patch.object(torch.distributed, "is_available", lambda: False),
            patch.object(torch.compiler, "disable", _as_it_is),
            patch.object(torch.library, "custom_op", _as_it_is),  # of kernels for CUDA, by importing SymPy
            patch.object(torch.library, "register_fake", _as_it_is),
        ):
            for name in LIGHT_MODULES:
                importlib.import_module(name)
    finally:
        for name in in_place:
            del sys.modules[name]
        counter.setLevel(level)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Inside, torch does not import its compiler in order to keep it away from operations on the meta device."""
    if COMPILER in sys.modules or not set(LIGHT_MODULES) <= sys.modules.keys():  # which import it for themselves
        yield
        return
    met: list[Callable[..., Any]] = []

    def disable(function: Callable[..., Any], *given: Any, **options: Any) -> Callable[..., Any]:
        met.append(function)
        return function

    in_place: dict[str, Any] = {COMPILER: SimpleNamespace(disable=disable)}
    sys.modules.update(in_place)
    try:
        yield
    finally:
        del sys.modules[COMPILER]
        for function in met:  # torch keeps the answer there
            forget_disabled(function)


def _as_it_is(*given: Any, **options: Any) -> Any:
    """A decorator that changes nothing, with or without arguments of its own."""
    return given[0] if given and callable(given[0]) else lambda function: function
