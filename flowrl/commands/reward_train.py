"""`flowrl reward train PAIRS.jsonl`: a preference head on frozen features."""

from __future__ import annotations

import argparse

from flowrl.commands.sampling_arguments import add_pairs
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl reward train` takes."""
    parser.description = "Train a preference head on frozen features, for the reward preference_head."
    add_pairs(parser)
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings, such as backbone=clip head=mlp"
    )


def run(parsed: argparse.Namespace) -> int:
    """Trains a head, prints how well it predicts pairs held out; returns 0."""
    from flowrl.pretraining.train_head import head_config, summary, train_head

    config = head_config(parsed.overrides)
    print(summary(train_head(parsed.pairs, config)))
    print(f"wrote {config.out}; in a configuration: {{name: preference_head, options: {{model: {config.out}}}}}")
    return 0
