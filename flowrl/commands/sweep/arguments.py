"""Arguments of `flowrl sweep`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
import re
from pathlib import Path


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Puts the arguments of `flowrl sweep` on its parser; `flowrl.commands.sweep.run.sweep` takes what it parses."""
    # Else "--rlg -1,0,1" is refused: what begins with a minus and is no single number would pass for an option.
    parser._negative_number_matcher = re.compile(r"^-\.?\d")
    parser.add_argument("source", metavar="RUN|LORA", help="run folder, or LoRA folder (then --base too)")
    parser.add_argument("--base", metavar="MODEL", help="model folder, hub id or asset:NAME (a run's own)")
    parser.add_argument(
        "--rlg", default="0,0.5,1,1.5,2,3", metavar="SCALES",
        help="guidance scales: 0 base, 1 tuned, beyond 1 further, below 0 away (0,0.5,1,1.5,2,3)",
    )  # fmt: skip
    parser.add_argument("--best-of", default="", metavar="NUMBERS", help="also the best of N images, such as 1,2,4,8")
    parser.add_argument(
        "--prune", action="append", default=[], metavar="N@STEPS",
        help="also N images, pruned after these steps: 8@3,6; may be given several times",
    )  # fmt: skip
    parser.add_argument("--keep", type=float, default=0.5, help="share that each pruning keeps (0.5)")
    parser.add_argument("--select", metavar="REWARD", help="NAME[:PART] that search goes by (the first target)")
    parser.add_argument("--search-rlg", default="1", metavar="SCALES", help="scales that search draws from (1)")
    parser.add_argument(
        "--also", action="append", default=[], metavar="RUN|LORA",
        help="another tuned model of the same base, at scale 1; may be given several times",
    )  # fmt: skip
    parser.add_argument("--prompts", metavar="FILE", help=".txt or .jsonl, or asset:NAME (a run's held-out prompts)")
    parser.add_argument("--num-prompts", type=int, default=64, help="prompts, evenly from the file (64)")
    parser.add_argument("--samples", type=int, default=4, help="images a prompt, at least 2 (4)")
    parser.add_argument(
        "--rewards", metavar="LIST",
        help="target=NAME[:PART],heldout=NAME[:PART],...; the first of each is drawn, the others are in the tables "
        "(embedded model: target=geneval:official,heldout=attributes,target=geneval:graded)",
    )  # fmt: skip
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME.KEY=VALUE", help="option of a reward; may be repeated"
    )
    parser.add_argument(
        "--features", choices=("attributes", "clip", "dinov2", "none"),
        help="what diversity compares beside pixels (embedded model: attributes, else clip)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the start noise, the same at every scale (0)")
    parser.add_argument("--steps", type=int, help="denoising steps (a run's evaluation's, embedded model 10, else 40)")
    parser.add_argument("--guidance", type=float, help="classifier-free guidance (likewise, embedded 3, else 4.5)")
    parser.add_argument("--base-guidance", type=float, help="that of the base model, where it differs")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the network (a run's own)")
    parser.add_argument("--batch-size", type=int, default=24, help="images at once (24)")
    parser.add_argument("--device", help="cpu or cuda (cuda where there is one)")
    parser.add_argument("--out", type=Path, help="folder to write (RUN/sweep, sweep-LORA)")
