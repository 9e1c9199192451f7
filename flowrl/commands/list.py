"""`flowrl list KIND [NAME]`: lists the choices, as the code has them."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from flowrl.rendering.terminal_text import COLUMNS, cut
from flowrl.runtime.scrubbing import say as print

if TYPE_CHECKING:
    from flowrl.planning.catalogue import CatalogueEntry

KINDS = ("configs", "rewards", "methods", "families", "benchmarks", "keys")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl list` takes."""
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=f"what to list: {', '.join(KINDS)}")
    parser.add_argument("name", nargs="?", metavar="NAME", help="show one of them, or a section of keys, in full")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of lines")


def run(parsed: argparse.Namespace) -> int:
    """Prints a line for each, cut at a terminal's width, or one in full. Raises ValueError: none has that name."""
    from flowrl.planning.catalogue import entries, missing_name

    found = entries(parsed.kind)
    if parsed.name is not None:
        below = [entry for entry in found if entry.name.startswith(f"{parsed.name}.")]
        own = [entry for entry in found if entry.name == parsed.name]
        if not own:
            raise ValueError(missing_name(parsed.kind, parsed.name, found))
        if parsed.json:
            print(json.dumps(list(map(_plain, own + below)), indent=2, ensure_ascii=False))
            return 0
        for number, entry in enumerate(own):
            print(f"\n{entry.name}" if number else entry.name)
            for word, text in entry.more:
                print(f"  {word}:")
                for line in text.split("\n"):
                    print(textwrap.fill(line, COLUMNS - 4, initial_indent="    ", subsequent_indent="    "))
        if below:
            print(f"\n{_lines(below)}")
    elif parsed.json:
        print(json.dumps(list(map(_plain, found)), indent=2, ensure_ascii=False))
    else:
        print(_lines(found))
        print(f"\n'flowrl list {parsed.kind} NAME' says more of one.")
    return 0


def _lines(found: list[CatalogueEntry]) -> str:
    width = min(max(len(entry.name) for entry in found), 34)
    room = shutil.get_terminal_size((COLUMNS, 0)).columns if sys.stdout.isatty() else sys.maxsize
    lines = []
    for group, inside in itertools.groupby(found, key=lambda entry: entry.group):
        indent = "  " if group else ""
        lines += [group] if group else []
        lines += [cut(f"{indent}{entry.name:<{width}}  {entry.text}".rstrip(), room) for entry in inside]
    return "\n".join(lines)


def _plain(entry: CatalogueEntry) -> dict[str, str]:
    return {"name": entry.name, "text": entry.text, **dict(entry.more)}
