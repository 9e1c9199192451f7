"""What other toolkits call our keys and values, and what their configurations are here: `foreign_words.yaml`, read."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.config.strict_yaml import Elsewhere, dotted_items, read_mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolkit:
    """A toolkit whose configurations `flowrl init --from` translates.

    Attributes:
        keys: dotted name -> what it becomes; one that ends in a dot stands for all keys that begin so.
        defaults: dotted name -> what it is where a file does not say it.
        rewards: name in small letters -> our reward, on its scale.
    """

    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    rewards: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignWords(Elsewhere):
    """All that is known of other toolkits' words.

    Attributes:
        kernels: name of a kernel -> ours.
        algorithms: one that is not translated -> the shipped configuration that has it.
        models: name of a model, or of a script -> the published model.
        toolkits: by name.
    """

    kernels: Mapping[str, str]
    algorithms: Mapping[str, str]
    models: Mapping[str, str]
    toolkits: Mapping[str, Toolkit]


@functools.cache
def foreign_words() -> ForeignWords:
    """The words of other toolkits; read when they are first asked for, which a right configuration never does."""
    data = read_mapping(Path(__file__).with_name("foreign_words.yaml"))
    keys = _by_their_names(data["keys"])
    return ForeignWords(
        keys=keys,
        absent=_by_their_names(data["absent"]),
        values={key: _by_their_names(table) for key, table in data["values"].items()},
        kernels=_by_their_names(data["kernels"]),
        algorithms=data["algorithms"],
        models=data["models"],
        toolkits={
            name: Toolkit(
                keys={  # of one without a word of its own, what others make of its last part
                    dotted[:-1] if dotted.endswith("..") else dotted: (
                        keys[dotted.rpartition(".")[2]] if entry is None else entry
                    )
                    for dotted, entry in dotted_items(found["keys"])
                },
                defaults=dict(dotted_items(found["defaults"])),
                rewards=found["rewards"],
            )
            for name, found in data["toolkits"].items()
        },
    )


def _by_their_names(table: Mapping[str, str]) -> dict[str, str]:
    """Our name, or a sentence -> what others say in one text; turned round."""
    return {theirs: ours for ours, words in table.items() for theirs in words.split()}
