"""Text for a terminal of 80 columns, and the tables of `flowrl compare` and `flowrl eval`, as Markdown too."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

COLUMNS = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of text: `head` and every row have as many cells; the first names the row."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def wrapped(text: str, first: str = "", rest: str = "", *, width: int = COLUMNS) -> str:
    """A text in lines, behind `first` and then `rest`; long words stay whole, so you can copy them."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def as_table(table: Table) -> str:
    """The table below its title; leaves out last columns if they and names of 12 letters do not fit into 80."""
    title, head, rows = wrapped(table.title), table.head, table.rows
    if not rows:
        return title
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    kept = len(head)
    while kept > 2 and min(widths[0], 12) + sum(widths[1:kept]) + 2 * kept > COLUMNS:
        kept -= 1
    return f"{title}\n{align(head[:kept], [row[:kept] for row in rows], '  ')}"


def with_note(table: Table) -> str:
    """The table, and its note below it."""
    return "\n".join([as_table(table), *([wrapped(table.note, "  ", "  ")] if table.note else [])])


def as_markdown(table: Table) -> str:
    """The rows of a table as Markdown, without title and note."""
    head = "| " + " | ".join(table.head) + " |"
    rule = "|" + "|".join([":--", *["--:"] * (len(table.head) - 1)]) + "|"
    rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in table.rows]
    return "\n".join([head, rule, *("| " + " | ".join(row) + " |" for row in rows)])


def align(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "", *, least: int = 8) -> str:
    """Columns two blanks apart, numbers to the right; the first, `least` wide, is cut if the whole is too wide."""
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
    room = COLUMNS - len(indent) - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = max(least, min(widths[0], room))
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
