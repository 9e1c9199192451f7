"""Configurations that build on another file: ``base: NAME``, then only what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.config.strict_yaml import ConfigError, read_mapping


def read_with_base(path: str | Path) -> dict[str, Any]:
    """Read a YAML file and the files it builds on.

    ``base`` names a file beside this one, with or without ``.yaml``. Mappings are merged key by key; everything else,
    lists too, replaces what the base says. A base may have a base.

    Raises:
        ConfigError: a file cannot be read, ``base`` is not text, or files name each other in a circle.
    """
    chain: list[Path] = []
    layers: list[dict[str, Any]] = []
    current: Path | None = Path(path)
    while current is not None:
        if current.resolve() in chain:
            names = " -> ".join(p.name for p in [*chain, current])
            raise ConfigError(f"{path}: base files name each other in a circle: {names}")
        chain.append(current.resolve())
        data = read_mapping(current)
        base = data.pop("base", None)
        if base is not None and not (isinstance(base, str) and base.strip()):
            raise ConfigError(f"{current}: base is the name of another configuration beside this one, got {base!r}")
        layers.append(data)
        current = None if base is None else current.parent / (base if base.endswith(".yaml") else f"{base}.yaml")
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged = _merge(merged, layer)
    return merged


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
