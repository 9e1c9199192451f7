"""The checker behind the annotations of the pure layer, installed by conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep3119Exception

# As type checkers read it: an int is welcome where a float is asked for.
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check arguments and results at every call; a function that takes a structural ``Protocol`` stays as it is."""
    try:
        checked: Callable[..., Any] = _checked(function)
    except BeartypeDecorHintPep3119Exception:
        return function
    return checked
