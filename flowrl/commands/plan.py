"""`flowrl plan CONFIG`: plans what a run will do and need, before anything is downloaded."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import count, settings_for
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl plan` takes."""
    add = parser.add_argument
    add("config", metavar="CONFIG", help="a YAML file, the name of one that ships, or a model for its first run")
    add("overrides", nargs="*", default=[], metavar="key=value", help="settings that replace the file's")
    copies = "processes (GPUs) of the run (default: enough for parallel.replicate copies of the model, or for one)"
    add("--processes", type=count, metavar="N", help=copies)
    add(
        "--card",
        metavar="GB",
        help="say whether, and with which settings, the run fits a card of GB memory, such as 24 or 80, or 4090 "
        "(default: the card in a preset's name, else the smallest that holds the run unchanged)",
    )
    add("--cards", metavar="NxGB", help="both: N cards of GB memory each, such as 8x80 or 8xH100")
    add("--hours", type=float, metavar="H", help="plan a run that ends within H hours, and print its YAML")
    add("--out", type=Path, metavar="PATH", help="with --hours: write that YAML to a file, and print the plan")
    add("--price", type=float, metavar="X", help="price of one card per hour, to estimate the cost")
    add("--long", action="store_true", help="print everything: memory, network evaluations, cost, disk")
    add("--bench", metavar="FILE", help="a bench.json of flowrl bench, or its folder, whose pace sets the hours")
    add(
        "--tflops",
        type=float,
        metavar="X",
        help="sustained TFLOP/s of one GPU, for the hours (default: as flowrl bench measured, else a range of GPUs)",
    )


def run(parsed: argparse.Namespace) -> int:
    """Prints the plan; returns 1 if `flowrl train` would refuse the configuration."""
    from flowrl.cli import in_flags
    from flowrl.planning.plan import RefusedError

    options = {name: getattr(parsed, name) for name in vars(parsed).keys() - {"config", "overrides"}}
    try:
        made = flowrl.plan(parsed.config, **options, **settings_for(parsed.overrides, flowrl.plan))
    except RefusedError as error:
        for reason in error.reasons:
            print(f"flowrl: {reason}", file=sys.stderr)
        return 1
    print(in_flags(made.text, "plan") if made.configuration is None or parsed.out else made.configuration)
    return 0
