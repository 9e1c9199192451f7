"""Published CSV files: a header, and rows with as many cells; whatever else they are is refused with file and row."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection
from pathlib import Path

from flowrl.runtime.files import read_text

Row = dict[str, str]


def read_table(
    path: Path, needed: Collection[str] = (), *, source: str
) -> tuple[tuple[str, ...], list[tuple[str, Row]]]:
    """The columns of a CSV file, and its rows with "FILE, row NUMBER", for messages; the header is row 1.

    Rows of empty cells, which spreadsheets leave behind, are skipped.

    Args:
        path: the file, in UTF-8.
        source: where to get the published one, for messages.

    Raises:
        ValueError: no such file, no text in UTF-8, no CSV, columns that are missing, a row of another length, or none.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}: {source}.")
    found: list[tuple[str, Row]] = []
    try:
        rows = csv.reader(io.StringIO(read_text(path)))
        columns = tuple(name.strip() for name in next(rows, ()))
        for number, cells in enumerate(rows, start=2):
            if not any(cell.strip() for cell in cells):
                continue
            where = f"{path}, row {number}"
            if len(cells) != len(columns):
                raise ValueError(f"{where}: has {len(cells)} cells for {len(columns)} columns: {source}.")
            found.append((where, dict(zip(columns, cells, strict=True))))
    except csv.Error as error:
        raise ValueError(
            f"{path}, row {len(found) + 2}: cannot be read as CSV ({error}): {source}; a quote may be missing."
        ) from error
    if twice := [name for name in dict.fromkeys(columns) if columns.count(name) > 1]:
        raise ValueError(f"{path}: names the column {twice[0]!r} twice: {source}.")
    if missing := [name for name in needed if name not in columns]:
        raise ValueError(f"{path}: lacks the columns {', '.join(missing)}, it has {', '.join(columns)}: {source}.")
    if not found:
        raise ValueError(f"{path}: has no row below its header: {source}.")
    return columns, found
