"""Does DPO learn more in more rounds, each from a new reference (arXiv 2505.17017, iterative DPO)?

    python tests/trials/claims/dpo_rounds.py runs/dpo_rounds --out docs/research/claims/dpo_rounds.json

`tiny_dpo` for 18 iterations with three seeds: its reference draws the images, and becomes a copy of the policy at every
sixth iteration, where 240 held-out images are scored. Decided before any was trained: `three_over_one` is the score
after the third round less that after the first, `three_over_two` less that after the second.

Several processes with one folder share the trainings, as in `recipe_search.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recipe_search import curve, origin, train, wait_for

from flowrl.runs.run_data import read_run
from flowrl.runtime.files import write_atomically

SEEDS = (0, 1, 2)
SETTINGS = ["tiny_dpo", "optim.lr=2e-3", "num_iterations=18", "eval_every=6", "eval.num_prompts=240", "threads=1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    runs = [given.runs.resolve() / f"s{seed}" for seed in SEEDS]
    for seed, run in zip(SEEDS, runs, strict=True):
        train(run, SETTINGS, seed)
    wait_for(runs)
    curves = [curve(read_run(run)) for run in runs]
    effects = {
        f"three_over_{word}": {"per_seed": [found[3][2] - found[place][2] for found in curves]}
        for place, word in ((1, "one"), (2, "two"))
    }
    written = origin() | {"settings": " ".join(SETTINGS), "curves": curves, "effects": effects}
    write_atomically(given.out, json.dumps(written, indent=1) + "\n")
    print(json.dumps(effects, indent=1))


if __name__ == "__main__":
    main()
