"""Removes local paths, addresses and secrets from shared texts."""

from __future__ import annotations

import re
from typing import Any

from flowrl.runtime.scrubbing import SECRET, without_secrets

_URL = re.compile(r"\b[a-z][a-z0-9+]*://[^\s'\"]+")
_PATH = re.compile(
    r"(?<![\w.:/\u2026-])(?:~[\w.-]*|[A-Za-z]:\\|/)(?:[^\s'\",;\[\](){}]*[/\\])?([^\s'\",;\[\](){}/\\]*)"
)
_SECRET_KEYS = re.compile(r"(?:token|key|secret|password)(?:_env)?$", re.I)


def without_places(text: str) -> str:
    """Reduces paths in a text to their last part, and addresses and secrets to a word."""
    text = without_secrets(_URL.sub("ADDRESS", text))
    return _PATH.sub(lambda found: f"\u2026/{found[1]}" if len(found[0]) > 1 else found[0], text)


def settings_without_places(value: Any, key: str = "") -> Any:
    """Does the same for all texts in nested settings; leaves out values whose key names a secret."""
    if isinstance(value, dict):
        return {name: settings_without_places(part, str(name)) for name, part in value.items()}
    if isinstance(value, list):
        return [settings_without_places(part, key) for part in value]
    if isinstance(value, str):
        return SECRET if _SECRET_KEYS.search(key) else without_places(value)
    return value
