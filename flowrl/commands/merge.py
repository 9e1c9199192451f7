"""`flowrl merge`: merges a LoRA, or several, into the weights of its base model."""

from __future__ import annotations

import argparse
from pathlib import Path

import flowrl
from flowrl.runtime.scrubbing import say as print

NOTABLE = 0.01
"""Share of the LoRA's change lost to rounding from which the output says what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl merge` takes."""
    add = parser.add_argument
    add("model", metavar="RUN", help="run folder, or folder of a LoRA")
    add("out", type=Path, metavar="OUT", help="new folder for the merged model")
    add("--also", nargs="+", default=(), metavar="RUN|LORA", help="further LoRAs on the same base, to add to the first")
    add("--weights", nargs="+", type=float, metavar="W", help="of each LoRA, RUN first (default: their average)")
    add("--base", metavar="MODEL", help="stock folder to merge into (default: the files of the run's own base)")
    unquantised = "for a run over quantised weights: merge into the base as it is on disk"
    add("--unquantised", action="store_true", help=unquantised)


def run(parsed: argparse.Namespace) -> int:
    """Merges, and prints the loss to rounding."""
    done = flowrl.merge(**vars(parsed))
    print(f"wrote {done.folder}: {done.layers} layers changed, in {' and '.join(done.dtypes)}")
    print(f"rounding to that dtype lost {done.lost:.2%} of the LoRA's change")
    if done.lost > NOTABLE:
        print("more is kept by a base in float32 (--base FOLDER), and all of it by base and LoRA apart")
    if done.variant is not None:
        print(f"open it with variant={done.variant!r}, as the base")
    return 0
