"""Text for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

COLUMNS = 80


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Columns two blanks apart, numbers to the right; the first column is cut where the whole is too wide."""
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
    room = COLUMNS - len(indent) - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = max(8, min(widths[0], room))
    lines = []
    for row in [head, *rows]:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(indent + "  ".join([f"{cut(row[0], widths[0]):<{widths[0]}}", *cells]).rstrip())
    return "\n".join(lines)


def cut(text: str, width: int, *, front: bool = False) -> str:
    """A text of at most `width` characters; what is left out, at the end or in front, becomes an ellipsis."""
    if len(text) <= width:
        return text
    return "\u2026" + text[len(text) - width + 1 :] if front else text[: width - 1] + "\u2026"
