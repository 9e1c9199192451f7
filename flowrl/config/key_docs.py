"""Reads the keys of a configuration with their docstrings, types and defaults from the code."""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from flowrl.config.source_syntax import text_after
from flowrl.config.strict_yaml import describe_type
from flowrl.runtime.syntax import parse_python


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyDoc:
    """One key: its dotted name, type, default as in YAML, and docstring."""

    key: str
    kind: str
    default: str
    text: str


def key_docs(cls: type[Any], prefix: str = "") -> Iterator[KeyDoc]:
    """Every key below a configuration's class, sections first; items of lists stand under index 0."""
    hints, texts = typing.get_type_hints(cls), field_texts(typing.cast(Any, cls))
    for field in dataclasses.fields(cls):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        items = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
        inner = next((one for one in (hint, *items) if dataclasses.is_dataclass(one)), None)
        kind = "section" if inner is hint else "list of sections" if inner else describe_type(hint)
        yield KeyDoc(key=key, kind=kind, default=_default(field, inner), text=texts.get(field.name, ""))
        if inner is not None:
            yield from key_docs(typing.cast(type[Any], inner), f"{key}." if inner is hint else f"{key}.0.")


@cache
def field_texts(cls: type[Any]) -> dict[str, str]:
    """Field -> the docstring below it, in one line."""
    (body,) = parse_python(cls).body
    return fields_of(typing.cast(ast.ClassDef, body))


def fields_of(body: ast.ClassDef) -> dict[str, str]:
    """As `field_texts`, for a parsed class."""
    return {
        line.target.id: " ".join(text.split())
        for place, line in enumerate(body.body)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if (text := text_after(body.body, place))
    }


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence, or colon that ends the text, without it."""
    line = " ".join(text.strip().partition("\n\n")[0].split())
    for k, letter in enumerate(line):
        if letter == "." and line[k + 1 : k + 2] in ("", " ") and line[k + 2 : k + 3].upper() == line[k + 2 : k + 3]:
            if not line[:k].endswith(("e.g", "i.e", "vs")):
                return line[:k]
    return line.rstrip(".:")


def _default(field: dataclasses.Field[Any], inner: Any) -> str:
    if field.default is not dataclasses.MISSING:
        given = field.default
    elif inner is None and field.default_factory is not dataclasses.MISSING:
        given = field.default_factory()
    else:
        return "required" if field.default_factory is dataclasses.MISSING else ""
    words = {None: "null", True: "true", False: "false"}
    return words[given] if given is None or isinstance(given, bool) else f"{given}" if given != () else "[]"
