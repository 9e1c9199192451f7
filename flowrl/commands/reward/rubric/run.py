"""`flowrl reward rubric PAIRS.jsonl`: rules that explain preferences, found by a judge and weighed by regression."""

from __future__ import annotations

import argparse
import math
import re

from flowrl.evaluation.named_judges import read_judge
from flowrl.generation.drawing import find_device
from flowrl.rewards.judges.autorubric import RubricTraining, train_rubric
from flowrl.runtime.files import refuse_foreign
from flowrl.runtime.scrubbing import say as print

_RUBRIC = re.compile(r'"info": \{\s*"')
"""What it notes of how it found the rules; those written by hand have no such notes."""


def run(parsed: argparse.Namespace) -> int:
    """Trains a rubric (AutoRubric-T2I), prints its rules and how well they predict pairs held out.

    Raises:
        ValueError: bad pairs or settings, a judge that cannot be asked, or no rule that helps.
    """
    options = RubricTraining(
        judge=read_judge(parsed.judge, {}, owner="reward rubric"),
        rounds=parsed.rounds,
        penalty=parsed.penalty,
        top=parsed.top,
        seed=parsed.seed,
    )
    refuse_foreign(parsed.out, own=_RUBRIC)
    done = train_rubric(parsed.pairs, parsed.out, options, device=find_device(parsed.device))
    for rule in done.rules:
        print(f"{rule.weight:6.2f}  {rule.text}")
    held_out = "" if math.isnan(done.held_out_accuracy) else f", of pairs held out {done.held_out_accuracy:.2f}"
    print(f"{len(done.rules)} of {done.num_candidates} rules; accuracy {done.accuracy:.2f}{held_out}")
    print(f"wrote {done.path}: {{name: rubric, options: {{rules: {done.path}, judge: ...}}}}")
    return 0
