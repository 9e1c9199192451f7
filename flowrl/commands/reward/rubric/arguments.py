"""Arguments of `flowrl reward rubric`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.commands.reward.shared_arguments import add_pairs
from flowrl.commands.sampling_arguments import add_device, add_seed, count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl reward rubric` takes."""
    parser.description = "Let a judge propose rules that explain pairs of images; keep those a regression needs."
    add_pairs(parser)
    add = parser.add_argument
    add("--judge", required=True, metavar="JUDGE",
        help="who proposes and answers: '{server: URL, model: NAME}', '{model: FOLDER_OR_HUB_ID}' to run it here, or "
        "a YAML file with such a mapping")  # fmt: skip
    add("--out", type=Path, default=Path("rubric.json"), metavar="PATH", help="rubric to write (default: rubric.json)")
    add("--top", type=count, default=20, metavar="N", help="rules to keep at most (default: 20)")
    add("--penalty", type=float, default=0.01, metavar="X", help="l1 penalty; higher keeps fewer rules (default: 0.01)")
    add(
        "--rounds",
        type=count,
        default=3,
        metavar="N",
        help="rounds of proposing, later ones for hard pairs (default: 3)",
    )
    add_seed(parser)
    add_device(parser)
