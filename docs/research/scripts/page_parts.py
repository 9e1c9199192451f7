"""Parts of a page that a command writes: between `<!-- name -->` and `<!-- /name -->`, everything else by hand.

    .venv/bin/python docs/research/scripts/page_parts.py PAGE NAME FILE

puts a Markdown file, such as a comparison's compare.md, into a part; its title is left out, its headings become third
ones.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.runtime.files import write_atomically


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


def is_uncommitted(found: Mapping[str, Any]) -> bool:
    """Whether recorded results come from a tree with changes that no commit has: their commit says so, or, where
    `flowrl compare` recorded none, the version of flowrl does, which names the day of such changes."""
    said = [str(found.get("commit", "")), str(found.get("origin", {}).get("commit", ""))]
    said += [str(part.get("commit", "")) for part in found.get("added", ())]
    said += [line for line in found.get("provenance", ()) if line.startswith(("commit: ", "versions: "))]
    return any("-dirty" in text or "not committed" in text or re.search(r"\+g[0-9a-f]+\.d\d{8}", text) for text in said)


def committed(path: Path) -> dict[str, Any]:
    """The results that a file of docs recorded.

    Raises:
        ValueError: they come from an uncommitted tree, so that nobody can make them again.
    """
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if is_uncommitted(found):
        raise ValueError(f"{path} comes from an uncommitted tree: commit, and run its command again")
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0) -> str:
    """A Markdown table whose last `right` columns are numbers."""
    align = [":--"] * (len(head) - right) + ["--:"] * right
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, align, *rows))


def lowered(text: str) -> str:
    """Markdown without its title, second headings made third ones."""
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    return "\n".join(f"#{line}" if line.startswith("## ") else line for line in lines)


if __name__ == "__main__":
    fill(Path(sys.argv[1]), sys.argv[2], lowered(Path(sys.argv[3]).read_text(encoding="utf-8")))
