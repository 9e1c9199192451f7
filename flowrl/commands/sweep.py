"""`flowrl sweep`: one tuned model under many RLG scales, beside search at equal cost, as a table and a page."""

from __future__ import annotations

import argparse

import flowrl
from flowrl.commands.sampling_arguments import add_count, add_out, add_sampling_arguments, add_several
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
    add_several(parser, "--prune", "N@STEPS", "search that prunes N images after these steps, such as 8@3,6")
    add("--keep", type=float, default=0.5, metavar="X", help="share each pruning keeps (default: 0.5)")
    add("--select", metavar="REWARD", help="reward that search selects by, NAME[:PART] (default: the first target)")
    add("--search-rlg", default="1", metavar="SCALES", help="scales that search draws at (default: 1)")
    add_several(parser, "--also", "RUN|LORA", "another tuned model of the same base, drawn at scale 1")
    add("--prompts", metavar="FILE", help="file of prompts or asset:NAME (default: the run's held-out prompts)")
    add_count(parser, "--num-prompts", 64, "number of prompts, spread evenly over the file")
    add_count(parser, "--samples", 4, "images per prompt, 2 or more")
    add(
        "--rewards",
        metavar="LIST",
        help="rewards by role: target=NAME[:PART],heldout=NAME[:PART],...; the first of each is drawn, the others are "
        "in the tables (default for embedded models: "
        "target=geneval:official,heldout=attributes,target=geneval:graded)",
    )
    add_several(parser, "--option", "KEY=VALUE", "option of a reward, as NAME.KEY=VALUE", dest="options")
    add(
        "--features",
        choices=("attributes", "clip", "dinov2", "none"),
        help="what diversity compares besides pixels (default: attributes for embedded models, else clip)",
    )
    add_out(parser, "folder to write", "RUN/sweep or sweep-LORA")
    add_sampling_arguments(parser, batch_size="24", base_guidance=True, cache=True)


def run(parsed: argparse.Namespace) -> int:
    """Measures, and prints the sentence and a line per setting."""
    found = flowrl.sweep(**vars(parsed))
    print(f"{found}\n\nPage      {found.folder / 'sweep.html'}\nNumbers   {found.folder / 'sweep.json'}")
    return 0
