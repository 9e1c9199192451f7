"""Imports torch and diffusers without the libraries that only loading and training need.

diffusers imports accelerate, transformers, PEFT, SciPy and Triton if they are installed, and torch's compiler for its
decorators; that would take most of a plan's time. It works without each of them, with the same networks.
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
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from flowrl.config.locations import is_path, split_revision
from flowrl.config.train import TrainConfig
from flowrl.planning.catalogue import families
from flowrl.runtime.files import read_json
from flowrl.runtime.private_names import COMPILER, LIGHT_MODULES, SIZES, forget_disabled
from flowrl.runtime.process_settings import stand_in

_ABSENT = ("accelerate", "peft", "scipy", COMPILER, "torchao", "torchvision", "transformers", "triton")
_FLEX = {"torch.nn.attention.flex_attention": SimpleNamespace(BlockMask=object, create_block_mask=None)}
"""Attention by SymPy's expressions, which no family here uses; diffusers takes a class from it for annotations."""


@contextmanager
def light_libraries(config: TrainConfig | None) -> Iterator[None]:
    """A context that plans a configuration with as few libraries as it needs: with all of them if it uses a user's
    file, whose imports are unknown, or a stock pipeline. None stands for one that uses neither."""
    if config is not None and (_names_file(asdict(config)) or _is_stock(config)):
        yield
        return
    import_lightly()
    with without_compiler():
        yield


def import_lightly() -> None:
    """Imports what is needed to build and count the networks of all model families, if this process is the command.

    Some packages are hidden during the import. Later everything can be imported as usual, but diffusers no longer sees
    those packages. So this does nothing in your own script, or once torch or diffusers is imported.
    """
    is_command = any(map(Path(sys.argv[0]).match, ("flowrl", "flowrl/__main__.py")))
    if not is_command or {"torch", "diffusers"} & sys.modules.keys():
        return
    gc.disable()  # it would look through all that is imported, again and again, and find nothing to free
    try:
        import torch

        in_place: dict[str, Any] = {name: None for name in _ABSENT if name not in sys.modules} | _FLEX
        sys.modules.update(in_place)
        try:
            with (
                patch.object(logging.getLogger("torch.utils.flop_counter"), "disabled", True),  # it warns of no Triton
                patch.object(importlib.metadata, "packages_distributions", dict),  # reads the files of every package
                patch.object(torch.distributed, "is_available", lambda: False),
                patch.object(torch.compiler, "disable", lambda *given, **_: given[0] if given else lambda one: one),
            ):
                for name in LIGHT_MODULES:
                    importlib.import_module(name)
        finally:
            for name in in_place:
                del sys.modules[name]
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def without_compiler() -> Iterator[None]:
    """A context in which torch imports neither its compiler (to keep it away from operations on the meta device) nor
    SymPy (to ask whether sizes are expressions). Only together do the stand-ins save 500 modules and 0.4 s."""
    if COMPILER in sys.modules or not set(LIGHT_MODULES) <= sys.modules.keys():  # which import it for themselves
        yield
        return
    met: list[Callable[..., Any]] = []

    def disable(function: Callable[..., Any], *given: Any, **options: Any) -> Callable[..., Any]:
        met.append(function)
        return function

    in_place: dict[str, Any] = {COMPILER: SimpleNamespace(disable=disable)}
    known: dict[str, Mapping[str, Any]] = {"sympy": {"Basic": _Expression}, SIZES: _NUMBERS}
    in_place |= {name: stand_in(name, names) for name, names in known.items() if name not in sys.modules}
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
    """Stands for sizes that are expressions; there are none."""


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
"""torch's questions about sizes in an operation, answered for sizes that are all numbers."""


def _is_stock(config: TrainConfig) -> bool:
    """Whether a stock pipeline is or may be called, which needs the full import; known before torch is imported."""
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
    """Whether settings name a user's file anywhere: its imports are unknown, and it may load models."""
    if isinstance(settings, Mapping):
        return settings.get("file") is not None or any(map(_names_file, settings.values()))
    return isinstance(settings, Sequence) and not isinstance(settings, str) and any(map(_names_file, settings))
