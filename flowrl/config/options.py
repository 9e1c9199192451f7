"""Options of rewards, losses and the like: one frozen dataclass each, built strictly from what a configuration says.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Jpeg:
        quality: int = 95              # its docstring below says what the option means

        def __post_init__(self) -> None:
            ...                        # raises ValueError where values make no sense

    jpeg = build_options(Jpeg, {"quality": 90}, owner="reward 'jpeg'")

The dataclass is the only statement of its options: the fields are the names, types and defaults, their docstrings the
documentation, `__post_init__` the check. A user's function with keyword-only parameters is read as such a class.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, Union

from flowrl.config.strict_yaml import Source, build, dotted_keys

Options = TypeVar("Options")

RESERVED = ("device",)
"""Keyword-only parameters that the program fills in, so they are not options."""


def unknown_name(what: str, name: Any, allowed: Iterable[str]) -> str:
    """The sentence for a name that is none of those allowed, with the nearest one."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {what} {name!r}{hint}; allowed: {', '.join(names) or 'none'}."


def build_options(cls: type[Options], options: Mapping[str, Any], *, owner: str) -> Options:
    """Makes an options dataclass from plain values, as strictly as the configuration is read.

    Args:
        cls: the dataclass; lists become tuples and mappings become nested dataclasses where its fields say so.
        options: names and values.
        owner: what messages begin with, such as "reward 'jpeg'".

    Raises:
        ValueError: an unknown or missing option, a wrong type, or what `cls` itself refuses.
    """
    source = Source(file=owner, overrides={}, foreign_keys={}, foreign_values={}, own_keys=tuple(dotted_keys(cls)))
    made: Options = build(cls, options, source)
    return made


def build_parts(classes: Sequence[type[Any]], options: Mapping[str, Any], *, owner: str) -> tuple[Any, ...]:
    """Makes several options dataclasses from one mapping, which holds the options of all of them.

    Args:
        classes: the dataclasses; no option belongs to two.
        options: names and values.
        owner: as `build_options`.

    Raises:
        ValueError: as `build_options`; an unknown option is answered with those of all classes.
    """
    owners = {field.name: cls for cls in classes for field in dataclasses.fields(cls)}
    for name in options:
        if name not in owners:
            raise ValueError(f"{owner}: {unknown_name('option', name, owners)}")
    return tuple(
        build_options(cls, {name: value for name, value in options.items() if owners[name] is cls}, owner=owner)
        for cls in classes
    )


def options_class(function: Callable[..., Any], reserved: Collection[str] = ()) -> type[Any]:
    """The keyword-only parameters of a user's function, without the reserved ones, as an options dataclass."""
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # an annotation that exists for type checkers only: names are checked, types cannot be
        hints = {}
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in reserved:
            value = dataclasses.field()
            if parameter.default is not parameter.empty:
                value = dataclasses.field(default_factory=partial(_same, parameter.default))
            fields.append((parameter.name, hints.get(parameter.name, Any), value))
    return dataclasses.make_dataclass(getattr(function, "__name__", "function"), fields, frozen=True, kw_only=True)


def _same(value: Any) -> Any:
    return value


def option_parameters(
    function: Callable[..., Any], reserved: Collection[str] = RESERVED
) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a function without the reserved ones, by name."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in reserved}


def check_options(
    function: Callable[..., Any], options: Mapping[str, Any], *, owner: str, reserved: Collection[str] = RESERVED
) -> None:
    """Checks options against the keyword-only parameters of `function`: names, required ones, and annotated types.

    `Literal[...]`, `bool`, `int`, `float` (whole numbers pass), `str`, `None` and unions of them are checked; a
    parameter with another annotation, or none, takes anything.

    Raises:
        ValueError: with the nearest valid name or the allowed values.
    """
    parameters = option_parameters(function, reserved)
    for name in options:
        if name not in parameters:
            raise ValueError(f"{owner}: {unknown_name('option', name, parameters)}")
    required = [name for name, p in parameters.items() if p.default is p.empty and name not in options]
    if required:
        raise ValueError(
            f"{owner}: option {', '.join(required)} must be given; options: {', '.join(sorted(parameters))}."
        )
    try:
        hints = typing.get_type_hints(function) if options else {}
    except NameError:  # a user's annotation that exists for type checkers only: names are checked, types cannot be
        hints = {}
    for name, value in options.items():
        if name in hints and not _accepts(value, hints[name]):
            raise ValueError(f"{owner}: option {name} must be {_describe(hints[name])}, got {value!r}.")


def _members(hint: Any) -> Collection[Any]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _accepts(value: Any, hint: Any) -> bool:
    for member in _members(hint):
        if typing.get_origin(member) is Literal:
            if any(value == choice and type(value) is type(choice) for choice in typing.get_args(member)):
                return True
        elif member in (bool, str, type(None)):
            if isinstance(value, member):
                return True
        elif member in (int, float):
            # True is an int to Python and a mistake to the reader of a configuration.
            if isinstance(value, (int, member)) and not isinstance(value, bool):
                return True
        else:
            return True
    return False


def _describe(hint: Any) -> str:
    words: list[str] = []
    for member in _members(hint):
        if typing.get_origin(member) is Literal:
            words.extend(repr(choice) for choice in typing.get_args(member))
        else:
            words.append(
                {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(member, "null")
            )
    return " or ".join(words)
