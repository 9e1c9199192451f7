"""Arguments of `flowrl train`; nothing heavy is imported here."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl train` takes."""
    parser.description = (
        "Train a model with reinforcement learning. Without CONFIG the embedded model is trained, in a few minutes on "
        "two cores. resume=RUN continues a run with its own configuration. "
        "'flowrl list keys' names every key, 'flowrl list keys sampler' those of a section, "
        "'flowrl list configs' the configurations that ship."
    )
    parser.add_argument(
        "arguments", nargs="*", default=[], metavar="[CONFIG] key=value",
        help="CONFIG: a YAML file, or the name of one that ships with flowrl; key=value: a setting that replaces the "
        "file's, such as num_iterations=10",
    )  # fmt: skip
