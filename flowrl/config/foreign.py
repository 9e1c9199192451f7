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
    """A toolkit whose configurations `flowrl init --from` translates.

    Attributes:
        keys: dotted name -> what it becomes; one that ends in a dot stands for all keys that begin so.
        defaults: dotted name -> what it is where a file does not say it.
        rewards: name in small letters -> our reward, on its scale.
        algorithm: the keys that say the algorithm, or the one that it always is.
        always: what it does whatever a file says, in our keys.
        methods: method -> what it does so then.
        of: method -> keys as in `keys`, where it trains by that method.
    """

    keys: Keys
    defaults: Keys
    rewards: Mapping[str, Keys]
    algorithm: str
    always: Keys = field(default_factory=dict)
    methods: Mapping[str, Keys] = field(default_factory=dict)
    of: Mapping[str, Keys] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignWords(Elsewhere):
    """All that is known of other toolkits' words.

    Attributes:
        kernels: name of a kernel -> ours.
        algorithms: word for an algorithm -> the method that it is here.
        methods: method -> our keys.
        models: name of a model, or of a script -> the published model.
        toolkits: by name.
    """

    kernels: Mapping[str, str]
    algorithms: Mapping[str, str]
    methods: Mapping[str, Keys]
    models: Mapping[str, str]
    toolkits: Mapping[str, Toolkit]


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
