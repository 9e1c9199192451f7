"""Arguments of `flowrl reward score`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.commands.reward.shared_arguments import add_prompts, add_reward
from flowrl.commands.sampling_arguments import add_batch_size, add_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl reward score` takes."""
    parser.description = "Score the images of a folder; print a table and write one line per image."
    add_reward(parser, "rewards", "REWARD[,REWARD...]|CONFIG", "rewards")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of images, in any layout or GenEval's")
    add_prompts(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("scores.csv"), metavar="PATH",
        help=".csv or .jsonl file to write (default: scores.csv)",
    )  # fmt: skip
    add_batch_size(parser, "16")
    add_device(parser)
