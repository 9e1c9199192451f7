"""A result as text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap

from flowrl.commands.eval.benchmark import Result, Table
from flowrl.commands.terminal_text import COLUMNS, aligned


def as_text(result: Result) -> str:
    """Headline, tables with their notes, then the notes."""
    blocks = [textwrap.fill(result.headline, COLUMNS)]
    for table in result.tables:
        note = "\n" + textwrap.fill(table.note, COLUMNS, initial_indent="  ", subsequent_indent="  ")
        blocks.append(as_table(table) + (note if table.note else ""))
    blocks += [textwrap.fill(f"Note: {note}", COLUMNS) for note in result.notes]
    return "\n\n".join(blocks)


def as_table(table: Table) -> str:
    """The title, and the table below it."""
    title = textwrap.fill(table.title, COLUMNS)
    return f"{title}\n{aligned(table.head, table.rows, '  ')}" if table.rows else title
