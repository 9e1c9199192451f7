"""Arguments of `flowrl plan`; nothing heavy is imported here."""

from __future__ import annotations

import argparse

from flowrl.commands.sampling_arguments import count

DEFAULT_TFLOPS = 300.0
"""Sustained TFLOP/s of one GPU by which hours are estimated: what an H100 or H200 reaches on large batches in bfloat16
without fused kernels."""


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
        "--card", type=count, metavar="GB", help="what makes the run fit a card of so many GB (default: 24, 40 and 80)"
    )
    parser.add_argument(
        "--tflops", type=float, metavar="X",
        help="sustained TFLOP/s of one GPU, used to estimate the hours (default: what flowrl bench measured here, else "
        f"{DEFAULT_TFLOPS:g})",
    )  # fmt: skip
