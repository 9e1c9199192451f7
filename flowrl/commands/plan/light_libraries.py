"""Imports of a process that plans and then ends: diffusers without what only loading and training need.

diffusers takes transformers, PEFT, SciPy, Triton, torch's compiler and SymPy with it where they are installed, which is
most of the seconds that a plan would take. It does without each of them where it is absent, and its networks are the
same then. So they are absent while it looks for them, and for the rest of the process nothing is marked for the
compiler. What is imported in this way lacks them for good: never in a process that goes on to load a model.
"""

from __future__ import annotations

import importlib.metadata
import logging
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

_ABSENT = ("peft", "scipy", "torchvision", "transformers", "triton")
"""Packages that diffusers and torch's counter of FLOPs take for optional."""
_FLEX = "torch.nn.attention.flex_attention"
"""Attention by SymPy's expressions, of no family here; diffusers takes a class from it for its annotations."""
_WANTED = (
    "torch.utils.flop_counter", "diffusers.utils.torch_utils", "diffusers.hooks", "diffusers.models.attention_dispatch",
    "diffusers.models.transformers", "diffusers.models.unets",
)  # fmt: skip


def import_lightly() -> None:
    """Imports what the networks of all model families are built and counted with."""
    import torch

    compiler: Any = ModuleType("torch._dynamo")
    compiler.disable = compiler.allow_in_graph = _as_it_is
    sys.modules["torch._dynamo"] = torch._dynamo = compiler
    sys.modules["torch.fx.experimental.symbolic_shapes"] = _plain_shapes()
    sys.modules["sympy"] = SimpleNamespace(Basic=_Symbolic)  # type: ignore[assignment]
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # it warns of Triton's absence
    with (
        _in_place({**dict.fromkeys(_ABSENT), _FLEX: SimpleNamespace(BlockMask=object, create_block_mask=None)}),
        patch.object(
            importlib.metadata, "packages_distributions", dict
        ),  # reads every installed package's list of files
        patch.object(torch.distributed, "is_available", lambda: False),
        patch.object(torch.library, "custom_op", _as_it_is),  # of kernels for CUDA, by importing SymPy
        patch.object(torch.library, "register_fake", _as_it_is),
    ):
        for name in _WANTED:
            importlib.import_module(name)


class _Symbolic(Exception):
    """The type of a number without value, and of what is raised of one; no number here is that."""


def _plain_shapes() -> ModuleType:
    """Questions that torch asks of sizes, which may be symbols elsewhere; here they are numbers, and Python answers."""
    shapes: Any = ModuleType("torch.fx.experimental.symbolic_shapes")
    shapes.guard_or_false = shapes.guard_or_true = shapes.statically_known_true = shapes.expect_true = bool
    shapes.guard_size_oblivious, shapes.guard_int, shapes.guarding_hint_or_throw = bool, int, int
    shapes.sym_and, shapes.sym_or, shapes.sym_eq = lambda *each: all(each), lambda *each: any(each), operator.eq
    shapes.is_nested_int, shapes.has_guarding_hint = lambda size: False, lambda size: True
    shapes.free_unbacked_symbols, shapes.GuardOnDataDependentSymNode = lambda tensor: set(), _Symbolic
    return cast(ModuleType, shapes)


@contextmanager
def _in_place(modules: dict[str, Any]) -> Iterator[None]:
    """Inside, these are imported by their names; None is how Python is told that there is no such module."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


def _as_it_is(*given: Any, **options: Any) -> Any:
    """A decorator that changes nothing, with or without arguments of its own."""
    return given[0] if given and callable(given[0]) else lambda function: function
