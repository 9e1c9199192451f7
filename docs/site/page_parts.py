"""Parts of a page that a command writes: between `<!-- name -->` and `<!-- /name -->`, everything else by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowrl.files import write_atomically


def fill(page: Path, name: str, text: str) -> None:
    """Puts a text between a page's two marks of that name.

    Raises:
        ValueError: the page has no such marks, or more than one pair.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, *rest = page.read_text(encoding="utf-8").split(begin)
    held = rest[0].split(end) if len(rest) == 1 else []
    if len(held) != 2:
        raise ValueError(f"{page} must hold {begin.strip()} and {end.strip()} once, on lines of their own")
    write_atomically(page, before + begin + text.strip() + "\n" + end + held[1])


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0) -> str:
    """A Markdown table whose last `right` columns are numbers."""
    align = [":--"] * (len(head) - right) + ["--:"] * right
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, align, *rows))
