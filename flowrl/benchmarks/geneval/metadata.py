"""GenEval's metadata records: one prompt, the objects it asks for and those it forbids, checked when read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.config.options import unknown_name

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
"""The six tasks, in the order of the official prompt file."""

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
"""The ten colours, in the order in which reasons list them."""

RELATIONS = ("left of", "right of", "above", "below")
"""The four relations, in the order from which prompts draw them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause:
    """What a prompt asks of one class; `position` is (relation, index of the earlier clause it refers to)."""

    label: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A checked metadata record."""

    tag: str
    include: tuple[Clause, ...]
    exclude: tuple[Clause, ...] = ()


def parse_record(metadata: Mapping[str, Any] | Record) -> Record:
    """Reads and checks a metadata record, or gives back one already read; keys besides `tag`, `include`, `exclude`
    stay. Raises ValueError: which part is wrong, what is allowed, and what to change."""
    if isinstance(metadata, Record):
        return metadata
    if not isinstance(metadata, Mapping):
        raise ValueError(
            f"a GenEval record must be a mapping with tag and include, got {metadata!r}: pass one JSON object."
        )
    missing = [key for key in ("tag", "include") if key not in metadata]
    if missing:
        raise ValueError(
            f"{_where(metadata)} lacks {' and '.join(missing)}, it has {sorted(map(str, metadata))}: "
            f"take prompts from a JSONL file with one GenEval record per line."
        )
    tag, include, exclude = metadata["tag"], metadata["include"], metadata.get("exclude", ())
    _must_be_one_of(tag, TASKS, "tag", metadata)
    for key, clauses in (("include", include), ("exclude", exclude)):
        if not isinstance(clauses, Sequence) or isinstance(clauses, str):
            raise ValueError(f"{_where(metadata)}: {key} must be a list of clauses, got {clauses!r}.")
    if not include:
        raise ValueError(f"{_where(metadata)}: include is empty, so nothing could be wrong: name at least one class.")
    return Record(
        tag=tag,
        include=tuple(_parse_clause(clause, f"include[{i}]", i, metadata) for i, clause in enumerate(include)),
        exclude=tuple(_parse_clause(clause, f"exclude[{i}]", None, metadata) for i, clause in enumerate(exclude)),
    )


def _where(metadata: Mapping[str, Any]) -> str:
    prompt = metadata.get("prompt")
    return "the GenEval record" if prompt is None else f"the GenEval record of prompt {prompt!r}"


def _must_be_one_of(value: Any, allowed: Sequence[str], what: str, metadata: Mapping[str, Any]) -> None:
    if value not in allowed:
        raise ValueError(f"{_where(metadata)}: {unknown_name(what, value, allowed)}")


def _parse_clause(clause: Any, where: str, earlier: int | None, metadata: Mapping[str, Any]) -> Clause:
    """Checks one clause; `earlier` is the number of clauses a position may refer to, None for an exclude clause."""
    at = f"{_where(metadata)}: {where}"
    if not isinstance(clause, Mapping) or not {"class", "count"} <= clause.keys():
        raise ValueError(f"{at} must be a mapping with class and count, got {clause!r}.")
    allowed = {"class", "count"} if earlier is None else {"class", "count", "color", "position"}
    if unknown := sorted(map(str, clause.keys() - allowed)):
        raise ValueError(
            f"{at} has {', '.join(unknown)}, which no rule reads; allowed are {', '.join(sorted(allowed))}."
        )
    label, count, color = clause["class"], clause["count"], clause.get("color")
    if not isinstance(label, str) or not label:
        raise ValueError(f"{at}: class must be a name, got {label!r}.")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{at}: count must be a whole number of at least 1, got {count!r}.")
    if color is not None:
        _must_be_one_of(color, COLORS, f"{where}.color", metadata)
    place = _parse_position(clause.get("position"), where, earlier, metadata)
    return Clause(label=label, count=count, color=color, position=place)


def _parse_position(
    position: Any, where: str, earlier: int | None, metadata: Mapping[str, Any]
) -> tuple[str, int] | None:
    at = f"{_where(metadata)}: {where}"
    if position is None:
        return None
    if not isinstance(position, Sequence) or isinstance(position, str) or len(position) != 2:
        raise ValueError(f"{at}: position must be [relation, index of an earlier include clause], got {position!r}.")
    relation, target = position
    _must_be_one_of(relation, RELATIONS, f"{where} relation", metadata)
    if not isinstance(target, int) or isinstance(target, bool) or not 0 <= target < (earlier or 0):
        raise ValueError(
            f"{at}: position refers to include[{target}], but only earlier clauses (indexes below {earlier}) can be "
            f"references: put the reference first."
        )
    return relation, target
