"""`flowrl sweep`: one tuned model under many RLG scales, beside search at equal cost, as a table and a page."""

from __future__ import annotations

import argparse
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import add_sampling_arguments, count
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl sweep` takes."""
    add = parser.add_argument
    parser.description = (
        "Draw the same prompts at several scales of guidance from the base to the tuned model, beside search at equal "
        "cost, and write sweep.json and sweep.html. The same command resumes where it stopped."
    )
    add("model", metavar="RUN|LORA", help="run folder, or LoRA folder (which may need --base)")
    add("--base", metavar="MODEL", help="base model: a folder, hub id or asset:NAME (default: the run's)")
    add(
        "--rlg",
        default="0,0.5,1,1.5,2,3",
        metavar="SCALES",
        help="scales: 0 is the base, 1 the tuned model, beyond 1 further, below 0 away (default: 0,0.5,1,1.5,2,3)",
    )
    add("--best-of", default="", metavar="LIST", help="numbers of images to choose from, such as 2,4,8")
    add(
        "--prune",
        action="append",
        default=[],
        metavar="N@STEPS",
        help="search that prunes N images after these steps, such as 8@3,6; may be repeated",
    )
    add("--keep", type=float, default=0.5, metavar="X", help="share each pruning keeps (default: 0.5)")
    add("--select", metavar="REWARD", help="reward that search selects by, NAME[:PART] (default: the first target)")
    add("--search-rlg", default="1", metavar="SCALES", help="scales that search draws at (default: 1)")
    add(
        "--also",
        action="append",
        default=[],
        metavar="RUN|LORA",
        help="another tuned model of the same base, drawn at scale 1; may be repeated",
    )
    add("--prompts", metavar="FILE", help="file of prompts or asset:NAME (default: the run's held-out prompts)")
    add(
        "--num-prompts",
        type=count,
        default=64,
        metavar="N",
        help="number of prompts, spread evenly over the file (default: 64)",
    )
    add("--samples", type=count, default=4, metavar="N", help="images per prompt, 2 or more (default: 4)")
    add(
        "--rewards",
        metavar="LIST",
        help="rewards by role: target=NAME[:PART],heldout=NAME[:PART],...; the first of each is drawn, the others are "
        "in the tables (default for embedded models: "
        "target=geneval:official,heldout=attributes,target=geneval:graded)",
    )
    add("--option", dest="options", action="append", default=[], metavar="KEY=VALUE",
        help="option of a reward, as NAME.KEY=VALUE; may be repeated")  # fmt: skip
    add(
        "--features",
        choices=("attributes", "clip", "dinov2", "none"),
        help="what diversity compares besides pixels (default: attributes for embedded models, else clip)",
    )
    add("--out", type=Path, metavar="PATH", help="folder to write (default: RUN/sweep or sweep-LORA)")
    add_sampling_arguments(parser, batch_size="24", base_guidance=True, cache=True)


def run(parsed: argparse.Namespace) -> int:
    """Measures, and prints the sentence and a line per setting."""
    found = flowrl.sweep(**vars(parsed))
    print(f"{found}\n\nPage      {found.folder / 'sweep.html'}\nNumbers   {found.folder / 'sweep.json'}")
    return 0
