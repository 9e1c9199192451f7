"""`flowrl reward rubric PAIRS.jsonl`: rules that explain preferences."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import add_count, add_device, add_out, add_pairs, add_seed
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl reward rubric` takes."""
    parser.description = "Let a judge propose rules that explain pairs of images; keep those a regression needs."
    add_pairs(parser)
    add = parser.add_argument
    add(
        "--judge",
        required=True,
        metavar="JUDGE",
        help="judge that proposes and answers: '{server: URL, model: NAME}', '{model: FOLDER_OR_HUB_ID}' to run it "
        "here, or a YAML file with such a mapping",
    )
    add_out(parser, "rubric to write", Path("rubric.json"))
    add_count(parser, "--top", 20, "maximum number of rules to keep")
    add("--penalty", type=float, default=0.01, metavar="X", help="l1 penalty; higher keeps fewer rules (default: 0.01)")
    add_count(parser, "--rounds", 3, "rounds of proposing, later ones for hard pairs")
    add_seed(parser)
    add_device(parser)


def run(parsed: argparse.Namespace) -> int:
    """Trains a rubric (AutoRubric-T2I), prints its rules and how well they predict pairs held out; returns 0."""
    done = flowrl.rubric(**vars(parsed))
    for rule in done.rules:
        print(f"{rule.weight:6.2f}  {rule.text}")
    held_out = "" if math.isnan(done.held_out_accuracy) else f", of pairs held out {done.held_out_accuracy:.2f}"
    print(f"{len(done.rules)} of {done.num_candidates} rules; accuracy {done.accuracy:.2f}{held_out}")
    print(f"wrote {done.path}: {{name: rubric, options: {{rules: {done.path}, judge: ...}}}}")
    return 0
