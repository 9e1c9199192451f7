"""Imports of torch and diffusers without what only loading and training need.

diffusers takes accelerate, transformers, PEFT, SciPy and Triton with it where they are installed, and torch's compiler
for its decorators, which is most of the seconds that a plan would take. It does without each of them where it is
absent, and its networks are the same then.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from flowrl.config.locations import is_path, split_revision
from flowrl.config.train import TrainConfig
from flowrl.planning.catalogue import families
from flowrl.runtime.files import read_json
from flowrl.runtime.private_names import COMPILER, LIGHT_MODULES, SIZES, forget_disabled

_ABSENT = ("accelerate", "bitsandbytes", "peft", "scipy", COMPILER, "torchao", "torchvision", "transformers", "triton")
_FLEX = {"torch.nn.attention.flex_attention": SimpleNamespace(BlockMask=object, create_block_mask=None)}
"""Attention by SymPy's expressions, of no family here; diffusers takes a class from it for its annotations."""
_MODULE = ("flowrl", "__main__.py")


@contextmanager
def light_libraries(config: TrainConfig) -> Iterator[None]:
    """Inside, a configuration is planned with as few libraries as it needs: all of them where a user's file, whose
    imports nobody knows, or stock's own pipeline takes part."""
    if _names_file(asdict(config)) or _is_stock(config):
        yield
        return
    import_lightly()
    with without_compiler():
        yield


def import_lightly() -> None:
    """Imports what the networks of all model families are built and counted with, where this process is the command.

    While they are imported some packages are absent; afterwards everything can be imported as ever, but diffusers does
    not take those packages up any more. So nothing is done in somebody's script, which may go on to load a model, or
    where torch or diffusers are there already.
    """
    command = Path(sys.argv[0]).parts[-2:]
    if {"torch", "diffusers"} & set(sys.modules) or not (command[-1:] == ("flowrl",) or command == _MODULE):
        return
    gc.disable()  # it would look through all that is imported, again and again, and find nothing to free
    try:
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
                patch.object(torch.compiler, "disable", lambda *given, **_: given[0] if given else lambda one: one),
            ):
                for name in LIGHT_MODULES:
                    importlib.import_module(name)
        finally:
            for name in in_place:
                del sys.modules[name]
            counter.setLevel(level)
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Inside, torch imports neither its compiler, to keep it away from operations on the meta device, nor SymPy, to ask
    whether sizes are expressions: 500 modules and 0.4 s, none of which any stand-in saves without the others.
    """
    if COMPILER in sys.modules or not set(LIGHT_MODULES) <= sys.modules.keys():  # which import it for themselves
        yield
        return
    met: list[Callable[..., Any]] = []

    def disable(function: Callable[..., Any], *given: Any, **options: Any) -> Callable[..., Any]:
        met.append(function)
        return function

    in_place: dict[str, Any] = {COMPILER: SimpleNamespace(disable=disable)}
    for name, known in {"sympy": {"Basic": _Expression}, SIZES: _NUMBERS}.items():
        if name not in sys.modules:
            in_place[name] = _stand_in(name, known)
    sys.modules.update(in_place)
    try:
        yield
    finally:
        for name, module in in_place.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        for function in met:  # torch keeps the answer there
            forget_disabled(function)


class _Expression:
    """A size that is no number: none is."""


def _equal(x: Any, y: Any) -> bool:
    return bool(tuple(x) == tuple(y) if isinstance(x, list | tuple) and isinstance(y, list | tuple) else x == y)


def _sure(condition: bool, skip: int = 0) -> bool:
    return condition


_NUMBERS: Mapping[str, Any] = {
    "expect_true": _sure, "guard_or_false": _sure, "guard_or_true": _sure, "statically_known_true": _sure,
    "sym_and": lambda *conditions: all(conditions), "sym_or": lambda *conditions: any(conditions), "sym_eq": _equal,
    "has_guarding_hint": lambda *conditions: all(conditions), "guarding_hint_or_throw": _sure,
    "guard_size_oblivious": _sure, "is_nested_int": lambda size: False, "free_unbacked_symbols": lambda size: False,
}  # fmt: skip
"""What torch asks of sizes when it works out what an operation makes, where all sizes are numbers."""


def _stand_in(name: str, known: Mapping[str, Any]) -> ModuleType:
    """A module in whose place some of its names do; whoever asks for another one gets the whole of it."""
    module = ModuleType(name)

    def whole(asked: str) -> Any:
        if asked.startswith("__"):  # by those who look through all modules
            raise AttributeError(asked)
        if sys.modules.get(name) is module:
            del sys.modules[name]
        return getattr(importlib.import_module(name), asked)

    vars(module).update(known, __getattr__=whole)
    return module


def _is_stock(config: TrainConfig) -> bool:
    """Whether stock's own pipeline is called, or may be, which has to be imported whole; known before torch is."""
    name, model = config.pipeline.name, config.pipeline.model
    if name is not None:
        return name == "generic"
    place, known = Path(model).expanduser(), families().values()
    index = place / "model_index.json"
    if index.is_file():
        return read_json(index).get("_class_name") not in {stock for one in known for stock in one["stock"]}
    if place.exists() or is_path(model):  # files and assets are of families
        return False
    return split_revision(model)[0] not in {own for one in known for own in one["checkpoints"]}


def _names_file(settings: Any) -> bool:
    """Whether a user's file is named anywhere in settings: what it imports is not known, and it may load models."""
    if isinstance(settings, Mapping):
        return settings.get("file") is not None or any(map(_names_file, settings.values()))
    return isinstance(settings, Sequence) and not isinstance(settings, str) and any(map(_names_file, settings))
