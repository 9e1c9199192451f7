"""GenEval's metadata records and their wording, for any names of classes and colours."""

from __future__ import annotations

from typing import Any

NUMBERS = ("zero", "one", "two", "three", "four")

MetadataRecord = dict[str, Any]
"""A record as JSON holds it, its keys in the order of the official file."""


def single_object(name: str) -> MetadataRecord:
    """The record "a photo of a NAME"."""
    return _record("single_object", [_clause(name)], _with_article(name))


def two_object(first: str, second: str) -> MetadataRecord:
    """The record "a photo of a FIRST and a SECOND"."""
    return _record(
        "two_object", [_clause(first), _clause(second)], f"{_with_article(first)} and {_with_article(second)}"
    )


def counting(name: str, count: int) -> MetadataRecord:
    """The record "a photo of COUNT NAMEs", which one object more makes wrong."""
    plural = f"{name}es" if name.endswith("s") else f"{name}s"  # the only rule: "benchs" and "sheeps" are official
    wrong = [_clause(name, count + 1)]
    return _record("counting", [_clause(name, count)], f"{NUMBERS[count]} {plural}", exclude=wrong)


def colors(name: str, color: str) -> MetadataRecord:
    """The record "a photo of a COLOR NAME"."""
    return _record("colors", [_clause(name, color=color)], f"{_with_article(color)} {name}")


def position(subject: str, relation: str, reference: str) -> MetadataRecord:
    """The record "a photo of a SUBJECT RELATION a REFERENCE"."""
    include = [_clause(reference), _clause(subject, position=[relation, 0])]
    return _record("position", include, f"{_with_article(subject)} {relation} {_with_article(reference)}")


def color_attr(first: str, first_color: str, second: str, second_color: str) -> MetadataRecord:
    """The record "a photo of a COLOR FIRST and a COLOR SECOND"."""
    include = [_clause(first, color=first_color), _clause(second, color=second_color)]
    shown = f"{_with_article(first_color)} {first} and {_with_article(second_color)} {second}"
    return _record("color_attr", include, shown)


def _record(
    tag: str, include: list[dict[str, Any]], shown: str, exclude: list[dict[str, Any]] | None = None
) -> MetadataRecord:
    forbidden = {} if exclude is None else {"exclude": exclude}
    return {"tag": tag, "include": include, **forbidden, "prompt": f"a photo of {shown}"}


def _clause(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
