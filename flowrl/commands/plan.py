"""`flowrl plan CONFIG`: what a run will do and need, before anything is downloaded."""

from __future__ import annotations

import argparse
import sys

import flowrl
from flowrl.commands.sampling_arguments import count, settings_for
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl plan` takes."""
    add = parser.add_argument
    add("config", metavar="CONFIG", help="a YAML file, or the name of one that ships with flowrl")
    add("overrides", nargs="*", default=[], metavar="key=value", help="settings that replace the file's")
    add(
        "--processes",
        type=count,
        metavar="N",
        help="processes (GPUs) of the run (default: those of parallel.replicate copies of the model, or of one)",
    )
    add(
        "--card",
        type=count,
        metavar="GB",
        help="whether and with which settings the run fits a card of so many GB, such as 24, 40, 48, 80 or 141 "
        "(default: the card in a preset's name, else the smallest that holds the run as it is)",
    )
    add("--bench", metavar="FILE", help="a bench.json of flowrl bench, or its folder, whose pace hours are reckoned by")
    add(
        "--tflops",
        type=float,
        metavar="X",
        help="sustained TFLOP/s of one GPU, used to estimate the hours (default: what flowrl bench measured here, else "
        "a range for each of some GPUs)",
    )


def run(parsed: argparse.Namespace) -> int:
    """Prints the plan; returns 1 where `flowrl train` would refuse the configuration."""
    from flowrl.cli import in_flags
    from flowrl.planning.plan import RefusedError

    options = {name: getattr(parsed, name) for name in ("card", "processes", "tflops", "bench")}
    try:
        made = flowrl.plan(parsed.config, **options, **settings_for(parsed.overrides, flowrl.plan))
    except RefusedError as error:
        for reason in error.reasons:
            print(f"flowrl: {reason}", file=sys.stderr)
        return 1
    print(in_flags(made.text, "plan"))
    return 0
