"""The checker behind the annotations of the pure layer, installed by conftest.py.

A check depends on nothing but the types, shapes and dtypes of what is given and returned, and on words. So a call like
one that has passed is not checked again, and functions inside others, which are made anew at each call of those, need
no checker of their own.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep3119Exception
from torch import Tensor

# As type checkers read it: an int is welcome where a float is asked for.
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
_checker = jaxtyping.jaxtyped
_passed = defaultdict[tuple[str, str, CodeType], dict[Hashable, set[Hashable]]](dict)
"""Of each function, by name and code: what it was given in calls that passed, and what it then returned."""
_PLAIN = {int, float, type(None)}
_LONG = 40
"""Letters of the longest word that an annotation names, and parts of the longest list that is looked through."""


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check arguments and results; a function that takes a structural ``Protocol`` stays as it is.

    jaxtyping gives functions that do nothing but have names, annotations and defaults of what it is about.
    """
    try:
        checked: Callable[..., Any] = _checked(function)
    except BeartypeDecorHintPep3119Exception:
        return function
    return checked


def jaxtyped(about: Any = None, *, typechecker: Any) -> Any:
    """Stands in for jaxtyping's decorator of functions and classes: calls like those that passed are let through."""
    if about is None:
        return lambda given: jaxtyped(given, typechecker=typechecker)
    if isinstance(about, type):
        if dataclasses.is_dataclass(about):
            type.__setattr__(about, "__init__", jaxtyped(about.__init__, typechecker=typechecker))
        return about
    passed = _passed[about.__module__, about.__qualname__, about.__code__]  # alike codes may have other annotations
    checked = cache(lambda: _checker(about, typechecker=typechecker))

    @wraps(about)
    def sparing(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return about(*args, **kwargs)
        try:
            given = tuple(map(_described, args)), tuple((name, _described(x)) for name, x in kwargs.items())
        except _Unknown:
            return checked()(*args, **kwargs)
        returned = passed.get(given)
        result = (checked() if returned is None else about)(*args, **kwargs)
        try:
            now = _described(result)
        except _Unknown:
            if returned is not None:
                _checker(_standing_for(about, result), typechecker=typechecker)(*args, **kwargs)
            return result
        if returned is None:
            passed.setdefault(given, set()).add(now)
        elif now not in returned:
            _checker(_standing_for(about, result), typechecker=typechecker)(*args, **kwargs)
            returned.add(now)
        return result

    return sparing


def _standing_for(about: Any, result: Any) -> Callable[..., Any]:
    """A function with the annotations of another one, and the names that those mean, that returns this."""
    stands = lambda *_, **__: result  # noqa: E731
    return wraps(about)(FunctionType(stands.__code__, about.__globals__, closure=stands.__closure__))


class _Unknown(Exception):
    """Something that may hold what is checked too."""


def _described(x: Any) -> Hashable:
    """All of a value that a check depends on."""
    kind: Any = type(x)
    if kind in _PLAIN:
        return kind
    if isinstance(x, Tensor):
        return kind, x.shape, x.dtype
    if kind is str:
        return x if len(x) <= _LONG else kind
    if kind is bool or isinstance(x, type):
        return kind, x
    if isinstance(x, list | tuple | dict) and len(x) <= _LONG:
        parts = tuple(map(_described, x.items() if isinstance(x, dict) else x))
        of_tensors = isinstance(x, tuple) and any(isinstance(part, Tensor) for part in x)  # whose parts are named
        if of_tensors or len(set(parts)) <= 1:  # of others the checker looks at one part, by chance
            return kind, parts
    if _holds(kind):
        raise _Unknown
    return kind


@cache
def _holds(kind: type) -> bool:
    return kind is not range and issubclass(kind, Collection)
