"""`flowrl reward score`: values of rewards for a folder of images."""

from __future__ import annotations

import argparse
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import (
    add_batch_size,
    add_device,
    add_out,
    add_prompts,
    add_reward,
    option_pairs,
)
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl reward score` takes."""
    parser.description = "Score the images of a folder; print a table and write one line per image."
    add_reward(parser, "rewards", "REWARD[,REWARD...]|CONFIG", "rewards")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of images, in any layout or GenEval's")
    add_prompts(parser)
    add_out(parser, ".csv or .jsonl file to write", Path("scores.csv"))
    add_batch_size(parser, "16")
    add_device(parser)


def run(parsed: argparse.Namespace) -> int:
    """Scores a folder, writes the file, prints the table; returns 0, or 1 if a reward failed on every image."""
    found = flowrl.score(**{**vars(parsed), "options": option_pairs(parsed.options)})
    print(f"{found.text}\nwrote {found.file}")
    return int(bool(found.failed))
