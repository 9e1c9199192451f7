"""Other toolkits' names for our keys and values, and how their configurations translate (`foreign_words.yaml`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.config.strict_yaml import Elsewhere, dotted_items, read_mapping

Keys = Mapping[str, Any]
"""Dotted name -> its translation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolkit:
    """A toolkit whose configurations `flowrl init --from` translates."""

    keys: Keys
    """Dotted name -> its translation; a name that ends in a dot stands for all keys with this prefix."""
    defaults: Keys
    """Dotted name -> its default if a file does not set it."""
    rewards: Mapping[str, Keys]
    """Name in small letters -> our reward, on its scale."""
    algorithm: str
    """The keys that name the algorithm, or the toolkit's only one."""
    always: Keys = field(default_factory=dict)
    """What it always does, in our keys."""
    methods: Mapping[str, Keys] = field(default_factory=dict)
    """Method -> what it always does with it, in our keys."""
    of: Mapping[str, Keys] = field(default_factory=dict)
    """Method -> keys as in `keys`, for files that train by that method."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignWords(Elsewhere):
    """All known words of other toolkits."""

    kernels: Mapping[str, str]
    """Name of a kernel -> ours."""
    algorithms: Mapping[str, str]
    """Word for an algorithm -> the method that it is here."""
    methods: Mapping[str, Keys]
    """Method -> our keys."""
    models: Mapping[str, str]
    """Name of a model, or of a script -> the published model."""
    toolkits: Mapping[str, Toolkit]
    """By name."""


@functools.cache
def foreign_words() -> ForeignWords:
    """The words of other toolkits, read at first use; a right configuration never needs them."""
    data = read_mapping(Path(__file__).with_name("foreign_words.yaml"))
    keys, toolkits = _by_their_names(data["keys"]), dict[str, Toolkit]()

    def entries(section: Mapping[str, Any]) -> dict[str, str]:
        return {  # of one without a word of its own, what others make of its last part
            dotted[:-1] if dotted.endswith("..") else dotted: (
                keys[dotted.rpartition(".")[2]] if entry is None else entry
            )
            for dotted, entry in dotted_items(section)
        }

    for name, found in data["toolkits"].items():
        like = toolkits.get(found.pop("like", ""), Toolkit(keys={}, defaults={}, rewards={}, algorithm=""))
        toolkits[name] = Toolkit(
            **{
                **found,
                "keys": {**like.keys, **entries(found["keys"])},
                "defaults": {**like.defaults, **dict(dotted_items(found["defaults"]))},
                "rewards": {**like.rewards, **found["rewards"]},
                "of": {method: entries(section) for method, section in found.get("of", {}).items()},
            }
        )
    return ForeignWords(
        keys=keys,
        absent=_by_their_names(data["absent"]),
        values={key: _by_their_names(table) for key, table in data["values"].items()},
        kernels=_by_their_names(data["kernels"]),
        algorithms=_by_their_names(data["algorithms"]),
        methods=data["methods"],
        models=data["models"],
        toolkits=toolkits,
    )


def _by_their_names(table: Mapping[str, str]) -> dict[str, str]:
    """Inverts a table: our name, or a sentence -> a text with the words of others."""
    return {theirs: ours for ours, words in table.items() for theirs in words.split()}
