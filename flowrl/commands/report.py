"""`flowrl report`: one self-contained page about a run."""

from __future__ import annotations

import argparse
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import add_out
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl report` takes."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="run folder, finished or not")
    add_out(parser, "file to write", "RUN/report.html")


def run(parsed: argparse.Namespace) -> int:
    """Writes the report and prints its path."""
    print(f"wrote {flowrl.report(**vars(parsed))}")
    return 0
