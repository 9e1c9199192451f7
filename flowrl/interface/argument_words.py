"""Arguments of Python as the words of a command line, so that commands and functions read and refuse the same."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from flowrl.config.strict_yaml import dotted_items
from flowrl.runtime.failures import FlowrlError


class _Refusing(argparse.ArgumentParser):
    """Argparse that raises where it would end the process."""

    def error(self, message: str) -> NoReturn:
        raise FlowrlError(message)


def parsed_words(
    command: str, positional: Sequence[object] = (), flags: Mapping[str, object] | None = None
) -> argparse.Namespace:
    """What a command's own parser makes of arguments.

    Args:
        command: one word.
        positional: arguments without a flag.
        flags: name of a flag, with underscores -> its value; None and False leave it out, True sets it, and a list
            repeats it.

    Raises:
        FlowrlError: the parser refuses a value.
    """
    parser = _Refusing(prog=f"flowrl.{command}", allow_abbrev=False)
    importlib.import_module(f"flowrl.commands.{command}.arguments").add_arguments(parser)
    words = [text for name, value in (flags or {}).items() for text in _flag(f"--{name.replace('_', '-')}", value)]
    return parser.parse_args([*words, "--", *map(str, positional)])


def override_words(settings: Mapping[str, object]) -> list[str]:
    """Settings as `key=value` words; those of a mapping in a mapping have dotted keys.

    >>> override_words({"num_iterations": 3, "optim": {"lr": 1e-4}, "out": "runs/first"})
    ['num_iterations=3', 'optim.lr=0.0001', 'out=runs/first']

    Raises:
        FlowrlError: a value that no file could hold.
    """
    return [f"{key}={_value(key, value)}" for key, value in dotted_items(settings)]


def texts(value: str | Path | Iterable[str | Path] | None) -> list[str]:
    """One text or several, as a list.

    >>> texts("a red circle"), texts(None)
    (['a red circle'], [])
    """
    if value is None:
        return []
    return [str(value)] if isinstance(value, str | Path) else [str(part) for part in value]


def _flag(flag: str, value: object) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    return [f"{flag}={part}" for part in (value if isinstance(value, list | tuple) else [value])]


def _value(key: str, value: object) -> str:
    if key in ("out", "resume") and isinstance(value, str | Path):  # paths are taken as they stand
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError):
        raise FlowrlError(
            f"{key}={value!r} cannot stand in a configuration: give numbers, text, lists and mappings of them; a "
            "reward of your own is {'file': 'my_reward.py', 'function': 'score'}"
        ) from None


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError
