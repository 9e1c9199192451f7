"""Arguments of `flowrl merge`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl merge` takes."""
    parser.add_argument("model", metavar="RUN", help="run folder, or folder of a LoRA")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the merged model, which is not there yet")
    parser.add_argument("--base", metavar="MODEL",
                        help="stock folder to merge into (default: the files of the run's own base)")  # fmt: skip
    parser.add_argument("--unquantised", action="store_true",
                        help="of a run over quantised weights: merge into the base as it is on disk")  # fmt: skip
