"""Settings that a recipe does not read must not look as if it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flowrl.config.train import TrainConfig


def refuse_unread(config: TrainConfig, keys: Sequence[str], what: str) -> None:
    """Refuses keys that were changed from their default although nothing would come of it.

    Args:
        config: the run's settings.
        keys: dotted names of keys or of whole sections, such as `kl_coef` and `credit`.
        what: who does not read them, for the message.

    Raises:
        ValueError: names the first such key and its value.
    """
    for key in keys:
        owner: Any = config
        *sections, name = key.split(".")
        for section in sections:
            owner = getattr(owner, section)
        changed = _changed(owner, name, key)
        if changed:
            key, value = changed
            raise ValueError(f"{key} is set to {value!r}, but {what} does not read it: remove it")


def _changed(owner: Any, name: str, key: str) -> tuple[str, Any] | None:
    """The first key at or below `name` whose value is not its default, with the value."""
    value = getattr(owner, name)
    if dataclasses.is_dataclass(value):
        found = (_changed(value, field.name, f"{key}.{field.name}") for field in dataclasses.fields(value))
        return next((item for item in found if item), None)
    field = next(field for field in dataclasses.fields(owner) if field.name == name)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return None if value == default else (key, value)
