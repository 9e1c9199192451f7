"""Lines of a plan: labels, tables, numbers with units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowrl.planning.memory import GIB
from flowrl.rendering.terminal_text import align, wrapped

_LABEL = 16

Row = tuple[str, str]
"""A label and what is said to it."""


def pairs(rows: Iterable[Row]) -> list[str]:
    """Labels and texts, wrapped under each other."""
    firsts = ((f"  {label:<{_LABEL}}", text) for label, text in rows)
    return [line for first, text in firsts for line in wrapped(text, first, " " * len(first)).splitlines()]


def note(text: str) -> list[str]:
    """A text in two blanks."""
    return wrapped(text, "  ", "  ").splitlines()


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns two blanks apart, numbers to the right."""
    return align(rows[0], rows[1:], "  ", least=_LABEL - 2).splitlines()


def mean(total: int, count: int) -> str:
    """A mean in full where it is whole."""
    whole, left = divmod(total, count)
    return f"{whole:,}" if not left else f"{total / count:,.1f}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    for size, unit in units:
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:,.0f} {unit}"
    return f"{value / units[-1][0]:.2g} {units[-1][1]}"


def flops(value: float) -> str:
    """FLOPs with a unit."""
    return _scaled(value, ((1e18, "EF"), (1e15, "PF"), (1e12, "TF"), (1e9, "GF"), (1e6, "MF")))


def in_bytes(value: float) -> str:
    """Bytes with a unit."""
    return _scaled(value, ((2**10 * GIB, "TiB"), (GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")))


def span(amount: float, paces: tuple[float, float]) -> str:
    """Time of so many FLOPs between a least and a most pace, in TFLOP/s."""
    slow, fast = (duration(amount / pace / 1e12) for pace in paces)
    return slow if slow == fast else f"{fast} to {slow}"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    return _scaled(seconds, ((3600, "h"), (60, "min"), (1, "s"))) if seconds >= 0.1 else "0.1 s"
