"""`flowrl watch`: serves a local, read-only page about active and finished runs."""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_PORT = 8191


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl watch` takes."""
    parser.description = (
        "Show running and finished runs on a page in the browser of this machine, until Ctrl-C. It only reads. See "
        "docs/watching.md."
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, default=[Path("runs")], metavar="RUNS",
        help="run folders, or folders that contain runs (default: runs)")  # fmt: skip
    add("--port", type=int, default=DEFAULT_PORT, metavar="N", help=f"port, 0 for a free one (default: {DEFAULT_PORT})")


def run(parsed: argparse.Namespace) -> int:
    """Serves the page until a signal."""
    from flowrl.pages.live.watch import watch

    watch(**vars(parsed))
    return 0
