"""Configurations that build on another file: ``base: NAME``, then only what differs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from functools import cache, reduce
from importlib import resources
from pathlib import Path
from typing import Any

from flowrl.config.spelling import closest, edit_distance
from flowrl.config.strict_yaml import ConfigError, dotted_items, read_mapping, set_value
from flowrl.runtime.former_names import KEYS, name_of_today, warn_of_former

SETTINGS = "settings"
"""Name of settings without a file, in messages and for their run."""
USUAL = {24: "4090", 40: "A100", 48: "L40S", 80: "H100", 141: "H200", 180: "B200"}
"""GB of a card -> the usual GPU with so much memory."""


def read_with_base(path: str | Path | Mapping[str, Any], *, own: bool = False) -> dict[str, Any]:
    """Reads a YAML file, or settings, and the files that they build on; those that ship are left out if `own`.

    ``base`` names a file beside this one, with or without ``.yaml``, or one that ships with flowrl. Mappings are merged
    key by key; everything else, lists too, replaces the base's value. A base may have a base. For settings without a
    file, it is a path from the working folder, or the name of a shipped configuration.

    Raises ConfigError: an unreadable file, a ``base`` that is not text or names no file, or a circle of files.
    """
    chain, layers = list[Path](), list[dict[str, Any]]()
    current: Path | None
    if isinstance(path, Mapping):
        layers.append(_rename_keys(deepcopy(dict(path)), SETTINGS))
        base = _base_of(layers[0], SETTINGS)
        current = None if base is None else find_config(base)
    else:
        current = Path(path)
    while current is not None:
        if current.resolve() in chain:
            names = " -> ".join(p.name for p in [*chain, current])
            raise ConfigError(f"{path}: base files name each other in a circle: {names}")
        chain.append(current.resolve())
        data = _rename_keys(read_mapping(current), current)
        base = _base_of(data, current)
        layers += [] if own and current in config_files().values() else [data]
        if base is None:
            break
        beside = current.parent / Path(base if base.endswith(".yaml") else f"{base}.yaml").expanduser()
        try:
            current = beside if beside.is_file() else find_config(base.removesuffix(".yaml"), here=False)
        except ValueError as error:
            raise ConfigError(f"{current}: base: there is no {beside.resolve()}, and {error}") from None
    return reduce(_merge, reversed(layers), {})


def _rename_keys(data: dict[str, Any], place: str | Path) -> dict[str, Any]:
    """Moves the values of former keys to the current ones, in place, with a warning for each; refuses both together."""
    for old, value in [(key, value) for key, value in dotted_items(data) if key in KEYS]:
        section, (*above, last) = data, old.split(".")
        for key in above:
            section = section[key]
        if KEYS[old] in dict(dotted_items(data)):
            raise ConfigError(f"{place}: {old} is {KEYS[old]} now, and both are given: leave out {old}")
        del section[last]
        set_value(data, name_of_today(old, KEYS), value, old)
    return data


def _base_of(data: dict[str, Any], place: str | Path) -> str | None:
    """The base of settings; removes its key from them."""
    base = data.pop("base", None)
    if base is not None and not (isinstance(base, str) and base.strip()):
        raise ConfigError(f"{place}: base is the name of another configuration beside this one, got {base!r}")
    return base


@cache
def config_files() -> dict[str, Path]:
    """The configurations that ship, by unique name: those of the embedded models first, then each family's folder."""
    files = Path(str(resources.files("flowrl") / "configs")).glob("*/*.yaml")
    return {file.stem: file for file in sorted(files, key=lambda file: (file.parent.name != "embedded", file))}


def find_config(name: str, *, here: bool = True) -> Path:
    """Finds a YAML file by path, if `here` allows one, or one that ships with flowrl by name."""
    if here and Path(name).is_file():
        return Path(name)
    shipped = config_files()
    if name in shipped:
        return shipped[name]
    if (preset := preset_of(name, shipped)) is not None:
        raise ValueError(f"{name} is {preset[0]} with `card` {preset[1]} now, which sets what the plan finds for it")
    asked, stem = Path(name), Path(name).stem
    names = list(shipped) if asked.suffix or name == stem else []  # runs/NAME is none of them
    within = [one for one in names if stem.replace("_", "") in one.replace("_", "")]
    slips = [str(one) for one in asked.parent.glob("*.y*ml") if here and edit_distance(one.name, asked.name) < 3]
    near = first if (first := f"{stem}_recommended") in names else closest(stem, names)
    run = f"{name}/config.yaml, or resume={name} to continue that run" * (asked / "config.yaml").is_file()
    near = run or " or ".join(slips[:3]) or near or " or ".join(within[:3])
    hint = f"did you mean {near}? " if near else ""
    raise ValueError(
        f"there is no configuration {name!r}: {hint}give a YAML file, or one of the {len(shipped)} that ship: "
        "'flowrl list configs' names them"
    )


def preset_of(name: str, shipped: Collection[str]) -> tuple[str, int] | None:
    """The shipped configuration and the card in GB of a former preset, `NAME_24gb`."""
    found = re.fullmatch(r"(\w+)_([1-9]\d*)gb", name)
    return (found[1], int(found[2])) if found and name not in shipped and found[1] in shipped else None


def card_memory(card: int | str | None) -> int | None:
    """GB of one card, from its memory or the name of a usual GPU: 24, 24GB, "RTX 4090". Raises ValueError: neither."""
    if card is None:
        return None
    plain = re.sub(r"nvidia|geforce|rtx|[\s_]|(?<=\w)-", "", str(card).lower())
    named = {name.lower(): size for size, name in USUAL.items()}
    found = re.fullmatch(r"0*([1-9]\d{0,2})(gi?b?)?", plain) or re.fullmatch(rf"(?:{'|'.join(named)})(\d+)gi?b", plain)
    if found is None and plain not in named:
        raise ValueError(f"a card is given by its GB, such as 24, or as {' or '.join(USUAL.values())}, got {card!r}")
    return named[plain] if found is None else int(found[1])


def config_for_card(given: Any, card: int | str | None) -> tuple[Any, int | None]:
    """The configuration for a training or a plan; a former preset gives its configuration and its card."""
    card = card_memory(card)
    if not isinstance(given, str) or Path(given).is_file() or (preset := preset_of(given, config_files())) is None:
        return given, card
    warn_of_former(given, f"{preset[0]} with a card of {preset[1]} GB")
    return preset[0], preset[1] if card is None else card


def named_config(given: str | Mapping[str, Any]) -> tuple[Path | Mapping[str, Any], str]:
    """A configuration by path, name or settings, and the name of its run. Raises ValueError: as `find_config`."""
    if isinstance(given, Mapping):
        return given, SETTINGS
    path = find_config(given)
    return path, path.stem


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
