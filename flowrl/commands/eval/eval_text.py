"""A result as text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap

from flowrl.commands.eval.benchmark import Result, Table

COLUMNS = 80


def as_text(result: Result) -> str:
    """Headline, tables with their notes, then what else has to be known."""
    blocks = [textwrap.fill(result.headline, COLUMNS)]
    for table in result.tables:
        note = "\n" + textwrap.fill(table.note, COLUMNS, initial_indent="  ", subsequent_indent="  ")
        blocks.append(aligned(table) + (note if table.note else ""))
    blocks += [textwrap.fill(f"Note: {note}", COLUMNS) for note in result.notes]
    return "\n\n".join(blocks)


def aligned(table: Table) -> str:
    """Columns two blanks apart, numbers to the right; names are cut where 80 columns do not suffice.

    Raises:
        ValueError: the columns beside the names leave less than 12 for these.
    """
    if not table.rows:
        return table.title
    widths = [max(len(row[k]) for row in (table.head, *table.rows)) for k in range(len(table.head))]
    room = COLUMNS - sum(widths[1:]) - 2 * len(widths)
    if room < min(12, widths[0]):
        raise ValueError(f"the table {table.title!r} is too wide for {COLUMNS} columns: leave out columns or words")
    widths[0] = min(widths[0], room)
    lines = []
    for row in (table.head, *table.rows):
        name = row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 1] + "\u2026"
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([f"  {name:<{widths[0]}}", *cells]).rstrip())
    return "\n".join([textwrap.fill(table.title, COLUMNS), *lines])
