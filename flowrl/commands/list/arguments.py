"""Arguments of `flowrl list`; nothing heavy is imported here."""

from __future__ import annotations

import argparse

KINDS = ("configs", "rewards", "methods", "families", "benchmarks", "keys")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl list` takes."""
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=f"what to list: {', '.join(KINDS)}")
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of them, or a section of keys, in full")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of lines")
