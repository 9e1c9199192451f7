"""Imports of a process that plans and then ends: diffusers without what only loading and training need.

diffusers takes transformers, PEFT, SciPy, Triton, torch's compiler and SymPy with it where they are installed, which is
most of the seconds that a plan would take. It does without each of them where it is absent, and its networks are the
same then. So they are absent while it looks for them; the compiler and SymPy are imported once more is asked of them
than a plan asks. What is imported in this way lacks them for good: never in a process that goes on to load a model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import operator
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
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

    sys.modules["torch._dynamo"] = torch._dynamo = _Later(
        "torch._dynamo", {"disable": _as_it_is, "allow_in_graph": _as_it_is, "is_compiling": bool}
    )
    sys.modules["sympy"] = _Later("sympy", {"Basic": _Symbolic})
    shapes = "torch.fx.experimental.symbolic_shapes"
    sys.modules[shapes] = _Later(shapes, _PLAIN_SHAPES)
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


_PLAIN_SHAPES: dict[str, Any] = {
    **dict.fromkeys(("guard_or_false", "guard_or_true", "statically_known_true", "expect_true"), bool),
    "guard_size_oblivious": bool, "guard_int": int, "guarding_hint_or_throw": int,
    "sym_and": lambda *each: all(each), "sym_or": lambda *each: any(each), "sym_eq": operator.eq,
    "is_nested_int": lambda size: False, "has_guarding_hint": lambda size: True,
    "free_unbacked_symbols": lambda tensor: set(), "GuardOnDataDependentSymNode": _Symbolic,
}  # fmt: skip
"""Questions that torch asks of sizes, which may be symbols elsewhere; here they are numbers, and Python answers."""


class _Later(ModuleType):
    """A module of which a few names are at hand; whoever asks it for another one has the real module imported."""

    def __init__(self, name: str, at_hand: Mapping[str, Any]) -> None:
        super().__init__(name)
        vars(self).update(at_hand)
        spec = self.__spec__ = importlib.util.find_spec(name)
        if spec is not None:
            self.__file__ = spec.origin
            if spec.submodule_search_locations is not None:
                self.__path__ = spec.submodule_search_locations

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which is asked of every module, now and then
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        real = vars(importlib.import_module(self.__name__))
        if name not in real:
            raise AttributeError(name)
        return real[name]


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
