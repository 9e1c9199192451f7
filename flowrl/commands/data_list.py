"""`flowrl data list [NAME]`: lists the prompt sets of configurations, their publishers, and how to fetch them."""

from __future__ import annotations

import argparse

from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl data list` takes."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show one set in full")


def run(parsed: argparse.Namespace) -> int:
    """Prints a line for each set, or one set in full. Raises ValueError: there is no set of that name."""
    from flowrl.migrating.prompt_sets import in_full, lines

    for line in lines() if parsed.name is None else in_full(parsed.name):
        print(line)
    return 0
