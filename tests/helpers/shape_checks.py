"""The checker behind the annotations of the pure layer, installed by conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep3119Exception

# As type checkers read it: an int is welcome where a float is asked for.
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
_known: dict[tuple[object, ...], Callable[..., Any]] = {}
"""Checks by name and annotations: a function inside another one is defined, and so checked, at every call of it."""


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check arguments and results at every call; a function that takes a structural ``Protocol`` stays as it is.

    jaxtyping gives functions that do nothing but have names, annotations and defaults of what it is about.
    """
    if "<locals>" not in function.__qualname__ or function.__defaults__ or function.__kwdefaults__:
        return _check(function)
    annotations = repr(function.__annotations__)  # by their words: those of jaxtyping are new ones each time
    key = (function.__module__, function.__qualname__, function.__code__.co_varnames, annotations)
    if key not in _known:
        _known[key] = _check(function)
    return _known[key]


def _check(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        checked: Callable[..., Any] = _checked(function)
    except BeartypeDecorHintPep3119Exception:
        return function
    return checked
