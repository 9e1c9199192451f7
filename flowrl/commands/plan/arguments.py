"""Arguments of `flowrl plan`; nothing heavy is imported here."""

from __future__ import annotations

import argparse

DEFAULT_TFLOPS = 300.0
"""Sustained TFLOP/s of one GPU that hours are reckoned with: what an H100 or H200 reaches on large batches in bfloat16
without fused kernels."""


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Puts the arguments of `flowrl plan` on its parser; `flowrl.commands.plan.run.plan` takes what it parses."""
    parser.add_argument("config", help="a YAML file, or the name of one that ships with flowrl")
    parser.add_argument("arguments", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes (GPUs) of the run (1)")
    parser.add_argument(
        "--tflops", type=float, default=DEFAULT_TFLOPS, metavar="X",
        help=f"sustained TFLOP/s of one GPU that hours are reckoned with ({DEFAULT_TFLOPS:g})",
    )  # fmt: skip
