"""Settings that replace those of a configuration, as words or as values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.config.strict_yaml import ConfigError, Override, apply_override, dotted_items, set_value
from flowrl.runtime.former_names import KEYS, name_of_today


class Typed(str):
    """A setting as typed, ``key=value``; the value is YAML."""

    __slots__ = ()


Settings = Sequence[str] | Mapping[str, Any]
"""Settings that replace those of a configuration: ``key=value`` words, or values by their keys (`typed_settings`)."""


def typed_settings(words: Sequence[str], taken: Sequence[str] = ()) -> dict[str, Any]:
    """``key=value`` words by their keys, the last word of a key, as arguments of a function. Keys in `taken`, which are
    the function's own parameters, get a name that the loader refuses."""
    found: dict[str, Any] = {}
    for word in words:
        key = word.partition("=")[0].strip()
        key = f"{key}=" if key in taken else key
        found.pop(key, None)
        found[key] = Typed(word)
    return found


def setting_keys(settings: Settings) -> list[str]:
    """The dotted keys that settings replace."""
    if isinstance(settings, Mapping):
        return [key for key, _ in dotted_items(settings)]
    return [word.partition("=")[0] for word in settings]


def apply_settings(data: dict[str, Any], settings: Settings) -> dict[str, str]:
    """Applies settings to ``data``, in place, later ones last; returns each dotted key with its word.

    >>> data = {"optim": {"lr": 1, "schedule": "cosine"}}
    >>> apply_settings(data, {"num_iterations": 3, "optim": {"lr": 1e-4}})
    {'num_iterations': 'num_iterations=3', 'optim.lr': 'optim.lr=0.0001'}
    >>> data
    {'optim': {'lr': 0.0001, 'schedule': 'cosine'}, 'num_iterations': 3}

    Raises ConfigError: as `apply_override`, or a value that no file could hold.
    """
    if not isinstance(settings, Mapping):
        return {apply_override(data, word): word for word in settings}
    words = {}
    for key, value in dotted_items(settings):
        if isinstance(value, Typed):
            words[apply_override(data, value)] = str(value)
            continue
        text, key = value_text(key, value), name_of_today(key, KEYS)
        word = f"{key}={value if isinstance(value, str | Path) else text}"
        words[key] = word
        set_value(data, key, Override(text=text, value=json.loads(text)), word)
    return words


def value_text(key: str, value: Any) -> str:
    """A setting's value as JSON, which is YAML too. Raises ConfigError: a value that no file could hold."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=os.fspath)
        _refuse_other_keys(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{key}={value!r} cannot stand in a configuration: give numbers, text, lists and mappings of them whose "
            "keys are text; a reward of your own is {'file': 'my_reward.py', 'function': 'score'}"
        ) from None
    return text


def _refuse_other_keys(value: Any) -> None:
    """Refuses keys that are no text, which JSON would make text of."""
    for key, part in value.items() if isinstance(value, Mapping) else ():
        if not isinstance(key, str):
            raise TypeError(key)
        _refuse_other_keys(part)
    for part in value if isinstance(value, list | tuple) else ():
        _refuse_other_keys(part)
