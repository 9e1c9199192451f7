"""What the default recipe needs to nine tenths of Flow-GRPO's gain, and where it ends: five seeds.

    python tests/trials/claims/default_recipe.py runs/default --out docs/research/claims/default_recipe.json

Trains `tiny_recommended` as shipped, measured on the held-out prompts at every ninth iteration, and sets it beside the
five trainings of Flow-GRPO in docs/research/methods/recipe.json. These were timed on another machine, so
Flow-GRPO's first iterations are timed here, in float32 as the default trains, and its curves' seconds are taken in
proportion. The effect for docs/research/claims.md is the score after nine iterations, 27,000 evaluations, less
Flow-GRPO's after nine, 41,000, seeds taken in order; it was fixed when three of the five trainings were known.

Several processes with one folder share the trainings, as in `recipe_search.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recipe_search import BASE, Evaluations, curve, origin, ratio, train, wait_for

from flowrl.runs.run_data import read_run
from flowrl.runtime.files import write_atomically

NAME, SEEDS = "tiny_recommended", (101, 102, 103, 104, 105)
PACE = ["tiny_flow_grpo", "optim.lr=2e-3", "num_iterations=6", "eval_every=0", "threads=1"]
FORMER = Path("docs/research/methods/recipe.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folder = given.runs.resolve()
    runs, timed = [folder / f"{NAME}-s{seed}" for seed in SEEDS], folder / "pace"
    for seed, run in zip(SEEDS, runs, strict=True):
        train(run, [NAME, "threads=1", "eval_every=9"], seed)
    train(timed, PACE, 0)
    wait_for([*runs, timed])

    former: list[Evaluations] = json.loads(FORMER.read_text(encoding="utf-8"))["curves"][BASE]
    first, *_, last = read_run(timed).train  # the first iteration warms up
    here = (last["seconds/total"] - first["seconds/total"]) / (last["nfe/total"] - first["nfe/total"])
    there = sum(run[-1][1] for run in former) / sum(run[-1][0] for run in former)
    baseline = [[(nfe, seconds * here / there, score) for nfe, seconds, score in run] for run in former]
    curves = {BASE: baseline, NAME: [curve(read_run(run)) for run in runs]}
    written = origin() | {
        "seeds": {NAME: list(SEEDS)}, "pace": {"here": here, "there": there}, "curves": curves,
        "fewer": {NAME: ratio(curves, NAME, 0)}, "faster": {NAME: ratio(curves, NAME, 1)},
        "effects": {"ninth_iteration": {"per_seed": [
            own[1][2] - other[1][2] for own, other in zip(curves[NAME], baseline, strict=True)
        ]}},
    }  # fmt: skip
    write_atomically(given.out, json.dumps(written, indent=1) + "\n")
    print(json.dumps({key: written[key] for key in ("pace", "fewer", "faster")}, indent=1))


if __name__ == "__main__":
    main()
