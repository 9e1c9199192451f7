"""`flowrl reward card`: measures how far you can trust a reward for training."""

from __future__ import annotations

import argparse
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import (
    add_count,
    add_out,
    add_prompts,
    add_reward,
    add_sampling_arguments,
    option_pairs,
)
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl reward card` takes."""
    add = parser.add_argument
    parser.description = (
        "Measure how far a reward can be trusted to train on: the same images again, JPEG, resizing, a judge's order, "
        "other rewards, cost. Writes card.json and card.html."
    )
    add_reward(parser, "reward", "REWARD|CONFIG", "reward to examine,")
    add("folder", type=Path, nargs="?", metavar="FOLDER", help="folder of images, several per prompt (or --model)")
    add_prompts(parser)
    add("--with", dest="others", default="", metavar="REWARDS", help="other rewards to compare with")
    add("--perturb", default="all", metavar="NAMES", help="changes of images to test, all or none (default: all)")
    add_out(parser, "folder to write", "reward-card-NAME")
    add(
        "--model",
        metavar="MODEL",
        help="model that draws the images for --prompts: run folder, LoRA or model folder, hub id or asset:NAME",
    )
    add_count(parser, "--num-prompts", 24, "number of prompts, spread evenly over the file")
    add_count(parser, "--samples", 8, "images per prompt")
    add_sampling_arguments(parser, batch_size="16")


def run(parsed: argparse.Namespace) -> int:
    """Measures a reward, writes its card, prints the table; returns 0."""
    made = flowrl.reward_card(**{**vars(parsed), "options": option_pairs(parsed.options)})
    print(f"{made.text}\nwrote {made.folder / 'card.json'} and card.html")
    return 0
