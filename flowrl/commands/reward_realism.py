"""`flowrl reward realism RUN ...`: the distance of runs' images to drawn scenes."""

from __future__ import annotations

import argparse
from pathlib import Path

import flowrl
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl reward realism` takes."""
    parser.description = "Print how far a run's images are from drawn scenes of the embedded world, before and after."
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folder that kept all evaluation images (eval.num_images)"
    )


def run(parsed: argparse.Namespace) -> int:
    """Prints, for each run, the distance at its first and last evaluation, and the change; returns 0."""
    print(f"{'run':30} {'before':>7} {'after':>7} {'change (95 %)':>29}")
    for folder in parsed.runs:
        (found,) = flowrl.realism(folder)
        change = found.change
        print(
            f"{folder.name[-30:]:30} {found.before:7.4f} {found.after:7.4f} "
            f"{change.mean:+9.4f} ({change.low:+.4f} to {change.high:+.4f})"
        )
    return 0
