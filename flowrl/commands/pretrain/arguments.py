"""Arguments of `flowrl pretrain`; nothing heavy is imported here."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl pretrain` takes."""
    parser.description = (
        "Make one of the models that ship with flowrl from scratch, in tens of minutes on two cores. The same command "
        "resumes where it stopped."
    )
    parser.add_argument(
        "arguments", nargs="*", default=[], metavar="[WHAT] key=value",
        help="WHAT: sd3 (default), sd15, wan, kontext, scorer, the embedded world's differentiable reward, or prompts, "
        "the lists in assets/prompts; key=value: a setting",
    )  # fmt: skip
