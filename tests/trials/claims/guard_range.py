"""Is GRPO-Guard hacked less where its clip range is in its own units (arXiv 2510.22319)?

    python tests/trials/claims/guard_range.py runs/guard_range --out docs/research/claims/guard_range.json

The judge that likes colour, asked for scores, 24 iterations of two updates: plain clipping (`judge_twice.yaml`) and
Guard (`judge_guard.yaml`). Guard's ratio is normalised, so that the range of plain clipping, 1e-3, is none of its own.
The released settings are 1e-4 for plain clipping and 2e-6 for Guard, and ours scale the first to this world by
sqrt(65536 / 512), the dimensions of a latent there and here; the same factor makes Guard's 2.3e-5. Decided before: the
effect is the true score after the last iteration, Guard's less plain clipping's, by Welch's test, of seeds that were in
no earlier run. `drift` is the distance of velocities from the base.

Several processes with one folder share the trainings, as in `recipe_search.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recipe_search import curve, origin, train, wait_for

from flowrl.runs.run_data import read_run
from flowrl.runtime.files import write_atomically

SEEDS = (21, 22, 23, 24, 25)
COMMON = [
    "pipeline.dtype=bfloat16",
    "eval.batch_size=48",
    "optim.lr=2e-3",
    "threads=1",
    "eval.num_prompts=null",
    "num_iterations=24",
    "eval_every=12",
    "checkpoint_every=100",
]
SIDES = {
    "plain": ["docs/research/claims/judge_twice.yaml"],
    "guard": ["docs/research/claims/judge_guard.yaml", "clip_range=2.3e-5"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    runs = {name: [given.runs.resolve() / f"{name}-s{seed}" for seed in SEEDS] for name in SIDES}
    for place, seed in enumerate(SEEDS):
        for name, settings in SIDES.items():
            train(runs[name][place], [*settings, *COMMON], seed)
    wait_for([run for own in runs.values() for run in own])
    read = {name: [read_run(run) for run in own] for name, own in runs.items()}
    curves = {name: [curve(run) for run in own] for name, own in read.items()}
    written = origin() | {
        "seeds": list(SEEDS),
        "curves": curves,
        "reward": {name: [float(run.train[-1]["reward"]) for run in own] for name, own in read.items()},
        "drift": {name: [run.evaluations[-1].get("eval/kl") for run in own] for name, own in read.items()},
        "after": {name: [run[-1][2] for run in own] for name, own in curves.items()},
    }
    write_atomically(given.out, json.dumps(written, indent=1) + "\n")
    print(json.dumps(written["after"], indent=1))


if __name__ == "__main__":
    main()
