"""Arguments of `flowrl bench`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.commands.sampling_arguments import count
from flowrl.profiling.bench_result import SECTIONS

REPEATS = 5
MINUTES = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl bench` takes."""
    parser.description = (
        "Time the phases of a training iteration on this machine, beside what the machine could reach. Without CONFIG "
        "the embedded model is measured. Published checkpoints that are not in the hub's cache are built on random "
        "weights of their real dimensions: nothing is downloaded."
    )
    add = parser.add_argument
    add("arguments", nargs="*", default=[], metavar="[CONFIG] key=value",
        help="as for flowrl train: a YAML file or the name of a shipped one, and settings that replace its"
    )  # fmt: skip
    add("--random-weights", action="store_true", help="random weights even where the checkpoint is here")
    add("--layers", type=count, metavar="N",
        help="random weights with at most N blocks of each kind, to try a large family on a small machine")  # fmt: skip
    add("--repeats", type=count, metavar="N", help=f"repeats of a phase (default: {REPEATS})")
    add("--minutes", type=float, metavar="M",
        help=f"phases that would begin after this are left out and named (default: {MINUTES:g})")  # fmt: skip
    add("--phases", metavar="LIST", help=f"only these, of {','.join(SECTIONS)} (default: all)")
    add(
        "--out",
        type=Path,
        metavar="PATH",
        help="folder of bench.json and bench.html (default: runs/bench-<config>-<n>)",
    )
    add("--compare", nargs=2, metavar="RESULT",
        help="set two benches beside each other, folders or bench.json files, and measure nothing")  # fmt: skip
