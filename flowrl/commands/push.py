"""`flowrl push`: a model card beside the LoRA and its images, in a folder or on the hub."""

from __future__ import annotations

import argparse
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import add_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl push` takes."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder")
    add("folder", type=Path, nargs="?", metavar="FOLDER", help="where card, LoRA and images go (default: RUN/share)")
    add("--dry-run", action="store_true", help="list the files and their sizes; write and send nothing")
    add("--eval", dest="results", action="append", default=[], metavar="RESULT",
        help="finished flowrl eval of this model, for the card's numbers; may be repeated")  # fmt: skip
    add("--base", metavar="MODEL", help="hub id of the base model, if the run names a folder")
    add("--licence", metavar="ID", help="licence of the LoRA, as the hub calls it (default: what the base demands)")
    add_count(parser, "--pairs", 4, "pairs of images before and after")
    hub = parser.add_argument_group("the hub").add_argument
    hub("--to", metavar="OWNER/NAME", help="upload the listed files to this repository, private unless --public")
    hub("--public", action="store_true", help="let everybody see the repository")
    hub("--update", action="store_true", help="add to an existing repository")


def run(parsed: argparse.Namespace) -> int:
    """Lists, writes, uploads."""
    flowrl.push(**vars(parsed))
    return 0
