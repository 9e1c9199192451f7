"""`flowrl reward rubric PAIRS.jsonl`: rules that explain preferences, found by a judge and weighed by regression."""

from __future__ import annotations

import argparse
import math

from flowrl.rewards.judges.autorubric import RubricTraining, train_rubric


def rubric(parsed: argparse.Namespace) -> int:
    """Trains a rubric (AutoRubric-T2I), prints its rules and how well they predict pairs held out.

    Raises:
        ValueError: bad pairs or settings, a judge that cannot be asked, or no rule that helps.
    """
    judge = {"model": parsed.model}
    judge |= {} if parsed.server is None else {"server": parsed.server}
    judge |= {} if parsed.key_env is None else {"api_key_env": parsed.key_env}
    if parsed.key_env is not None and parsed.server is None:
        raise ValueError("--key-env is a server's key, but there is no --server: give it, or leave the key out.")
    options = RubricTraining(
        judge=judge, rounds=parsed.rounds, penalty=parsed.penalty, top=parsed.top, seed=parsed.seed
    )
    done = train_rubric(parsed.pairs, parsed.out, options, device=parsed.device)
    for rule in done.rules:
        print(f"{rule.weight:6.2f}  {rule.text}")
    held_out = "" if math.isnan(done.held_out_accuracy) else f", of pairs held out {done.held_out_accuracy:.2f}"
    print(f"{len(done.rules)} of {done.num_candidates} rules; accuracy {done.accuracy:.2f}{held_out}")
    print(f"wrote {done.path}: {{name: rubric, options: {{rules: {done.path}, judge: ...}}}}")
    return 0
