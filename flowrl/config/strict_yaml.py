"""YAML to frozen dataclasses, strictly: an unknown key, a wrong type or a missing key is an error that teaches.

The reader follows the YAML 1.2 core schema, because the 1.1 rules that PyYAML ships surprise people: there ``1e-4`` is
a string, ``010`` is 8, ``1:30`` is 90 and ``no`` is false. Keys may appear once. Nothing here knows what is configured.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from flowrl.config.spelling import closest, edit_distance

Setting = TypeVar("Setting")

_hints: Any = functools.lru_cache(maxsize=512)(typing.get_type_hints)  # the slowest part of reading a configuration
MAX_NODES = 100_000
"""Values of one YAML document, aliases written out: a few hundred bytes of them can stand for billions."""
MAX_CHARACTERS = 1_000_000
"""Length of one YAML document."""
MAX_TOLD = 18
"""Wrong keys that one message names."""


class ConfigError(ValueError):
    """A configuration that cannot be used: what was given, what is allowed, what to change.

    One paragraph; where several keys are wrong, a line for each.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Override:
    """The value of one ``key=value`` argument: the text as typed and what YAML makes of it."""

    text: str
    """What stood after the equals sign: a key that holds text gets this where YAML sees a number (``out=2024``)."""
    value: Any
    """The parsed value: what every other key gets."""

    def __repr__(self) -> str:
        return repr(self.value)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where values come from, for messages, and what other programs call our keys."""

    file: str
    """Path of the configuration file as given."""
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Dotted key -> the override argument as typed."""
    foreign_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Key of another toolkit (last component) -> our dotted key."""
    foreign_values: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """Our dotted key -> value of another toolkit -> our value."""
    absent_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Key of another toolkit for what there is not here -> a sentence that says so."""
    remedy: str = ""
    """What helps where required keys are missing, as a sentence."""
    own_keys: tuple[str, ...]
    """Every dotted key there is; a list item is written ``rewards.0.weight``."""

    def of(self, dotted: str) -> str:
        """Name the place a key came from: an override that set it (or a part of it), else the file."""
        for key, argument in self.overrides.items():
            if key == dotted or key.startswith(f"{dotted}.") or dotted.startswith(f"{key}."):
                return f"override '{argument}'"
        return self.file


class _Loader(yaml.SafeLoader):
    """Safe loader with the YAML 1.2 core scalars and without silent duplicates."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own class attribute

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.tag.endswith((":str", ":merge")):
                text = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                raise ConfigError(f"line {line}: {text} is not usable as a key: keys are text; put it in quotes")
            if key_node.value in seen:
                raise ConfigError(
                    f"line {line}: key '{key_node.value}' appears twice in one mapping "
                    f"(first on line {seen[key_node.value]}): keep one of the two"
                )
            seen[key_node.value] = line
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes every text which either YAML 1.1 or our loader would read as something else."""


_FLOAT = re.compile(
    r"^[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
for _tag, _pattern, _first in (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", re.compile(r"^<<$"), ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """Parse one YAML document.

    Raises:
        ConfigError: syntax error, tab, duplicate key, a key that is not text, nesting without end, or aliases that
            stand for too many values; names ``where`` and the line.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{where}: it has {len(text):,} characters, and at most {MAX_CHARACTERS:,} are read")
    try:
        return _construct(_Loader(text))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: lists or mappings are nested too deep to be read; make it flat") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        tab = "; indent with spaces, YAML allows no tabs" if "'\\t'" in problem else ""
        raise ConfigError(f"{where}:{line} not valid YAML: {' '.join(problem.split())}{tab}") from None


def _construct(loader: _Loader) -> Any:
    """The value of a loader's document, once its nodes are counted."""
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if (count := _count(node, {})) > MAX_NODES:
            raise ConfigError(
                f"it holds {count:.3g} values once its aliases (*name) are written out, and at most {MAX_NODES:,} are "
                "read: repeat fewer of them"
            )
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count(node: yaml.Node, counts: dict[int, float]) -> float:
    """Nodes at and below this one, aliases written out; an alias of a node that it lies in counts once."""
    if id(node) not in counts:
        counts[id(node)] = 1.0
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = (one for item in below for one in (item if isinstance(item, tuple) else (item,)))
        counts[id(node)] += sum(_count(one, counts) for one in inner)
    return counts[id(node)]


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

    Raises:
        ConfigError: the file is missing, unreadable, empty, not YAML or not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file (relative paths start at {Path.cwd()})") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); give the path of a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    data = parse_yaml(text, str(path))
    if data is None:
        raise ConfigError(f"{path}: the file is empty; a configuration is a mapping of keys to values")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the top level is {_kind(data)}; a configuration is a mapping of keys to values")
    return data


def apply_override(data: dict[str, Any], argument: str) -> str:
    """Set ``a.b=value`` or ``items.0.name=value`` in ``data``, in place, and return the dotted key.

    Sections that are not there are created; whether the key exists at all is for :func:`build` to judge.

    Raises:
        ConfigError: no equals sign, an empty part of the key, a bad list index, or a part of a single value.
    """
    dotted, equals, text = argument.partition("=")
    dotted = dotted.strip()
    if not equals or not all(dotted.split(".")):
        raise ConfigError(f"override '{argument}': write KEY=VALUE, for instance optim.lr=1e-4 or rewards.0.weight=2")
    if not text.strip():
        raise ConfigError(f"override '{argument}' gives no value: write {dotted}=null for none, or leave it out")
    value = Override(text=text.strip(), value=parse_yaml(text, f"override '{argument}'"))
    parts = dotted.split(".")
    node: Any = data
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth])
        slot: Any = part
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                indexes = ", ".join(str(i) for i in range(len(node))) or "none: set the whole list"
                raise ConfigError(f"override '{argument}': {here} has no item '{part}'; its indexes are {indexes}")
            slot = int(part)
        elif not isinstance(node, dict):
            raise ConfigError(f"override '{argument}': {here} is {node!r}, {_kind(node)}; it has no part '{part}'")
        if depth == len(parts) - 1:
            node[slot] = value
        else:
            child = node[slot] if isinstance(node, list) else node.get(slot)
            child = child.value if isinstance(child, Override) else child
            # A copy: through YAML anchors two places of the file can be one object.
            node[slot] = {} if child is None else child.copy() if isinstance(child, (dict, list)) else child
            node = node[slot]
    return dotted


def build_settings(cls: type[Setting], overrides: Sequence[str], *, command: str) -> Setting:
    """Make the settings of a command without a file from `key=value` texts, as strictly as a configuration.

    Args:
        cls: a dataclass.
        overrides: the texts.
        command: what messages call their place.

    Raises:
        ConfigError: as `build`.
    """
    data: dict[str, Any] = {}
    for text in overrides:
        apply_override(data, text)
    made: Setting = build(cls, data, Source(file=command, own_keys=tuple(dotted_keys(cls))))
    return made


def build(cls: type[Any], data: Mapping[str, Any], source: Source, prefix: str = "") -> Any:
    """Make an instance of the dataclass ``cls`` from a mapping, checking every key and type on the way.

    Raises:
        ConfigError: unknown and missing keys, all of them at once; else a wrong type, or a contradiction that the
            dataclass itself refuses.
    """
    wrong = list(_wrong_keys(cls, data, source, prefix))
    if wrong:
        raise ConfigError(_told(wrong, source))
    return _build(cls, data, source, prefix)


def _wrong_keys(cls: type[Any], data: Mapping[str, Any], source: Source, prefix: str) -> Iterator[tuple[str, str]]:
    """Where each unknown or missing key of a mapping and of the mappings in it comes from, and what is said of it."""
    hints, fields = _hints(cls), {field.name: field for field in dataclasses.fields(cls)}
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
        if name not in data and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            wanted = described(hints[name])
            yield source.file, f"required key '{prefix}{name}' is missing; add it, its value is {wanted}"


def _mappings(value: Any, dotted: str, *, listed: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A value and its key where it is a mapping, with `listed` those in a list; what is of another type is left out."""
    value = value.value if isinstance(value, Override) else value
    if listed and isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _mappings(item, f"{dotted}.{index}", listed=False)
    elif not listed and isinstance(value, Mapping):
        yield dotted, value


def _told(wrong: Sequence[tuple[str, str]], source: Source) -> str:
    """All wrong keys in one message: a paragraph for one, else a line for each."""
    remedy = source.remedy if any(said.startswith("required") for _, said in wrong) else ""
    if len(wrong) == 1:
        return f"{wrong[0][0]}: {wrong[0][1]}{f'. {remedy}' if remedy else ''}"
    lines = [said if place == source.file else f"{place}: {said}" for place, said in wrong[:MAX_TOLD]]
    more = [f"and {len(wrong) - MAX_TOLD} more"] if len(wrong) > MAX_TOLD else []
    return "\n  ".join([f"{source.file}: {len(wrong)} keys are wrong", *lines, *more, *([remedy] if remedy else [])])


def _build(cls: type[Any], data: Mapping[str, Any], source: Source, prefix: str) -> Any:
    """`build` of a mapping whose keys are right."""
    hints = _hints(cls)
    values = {name: _convert(value, hints[name], f"{prefix}{name}", source) for name, value in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        # Sections have one place each and name their keys in full; only an item of a list needs its index said.
        item = f" {prefix.rstrip('.')}:" if any(part.isdecimal() for part in prefix.split(".")) else ""
        raise ConfigError(f"{source.file}:{item} {error}") from None


def dump(data: Mapping[str, Any]) -> str:
    """Write a mapping of plain values as YAML that every YAML 1.1 or 1.2 reader reads back the same."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def dotted_keys(cls: type[Any], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a dataclass: sections, their keys, and list items under index 0."""
    hints = _hints(cls)
    for name in (field.name for field in dataclasses.fields(cls)):
        hint = hints[name]
        yield f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            yield from dotted_keys(typing.cast(type[Any], hint), f"{prefix}{name}.")
        elif typing.get_origin(hint) is tuple and dataclasses.is_dataclass(typing.get_args(hint)[0]):
            yield from dotted_keys(typing.get_args(hint)[0], f"{prefix}{name}.0.")


def dotted_items(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings with its dotted key; lists and empty mappings stay whole."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from dotted_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _convert(value: Any, hint: Any, dotted: str, source: Source) -> Any:
    """Turn a YAML value into what the annotation says, or raise."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    union = arguments if origin in (types.UnionType, typing.Union) else (hint,)
    if isinstance(value, Override):
        textual = str in union and value.value is not None and not isinstance(value.value, str)
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
    raise ConfigError(_wrong_type(value, hint, dotted, source))


_MISFIT = object()  # what `_convert_one` says of a value that is of another type


def _convert_one(value: Any, hint: Any, dotted: str, source: Source) -> Any:
    """Convert to a type that is not a union; `_MISFIT` where the value does not fit."""
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
        kinds = [arguments[0]] * len(value) if whole else list(arguments)
        if len(kinds) != len(value):
            return _MISFIT
        return tuple(_convert(v, k, f"{dotted}.{i}", source) for i, (v, k) in enumerate(zip(value, kinds, strict=True)))
    if origin in (dict, Mapping):
        return _plain(value, dotted, source) if isinstance(value, Mapping) else _MISFIT
    if hint is float:
        return _finite(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else _MISFIT
    if hint is int and type(value) is int and abs(value) >= 2**63:
        raise ConfigError(f"{source.of(dotted)}: {dotted} is {_shown(value)}, and integers lie below 2^63 = {2**63:,}")
    if hint in (int, bool, str):
        return value if type(value) is hint else _MISFIT
    return _plain(value, dotted, source)  # a type that YAML knows nothing of: the owner judges it


def _finite(value: float) -> Any:
    """The number as a float; `_MISFIT` where it is not finite (an integer may be too large for a float)."""
    try:
        return float(value) if math.isfinite(value) else _MISFIT
    except OverflowError:
        return _MISFIT


def _plain(value: Any, dotted: str, source: Source, depth: int = 0) -> Any:
    """Free-form options: mappings, lists and scalars only, so that they can be written back and hashed."""
    value = value.value if isinstance(value, Override) else value
    if depth > 20:
        raise ConfigError(
            f"{source.of(dotted)}: {dotted} is nested more than 20 deep (or contains itself); make it flat"
        )
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{dotted}.{key}", source, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{dotted}.{i}", source, depth + 1) for i, item in enumerate(value)]
    if value is None or type(value) in (str, int, bool) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ConfigError(
        f"{source.of(dotted)}: {dotted} is {_shown(value)}; use text, finite numbers, true, false, lists and mappings"
    )


def _unknown_key(key: str, value: Any, siblings: Sequence[str], source: Source, prefix: str) -> str:
    """Say what was probably meant: a sibling one slip away, a key of another section, a term of another toolkit."""
    start = f"unknown key '{prefix}{key}'"
    if key in source.absent_keys:
        return f"{start}: {source.absent_keys[key]}"
    near = closest(key, siblings)
    slip = near is not None and edit_distance(key, near) <= 1
    inner = value.value if isinstance(value, Override) else value
    leaves = {} if slip else {key: _ours(key, source)}
    if isinstance(inner, dict):  # a section of another toolkit: translate what it holds
        leaves |= {leaf: source.foreign_keys.get(leaf) if slip else _ours(leaf, source) for leaf in inner}
    names = ", ".join(f"'{leaf}' is called '{ours}' here" for leaf, ours in leaves.items() if ours is not None)
    if names:
        return f"{start}: {names}"
    if near is not None:
        return f"{start}: did you mean '{prefix}{near}'?"
    return f"{start}: the keys here are {', '.join(f'{prefix}{name}' for name in siblings) or 'none'}"


def _ours(key: str, source: Source) -> str | None:
    """Our own key that was written in the wrong section, and what we call a term that another toolkit uses."""
    own = next((own for own in source.own_keys if own.rpartition(".")[2] == key), None)
    found = [name for name in (own, source.foreign_keys.get(key)) if name is not None]
    return "' or '".join(found) or None


def _wrong_type(value: Any, hint: Any, dotted: str, source: Source) -> str:
    start = f"{source.of(dotted)}: {dotted} must be {described(hint)}, got {_shown(value)}"
    if not isinstance(value, (dict, list)):
        ours = source.foreign_values.get(dotted, {}).get(str(value))
        allowed = [choice for choice in typing.get_args(hint) if isinstance(choice, str)]
        near = closest(str(value), allowed) if ours is None else ours
        if near is not None:
            return f"{start}: did you mean '{near}'?"
    return f"{start} ({_kind(value)})"


def described(hint: Any) -> str:
    """An annotation in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(described(choice) for choice in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        inner = arguments[0]
        if arguments[-1] is Ellipsis:
            return "a list of mappings" if dataclasses.is_dataclass(inner) else f"a list ({described(inner)} each)"
        return f"a list of {len(arguments)} values ({described(inner)} each)"
    words = {int: "an integer", float: "a finite number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(hint, "a mapping of keys to values")


def _shown(value: Any) -> str:
    """A value as Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "an integer of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _kind(value: Any) -> str:
    """What a YAML value is, in words."""
    words = {
        dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "an integer", float: "a number",
    }  # fmt: skip
    return words.get(type(value), "nothing" if value is None else type(value).__name__)
