"""Arguments of `flowrl plan`; nothing heavy is imported here."""

from __future__ import annotations

import argparse

from flowrl.commands.sampling_arguments import count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl plan` takes."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of one that ships with flowrl")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings that replace the file's"
    )
    parser.add_argument(
        "--processes", type=count, metavar="N",
        help="processes (GPUs) of the run (default: those of parallel.replicate copies of the model, or of one)",
    )  # fmt: skip
    parser.add_argument(
        "--card", type=count, metavar="GB",
        help="whether and with which settings the run fits a card of so many GB, such as 24, 40, 48, 80 or 141 "
        "(default: the card in a preset's name, else the smallest that holds the run as it is)",
    )  # fmt: skip
    parser.add_argument(
        "--bench", metavar="FILE", help="a bench.json of flowrl bench, or its folder, whose pace hours are reckoned by"
    )
    parser.add_argument(
        "--tflops", type=float, metavar="X",
        help="sustained TFLOP/s of one GPU, used to estimate the hours (default: what flowrl bench measured here, else "
        "a range for each of some GPUs)",
    )  # fmt: skip
