"""Refuses settings that the run's recipe or method ignores, by a table of the readers of each key.

A recipe names the readers of its run. A key that differs from its default must have one of them: `readers.yaml`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from flowrl.config.strict_yaml import read_mapping
from flowrl.config.train import TrainConfig

_TABLES = read_mapping(Path(__file__).with_suffix(".yaml"))
_READ_BY: dict[str, str] = _TABLES["readers"]
"""Reader -> keys and sections that it reads."""


class UnreadError(ValueError):
    """You set a key that nothing reads."""

    def __init__(self, key: str, said: str) -> None:
        super().__init__(said)
        self.key = key


def refuse_unread(config: TrainConfig, readers: Collection[str], what: str) -> None:
    """Refuses keys with another value than their default that no reader of the run, as named in the table, would use;
    `what` names the run in the message."""
    for key, value in _changed_settings(config):
        wanted = _readers(key) or _readers(key.rpartition(".")[0])
        if wanted and not wanted & set(readers):
            raise UnreadError(key, f"{key} is set to {value!r}, but {what} does not read it: remove it")


def is_read(key: str, recipe: str, objective: str = "") -> bool:
    """Whether a run of a recipe with an objective reads a key; its method may still ignore it."""
    if key == "clip_range" and objective in ("dppo", "reinforce"):
        return False
    wanted = _readers(key) or _readers(key.rpartition(".")[0])
    return not wanted or recipe == "grpo" or not wanted.isdisjoint(_TABLES["recipes"].get(recipe, "").split())


def keys_of(*readers: str) -> list[str]:
    """The keys and sections that readers read."""
    return [key for reader in readers for key in _READ_BY[reader].split()]


def _readers(key: str) -> set[str]:
    return {reader for reader, keys in _READ_BY.items() if key in keys.split()}


def _changed_settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys whose values are not their defaults, with the values."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _changed_settings(value, f"{prefix}{field.name}.")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is not dataclasses.MISSING and value != default:
            yield f"{prefix}{field.name}", value
