"""Arguments of `flowrl report`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl report` takes."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="run folder, finished or not")
    parser.add_argument("--out", type=Path, metavar="PATH", help="file to write (default: RUN/report.html)")
