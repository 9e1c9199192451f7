"""The largest number that each key takes: far beyond any use, and small enough to catch a slip at once."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Any

from flowrl.config.strict_yaml import ConfigError, read_mapping

STEPS = 10_000
"""Denoising steps."""
IMAGES = 100_000
"""Images of one iteration, or of a batch."""
SIDE = 16_384
"""Pixels of a side."""
GUIDANCE = 1_000.0
"""Guidance scale."""
THREADS = 1_024
"""CPU threads; a hundred times as many end a process without a message."""
GRACE = 86_400.0
"""Seconds to finish accepted requests: a day."""
PROCESSES = 100_000
"""Processes, workers, GPUs."""

MOST: dict[str, float] = {
    key: globals()[most] if isinstance(most, str) else most
    for key, most in read_mapping(Path(__file__).with_suffix(".yaml")).items()
}
"""Dotted key -> the largest absolute value, for each member of a list."""


def check_counts(most: int = 1_000_000, **values: int | None) -> None:
    """Refuses parameters, by name, that are not whole numbers from 1 to `most`; None passes."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, Integral) and value is not True and 1 <= value <= most):
            raise ValueError(f"`{name}` must be a whole number from 1 to {most:,}, got {value!r}")


def check_most(value_of: Callable[[str], Any]) -> None:
    """Refuses numbers beyond `MOST` among the values of its keys."""
    found = []
    for dotted, most in MOST.items():
        value = value_of(dotted)
        numbers = (one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, int | float))
        found += [
            f"{dotted} must be at most {_write(most)}, got {_write(number)}: lower it"
            for number in numbers
            if abs(number) > most
        ]
    if found:
        raise ConfigError(*found)


def _write(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"
