"""Arguments of `flowrl reward realism`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl reward realism` takes."""
    parser.description = "Print how far a run's images are from drawn scenes of the embedded world, before and after."
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folder that kept all evaluation images (eval.num_images)"
    )
