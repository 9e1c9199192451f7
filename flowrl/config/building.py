"""Builds frozen dataclasses from a mapping of plain values, strictly; reports all faults at once."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from flowrl.config.overrides import value_text
from flowrl.config.spelling import closest, edit_distance
from flowrl.config.strict_yaml import (
    ConfigError,
    ConfigSource,
    Override,
    apply_override,
    describe_type,
    dotted_items,
    dotted_keys,
    hints_of,
    kind,
    write_value,
)
from flowrl.runtime.failures import faults_of

Setting = TypeVar("Setting")


def build_settings(cls: type[Setting], overrides: Sequence[str], *, command: str) -> Setting:
    """Builds the settings of a command without a file from `key=value` texts, as strictly as a configuration; messages
    name `command`. Raises ConfigError: as `build`."""
    data: dict[str, Any] = {}
    for text in overrides:
        apply_override(data, text)
    made: Setting = build(cls, data, ConfigSource(file=command, own_keys=dotted_keys(typing.cast(Any, cls))))
    return made


def setting_words(settings: Mapping[str, Any]) -> list[str]:
    """Writes settings as `key=value` words of a command line; nested mappings have dotted keys.

    >>> setting_words({"num_iterations": 3, "optim": {"lr": 1e-4}})
    ['num_iterations=3', 'optim.lr=0.0001']
    """
    return [f"{key}={value_text(key, value)}" for key, value in dotted_items(settings)]


def build(cls: type[Any], data: Mapping[str, Any], source: ConfigSource, prefix: str = "") -> Any:
    """Make an instance of the dataclass ``cls`` from a mapping, checking every key and type. Raises ConfigError:
    unknown and missing keys, wrong types, and contradictions that the dataclasses refuse; all at once if possible."""
    keys = list(_wrong_keys(cls, data, source, prefix))
    try:
        made = _build(cls, data, source, prefix)
        if not keys:
            return made
        found = ConfigError()
        found.rest = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    except ConfigError as error:
        found = error
    wrong = [said for said in found.faults if said not in found.refused]
    given = {dotted for dotted, _ in dotted_items(data, prefix)}
    doubtful = _keys(said for _, said in keys) - given | _keys(wrong)
    # A contradiction of a key that is itself wrong, or of the one that was meant, may follow from that alone; so may
    # all contradictions of an item of a list that has such a key.
    doubtful |= {item for name in doubtful if (item := name.rpartition(".")[0]).rpartition(".")[2].isdecimal()}
    wrong += [said for said in found.refused if not _mentions(said, doubtful)]
    told = [*(f"{place}: {said}" for place, said in keys), *wrong]
    told = [said.removeprefix(f"{source.file}: ") for said in told] if len(told) > 1 else told
    remedy = source.remedy if any(said.startswith("required") for _, said in keys) else ""
    what = "mistakes" if wrong else "keys are wrong"
    raised = ConfigError(*told, head=f"{source.file}:", what=what, more=remedy)
    raised.rest = found.rest
    raise raised from None


_KEY = re.compile(r"'([a-z_][\w.]*)'|: ([a-z_][\w.]*) (?:must be|is) ")


def _keys(sentences: Iterable[str]) -> set[str]:
    """The keys that sentences about keys name, also the suggested ones."""
    return {name for said in sentences for pair in _KEY.findall(said) for name in pair if name}


def _mentions(said: str, keys: Iterable[str]) -> bool:
    """Whether a sentence names one of the keys."""
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", said) for key in keys)


def _wrong_keys(
    cls: type[Any], data: Mapping[str, Any], source: ConfigSource, prefix: str
) -> Iterator[tuple[str, str]]:
    """Source of each unknown or missing key in a mapping and its nested mappings, and the sentence about it."""
    hints, fields = hints_of(cls), {field.name: field for field in dataclasses.fields(cls)}
    for key, value in data.items():
        dotted = f"{prefix}{key}"
        if key not in fields:
            yield source.of(dotted), _unknown_key(key, value, tuple(fields), source, prefix)
            continue
        for inner in (hints[key], *typing.get_args(hints[key])):
            if dataclasses.is_dataclass(inner):
                for place, item in _mappings(value, dotted, listed=typing.get_origin(hints[key]) is tuple):
                    yield from _wrong_keys(typing.cast(type[Any], inner), item, source, f"{place}.")
    for name, field in fields.items():
        if name not in data and not _has_default(field):
            wanted = describe_type(hints[name])
            yield source.file, f"required key '{prefix}{name}' is missing; add it, its value is {wanted}"


def _mappings(value: Any, dotted: str, *, listed: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A value and its key if it is a mapping, with `listed` also those in a list; leaves out other types."""
    value = value.value if isinstance(value, Override) else value
    if listed and isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _mappings(item, f"{dotted}.{index}", listed=False)
    elif not listed and isinstance(value, Mapping):
        yield dotted, value


def _build(cls: type[Any], data: Mapping[str, Any], source: ConfigSource, prefix: str) -> Any:
    """Builds an instance from the existing keys of a mapping. Raises ConfigError: all faults of their values; empty if
    a required key is missing."""
    hints, fields = hints_of(cls), {field.name: field for field in dataclasses.fields(cls)}
    values, kept, faults, refused = dict[str, Any](), dict[str, Any](), list[str](), list[str]()
    present = [name for name in data if name in fields]
    for name in present:
        try:
            values[name] = _convert(data[name], hints[name], f"{prefix}{name}", source)
        except ConfigError as error:
            faults += error.faults
            refused += error.refused
            kept |= {} if error.made is None else {name: error.made}
    made, failed = None, [f"{prefix}{name}" for name in present if name not in values]
    given = values | kept
    if all(name in given or _has_default(field) for name, field in fields.items()):
        try:
            made = cls(**given)
        except ValueError as error:
            place = _place(source, prefix)
            refused += [f"{place} {said}" for said in faults_of(error) if not _mentions(f"{place} {said}", failed)]
    if made is not None and not failed:
        return made
    raised = ConfigError(*faults, *refused)
    raised.refused, raised.made = tuple(refused), made
    raised.rest = values | _defaults([field for name, field in fields.items() if name not in data])
    raise raised


def _defaults(fields: Iterable[dataclasses.Field[Any]]) -> dict[str, Any]:
    """The defaults of all fields that have one."""
    return {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in fields
        if _has_default(field)
    }


def _place(source: ConfigSource, prefix: str) -> str:
    """The place for a section's own sentences: it names its keys in full, so only an item of a list needs its index."""
    listed = any(part.isdecimal() for part in prefix.split("."))
    return f"{source.file}: {prefix.rstrip('.')}:" if listed else f"{source.file}:"


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _convert(value: Any, hint: Any, dotted: str, source: ConfigSource) -> Any:
    """Converts a YAML value to the annotated type, or raises."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    union = arguments if origin in (types.UnionType, typing.Union) else (hint,)
    if isinstance(value, Override):
        textual = str in union and value.value is not None and not isinstance(value.value, str | list | dict)
        value = value.text if textual else value.value
    if value is None and type(None) in union:
        return None
    choices = [choice for choice in union if choice is not type(None)]
    if len(choices) > 1:  # a number or a pair
        choices = [
            c for c in choices if (typing.get_origin(c) in (tuple, list, Sequence)) == isinstance(value, (list, tuple))
        ]
    for choice in choices:
        made = _convert_one(value, choice, dotted, source)
        if made is not _MISFIT:
            return made
    if callable(value):
        value_text(dotted, value)  # it refuses a function
    raise ConfigError(_wrong_type(value, hint, dotted, source))


_MISFIT = object()  # what `_convert_one` says of a value that is of another type


def _convert_one(value: Any, hint: Any, dotted: str, source: ConfigSource) -> Any:
    """Converts to a type that is not a union; `_MISFIT` if the value does not fit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _plain(value, dotted, source)
    if dataclasses.is_dataclass(hint):
        cls = typing.cast(type[Any], hint)
        return _build(cls, value, source, f"{dotted}.") if isinstance(value, Mapping) else _MISFIT
    if origin is typing.Literal:
        return value if any(value == one and type(value) is type(one) for one in arguments) else _MISFIT
    if origin in (tuple, list, Sequence):
        if not isinstance(value, (list, tuple)):
            return _MISFIT
        whole = origin is not tuple or arguments[-1] is Ellipsis
        return _convert_items(value, arguments[:1] * len(value) if whole else arguments, dotted, source)
    if origin in (dict, Mapping):
        return _plain(value, dotted, source) if isinstance(value, Mapping) else _MISFIT
    if hint in (float, int, bool, str):
        return _convert_scalar(value, hint, dotted, source)
    return _plain(value, dotted, source)  # a type that YAML knows nothing of: the owner judges it


def _convert_items(items: Sequence[Any], hints: Sequence[Any], dotted: str, source: ConfigSource) -> Any:
    """Converts list items, each by its annotation, to a tuple; reports all faults. `_MISFIT` if numbers differ."""
    if len(items) != len(hints):
        return _MISFIT
    made, faults, refused = list[Any](), list[str](), list[str]()
    for index, (value, hint) in enumerate(zip(items, hints, strict=True)):
        try:
            made.append(_convert(value, hint, f"{dotted}.{index}", source))
        except ConfigError as error:
            faults += error.faults
            refused += error.refused
    if len(made) == len(items):
        return tuple(made)
    raised = ConfigError(*faults)
    raised.refused = tuple(refused)
    raise raised


def _convert_scalar(value: Any, hint: Any, dotted: str, source: ConfigSource) -> Any:
    """A number, truth value or text of exactly this type (an integer may stand for a float); else `_MISFIT`."""
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) if math.isfinite(value) else _MISFIT
        except OverflowError:  # an integer too large for a float
            return _MISFIT
    if hint is int and type(value) is int and abs(value) >= 2**63:
        raise ConfigError(
            f"{source.of(dotted)}: {dotted} is {write_value(value)}, and integers lie below 2^63 = {2**63:,}"
        )
    return value if type(value) is hint and hint is not float else _MISFIT


def _plain(value: Any, dotted: str, source: ConfigSource, depth: int = 0) -> Any:
    """Free-form options: mappings, lists and scalars only, so that they can be written back and hashed."""
    value = value.value if isinstance(value, Override) else value
    if depth > 20:
        raise ConfigError(
            f"{source.of(dotted)}: {dotted} is nested more than 20 deep (or contains itself); make it flat"
        )
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{dotted}.{key}", source, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{dotted}.{i}", source, depth + 1) for i, item in enumerate(value)]
    if value is None or type(value) in (str, int, bool) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ConfigError(
        f"{source.of(dotted)}: {dotted} is {write_value(value)}; use text, finite numbers, true, false, lists and "
        "mappings whose keys are text"
    )


def _unknown_key(key: str, value: Any, siblings: Sequence[str], source: ConfigSource, prefix: str) -> str:
    """Suggests the key that you meant: a sibling one slip away, a key of another section, or a foreign term."""
    start = f"unknown key '{prefix}{key}'"
    elsewhere = source.elsewhere()
    if key in elsewhere.absent:
        return f"{start}: {elsewhere.absent[key]}"
    near = closest(key, siblings)
    slip = near is not None and edit_distance(key, near) <= 1
    inner = value.value if isinstance(value, Override) else value
    leaves = {} if slip else {key: _ours(key, source)}
    if isinstance(inner, dict):  # a section of another toolkit: translate what it holds
        leaves |= {leaf: elsewhere.keys.get(leaf) if slip else _ours(leaf, source) for leaf in inner}
    names = ", ".join(f"'{leaf}' is called '{ours}' here" for leaf, ours in leaves.items() if ours is not None)
    if names:
        return f"{start}: {names}"
    if near is not None:
        return f"{start}: did you mean '{prefix}{near}'?"
    return f"{start}: the keys here are {', '.join(f'{prefix}{name}' for name in siblings) or 'none'}"


def _ours(key: str, source: ConfigSource) -> str | None:
    """Our own key in the wrong section, and our name for another toolkit's term."""
    own = next((own for own in source.own_keys if own.rpartition(".")[2] == key), None)
    found = [name for name in (own, source.elsewhere().keys.get(key)) if name is not None]
    return "' or '".join(found) or None


def _wrong_type(value: Any, hint: Any, dotted: str, source: ConfigSource) -> str:
    start = f"{source.of(dotted)}: {dotted} must be {describe_type(hint)}, got {write_value(value)}"
    if not isinstance(value, (dict, list)):
        ours = source.elsewhere().values.get(dotted, {}).get(str(value))
        allowed = [choice for choice in typing.get_args(hint) if isinstance(choice, str)]
        near = closest(str(value), allowed) if ours is None else ours
        if near is not None:
            return f"{start}: did you mean '{near}'?"
    return f"{start} ({kind(value)})"
