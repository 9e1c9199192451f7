"""Options of rewards, losses and the like: a frozen dataclass each, built strictly from a configuration.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Jpeg:
        quality: int = 95              # its docstring below says what the option means

        def __post_init__(self) -> None:
            ...                        # raises ValueError where values make no sense

    jpeg = build_options(Jpeg, {"quality": 90}, owner="reward 'jpeg'")

The dataclass alone states its options: fields give names, types and defaults, their docstrings the documentation, and
`__post_init__` the check. Your own function with keyword-only parameters is read as such a class.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from flowrl.config.building import build
from flowrl.config.strict_yaml import ConfigSource, dotted_keys

Entry = TypeVar("Entry")
Options = TypeVar("Options")


def unknown_name(what: str, name: Any, allowed: Iterable[str]) -> str:
    """The sentence on a name that is not allowed, with the nearest allowed one."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {what} {name!r}{hint}; allowed: {', '.join(names) or 'none'}."


def entry_of(table: Mapping[str, Entry], name: str, what: str, *, owner: str = "") -> Entry:
    """The entry of a table of choices; `what` is a word for its names, `owner` begins messages. Raises ValueError:
    there is no such entry; the message has the nearest name and all names."""
    if name not in table:
        raise ValueError(f"{owner}: {unknown_name(what, name, table)}" if owner else unknown_name(what, name, table))
    return table[name]


def build_options(cls: type[Options], options: Mapping[str, Any], *, owner: str) -> Options:
    """Makes an options dataclass from plain values, as strictly as the configuration is read.

    Args:
        cls: the dataclass; lists become tuples and mappings become nested dataclasses if its fields are such.
        owner: start of messages, such as "reward 'jpeg'".

    Raises ValueError: an unknown or missing option, a wrong type, or what `cls` itself refuses.
    """
    made: Options = build(cls, options, ConfigSource(file=owner, own_keys=tuple(dotted_keys(cls))))
    return made


def build_parts(classes: Sequence[type[Any]], options: Mapping[str, Any], *, owner: str) -> tuple[Any, ...]:
    """Makes several options dataclasses, which share no option, from one mapping of all their options; `owner` as
    `build_options`. Raises ValueError: as `build_options`; on an unknown option it lists those of all classes."""
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
    except (NameError, TypeError):  # an annotation for type checkers only, or a callable object: checks names alone
        hints = {}
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in reserved:
            value = dataclasses.field()
            if parameter.default is not parameter.empty:
                value = dataclasses.field(default_factory=partial(lambda default: default, parameter.default))
            fields.append((parameter.name, hints.get(parameter.name, Any), value))
    return dataclasses.make_dataclass(getattr(function, "__name__", "function"), fields, frozen=True, kw_only=True)
