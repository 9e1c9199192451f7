"""`flowrl train`: trains a model and prints the result."""

from __future__ import annotations

import argparse

import flowrl
from flowrl.commands.sampling_arguments import config_and_settings
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl train` takes."""
    parser.description = (
        "Train a model with reinforcement learning. Without CONFIG it trains the embedded model, in 7 to 15 "
        "minutes on two cores. resume=RUN continues a run with its own configuration. "
        "'flowrl list keys' lists every key, 'flowrl list keys sampler' those of a section, "
        "'flowrl list configs' the configurations that ship."
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        default=[],
        metavar="[CONFIG] key=value",
        help="CONFIG: a YAML file, or the name of one that ships with flowrl; key=value: a setting that replaces the "
        "file's, such as num_iterations=10",
    )
    parser.add_argument(
        "--card",
        metavar="GB",
        help="memory of one card, such as 24 or 80, or 4090: make the changes of 'flowrl plan --card GB'",
    )


def run(parsed: argparse.Namespace) -> int:
    """Trains; returns 0 if the run has finished, 130 if it was interrupted."""
    config, settings = config_and_settings(parsed.arguments, flowrl.train)
    trained = flowrl.train(config, card=parsed.card, **settings)
    if trained.summary:
        print(trained.summary)
    return 0 if trained.finished else 130
