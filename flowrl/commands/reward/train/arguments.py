"""Arguments of `flowrl reward train`; nothing heavy is imported here."""

from __future__ import annotations

import argparse

from flowrl.commands.reward.shared_arguments import add_pairs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl reward train` takes."""
    parser.description = "Train a preference head on frozen features, for the reward preference_head."
    add_pairs(parser)
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings, such as backbone=clip head=mlp"
    )
