"""Reads YAML strictly: an unknown key, a wrong type or a missing key is an error that teaches.

The reader follows the YAML 1.2 core schema, because the 1.1 rules that PyYAML ships surprise people: there ``1e-4`` is
a string, ``010`` is 8, ``1:30`` is 90 and ``no`` is false. Keys may appear once. All this fits any configuration.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from flowrl.runtime.failures import MAX_TOLD as MAX_TOLD
from flowrl.runtime.failures import Faults, found_by
from flowrl.runtime.former_names import KEYS, name_of_today

hints_of: Any = functools.lru_cache(maxsize=512)(typing.get_type_hints)  # the slowest part of reading a configuration
MAX_NODES = 100_000
"""Values of one YAML document with aliases expanded, because a few hundred bytes of them can stand for billions."""
MAX_CHARACTERS = 1_000_000
"""Length of one YAML document."""


class ConfigError(Faults):
    """A configuration that cannot be used: what was given, what is allowed, what to change; a line for each fault."""

    refused: tuple[str, ...] = ()
    """Faults that are contradictions between keys, each right by itself."""
    made: Any = None
    """An instance without the wrong keys, to look for further contradictions; None if one of them is required."""
    rest: Mapping[str, Any] = types.MappingProxyType({})
    """The right keys of a whole configuration, with defaults, to look for further faults."""


def all_at_once(*checks: Callable[[], object]) -> None:
    """Runs checks that are independent of each other."""
    if found := found_by(*checks):
        raise ConfigError(*found)


def refuse(*wrong: tuple[object, str]) -> None:
    """Refuses faults: pairs of a condition that valid settings do not meet, and a sentence."""
    if found := [said for condition, said in wrong if condition]:
        raise ConfigError(*found)


@dataclasses.dataclass(frozen=True, slots=True)
class Override:
    """The value of one ``key=value`` argument: the text as typed and what YAML makes of it."""

    text: str
    """The text after the equals sign; a key for text gets it even if YAML sees a number (``out=2024``)."""
    value: Any
    """The parsed value, for every other key."""

    def __repr__(self) -> str:
        return repr(self.value)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """Other programs' names for our keys and values."""

    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Their key, by its last part -> ours, or a sentence about it."""
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Their key without a counterpart here -> a sentence that says so."""
    values: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """Our dotted key -> their value -> ours."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConfigSource:
    """The source of values, for messages, and other programs' names for our keys."""

    file: str
    """Path of the configuration file as given."""
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Dotted key -> the override argument as typed."""
    elsewhere: Callable[[], Elsewhere] = Elsewhere
    """Other programs' names for our keys; called only if a key is unknown or a value wrong."""
    remedy: str = ""
    """A sentence on what helps if required keys are missing."""
    own_keys: tuple[str, ...]
    """Every dotted key there is; a list item is written ``rewards.0.weight``."""

    def of(self, dotted: str) -> str:
        """The place that set a key: an override of it (or of a part of it), or else the file."""
        for key, argument in self.overrides.items():
            if key == dotted or key.startswith(f"{dotted}.") or dotted.startswith(f"{key}."):
                return f"override '{argument}'"
        return self.file


class _Strict(yaml.constructor.SafeConstructor, yaml.resolver.Resolver):
    """YAML 1.2 core scalars without silent duplicates."""

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


class _Loader(_Strict, yaml.SafeLoader):
    """PyYAML's own reader with our messages and our refusal of tabs."""


class _FastLoader(_Strict, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same in C, ten times as fast, if PyYAML has it."""


_APART = re.compile(r"[\t?\ufeff]|(?<!\S)!(?!\S)")
"""What the reader in C takes in places where PyYAML's own refuses it, or reads as another text or, a lone !, value."""


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes every text that YAML 1.1 or our loader would read as something else."""


class _FastDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """The same in C, if PyYAML has it; it escapes letters that the other writes."""


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
    _Strict.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)
for _dumper in (_Dumper, _FastDumper):
    _dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


_CURES = {
    "'\\t'": "indent with spaces, YAML allows no tabs",
    "another document": "a configuration is one document; remove what follows '---'",
    "for the tag": "remove the tag, which begins with '!'",
    "integer string conversion": "write a number with fewer digits",
}
"""What to do about faults of YAML, by a part of the parser's words."""


def parse_yaml(text: str, where: str) -> Any:
    """Parse one YAML document. Raises ConfigError: syntax error, tab, duplicate key, a key that is not text, endless
    nesting, or aliases for too many values; names ``where`` and the line."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{where}: it has {len(text):,} characters, and at most {MAX_CHARACTERS:,} are read")
    try:
        try:
            return deepcopy(_read_document(text, _Loader if _APART.search(text) else _FastLoader))
        except yaml.YAMLError:
            return deepcopy(_read_document(text, _Loader))  # for its words
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: lists or mappings are nested too deep to be read; make it flat") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join((getattr(error, "problem", None) or str(error)).partition("; use sys.")[0].split())
        cure = "".join(f"; {cure}" for words, cure in _CURES.items() if words in problem)
        raise ConfigError(f"{where}:{line} not valid YAML: {problem}{cure}") from None


@functools.lru_cache(maxsize=512)  # configurations that ship build on each other
def _read_document(text: str, reader: Any) -> Any:
    loader = reader(text)
    try:
        node = loader.get_single_node()
        if (count := 0 if node is None else _count(node, {})) > MAX_NODES:
            raise ConfigError(
                f"it holds {count:.3g} values once its aliases (*name) are written out, and at most {MAX_NODES:,} "
                "are read: repeat fewer of them"
            )
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _count(node: yaml.Node, counts: dict[int, float]) -> float:
    """Nodes at and below this one with aliases expanded; an alias of an enclosing node counts once."""
    if id(node) not in counts:
        counts[id(node)] = 1.0
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = (one for item in below for one in (item if isinstance(item, tuple) else (item,)))
        counts[id(node)] += sum(_count(one, counts) for one in inner)
    return counts[id(node)]


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping. Raises ConfigError: the file is missing, unreadable, empty, not
    YAML or not a mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file (relative paths start at {Path.cwd()})") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}): save it as UTF-8, or give YAML") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    data = parse_yaml(text, str(path))
    if data is None:
        raise ConfigError(f"{path}: the file is empty; a configuration is a mapping of keys to values")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the top level is {kind(data)}; a configuration is a mapping of keys to values")
    return data


_COMMENT = re.compile(r"\s#")


def apply_override(data: dict[str, Any], argument: str) -> str:
    """Set ``a.b=value`` or ``items.0.name=value`` in ``data``, in place, and return the dotted key. Raises ConfigError:
    no equals sign, an empty part of the key, a bad list index, or a part of a single value."""
    dotted, equals, text = argument.partition("=")
    dotted = name_of_today(dotted.strip(), KEYS)
    if not equals or not all(dotted.split(".")):
        raise ConfigError(f"override '{argument}': write KEY=VALUE, for instance optim.lr=1e-4 or rewards.0.weight=2")
    if not text.strip():
        raise ConfigError(f"override '{argument}' gives no value: write {dotted}=null for none, or leave it out")
    parsed = parse_yaml(text, f"override '{argument}'")
    if _COMMENT.search(text) and not isinstance(parsed, dict | list) and text.lstrip()[0] not in "\"'|>":
        parsed = text.strip()  # a file's comment, which no word of a command line is
    set_value(data, dotted, Override(text=text.strip(), value=parsed), argument)
    return dotted


def set_value(data: dict[str, Any], dotted: str, value: Override, argument: str) -> None:
    """Sets the value of an override, in place; creates missing sections.

    :func:`build` judges whether the key exists.

    Raises ConfigError: a bad list index, or a part of a single value.
    """
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
            raise ConfigError(f"override '{argument}': {here} is {node!r}, {kind(node)}; it has no part '{part}'")
        if depth == len(parts) - 1:
            node[slot] = value
        else:
            child = node[slot] if isinstance(node, list) else node.get(slot)
            child = child.value if isinstance(child, Override) else child
            # A copy: through YAML anchors two places of the file can be one object.
            node[slot] = {} if child is None else child.copy() if isinstance(child, (dict, list)) else child
            node = node[slot]


def dump(data: Mapping[str, Any]) -> str:
    """Write a mapping of plain values as YAML that every YAML 1.1 or 1.2 reader reads back the same."""
    plain = json.dumps(data, ensure_ascii=False).isascii()
    dumper = _FastDumper if plain else _Dumper
    return yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120)


def dotted_keys(cls: type[Any], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a dataclass: sections, their keys, and list items under index 0."""
    hints = hints_of(cls)
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


def describe_type(hint: Any) -> str:
    """An annotation in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe_type(choice) for choice in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        inner = arguments[0]
        if arguments[-1] is Ellipsis:
            return "a list of mappings" if dataclasses.is_dataclass(inner) else f"a list ({describe_type(inner)} each)"
        return f"a list of {len(arguments)} values ({describe_type(inner)} each)"
    words = {int: "an integer", float: "a finite number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(hint, "a mapping of keys to values")


def write_value(value: Any) -> str:
    """A value as Python writes it, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "an integer of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]} ..."


def kind(value: Any) -> str:
    """The kind of a YAML value, in words."""
    words = {
        dict: "a mapping",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "an integer",
        float: "a number",
    }
    return words.get(type(value), "nothing" if value is None else type(value).__name__)
