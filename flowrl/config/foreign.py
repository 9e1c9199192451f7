"""What other toolkits call our keys and values, and what their configurations are here: `foreign_words.yaml`, read."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.config.strict_yaml import Elsewhere, dotted_items, read_mapping

Keys = Mapping[str, Any]
"""Dotted name -> what it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolkit:
    """A toolkit whose configurations `flowrl init --from` translates."""

    keys: Keys
    """Dotted name -> what it becomes; one that ends in a dot stands for all keys that begin so."""
    defaults: Keys
    """Dotted name -> what it is where a file does not say it."""
    rewards: Mapping[str, Keys]
    """Name in small letters -> our reward, on its scale."""
    algorithm: str
    """The keys that say the algorithm, or the one that it always is."""
    always: Keys = field(default_factory=dict)
    """What it does whatever a file says, in our keys."""
    methods: Mapping[str, Keys] = field(default_factory=dict)
    """Method -> what it does so then."""
    of: Mapping[str, Keys] = field(default_factory=dict)
    """Method -> keys as in `keys`, where it trains by that method."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignWords(Elsewhere):
    """All that is known of other toolkits' words."""

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
    """The words of other toolkits; read when they are first asked for, which a right configuration never does."""
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
    """Our name, or a sentence -> what others say in one text; turned round."""
    return {theirs: ours for ours, words in table.items() for theirs in words.split()}
