"""The recipe of the embedded model: which reaches Flow-GRPO's final score with the fewest network evaluations?

    python tests/trials/claims/recipe_search.py runs/search --out docs/research/methods/recipe.json

Three rungs of successive halving, each training of about `BUDGET` network evaluations and judged by the verdict on
prompts that are taken out of the training prompts by what they ask for, so that the held-out ones choose nothing. Then,
on all training prompts and measured on the held-out ones as they go: Flow-GRPO at the rate of
`docs/research/methods.md`, the search's winner as it was chosen, and the `tiny_recommended` of that time. What counts
is how many times less they cost, in network evaluations and in seconds of training, until the mean of the seeds
reaches nine tenths of the gain of Flow-GRPO's mean, with the interval of `flowrl compare`
(`flowrl.statistics.crossed.cost_ratio`). The files that are recorded hold ratios to its final score, with an interval
that covered too little; the page computes them again from the curves.

Earlier searches, with the commits that made them, in docs/research/methods: recipe_first.json, whose prompts for
choosing differed in wording alone, and recipe_second.json. Flow-GRPO's first four trainings and `tiny_recommended`'s
are those of the first.

Several processes with one folder share the work: each takes trainings that no other has begun, and the last rung waits
for all. A training that was cut off is resumed by its own command after its folder's `begun` file is removed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1])]

from origin import origin as origin  # noqa: E402

from flowrl.comparing.compare import ratio_numbers  # noqa: E402
from flowrl.comparing.comparison_result import SHARES  # noqa: E402
from flowrl.runs.run_data import RunData, read_run  # noqa: E402
from flowrl.runtime.files import write_atomically  # noqa: E402
from flowrl.statistics.crossed import cost_ratio, mean_curve  # noqa: E402
from flowrl.world.scene_prompts import combinations  # noqa: E402

BUDGET = 32_000
COMMON = ["pipeline.dtype=bfloat16", "eval.batch_size=48", "optim.schedule=cosine", "threads=1", "checkpoint_every=100"]
# `tiny_recommended` as it was then; what this search found made it train without guidance.
THEN = ["tiny_nft_reused", "sampler.train_negative=false"]
GROUPS = [*THEN, "times.count=1", "prompts_per_step=12", "group_size=12"]
UNGUIDED = ["objective.options.guidance_scale=1", "sampler.train_negative=true"]
CANDIDATES = {
    "four_steps": [*GROUPS, "sampler.num_steps=4", "num_iterations=17"],
    "four_steps_unguided": [*GROUPS, "sampler.num_steps=4", *UNGUIDED, "num_iterations=20"],
    "four_steps_extremes": [*GROUPS, "sampler.num_steps=4", "best_of=6", "num_iterations=21"],
    "three_steps": [*GROUPS, "sampler.num_steps=3", "num_iterations=20"],
    "three_steps_extremes": [*GROUPS, "sampler.num_steps=3", "best_of=6", "num_iterations=26"],
    "three_steps_extremes_unguided": [
        *GROUPS, "sampler.num_steps=3", "best_of=6", *UNGUIDED, "num_iterations=29",
    ],
    "three_steps_extremes_clip_2": [
        *GROUPS, "sampler.num_steps=3", "best_of=6", "adv_clip_range=2", "num_iterations=26",
    ],
    "three_steps_extremes_of_16": [
        *GROUPS, "sampler.num_steps=3", "prompts_per_step=9", "group_size=16", "best_of=4", "num_iterations=30",
    ],
    "three_steps_extremes_rate_2.5e-3": [
        *GROUPS, "sampler.num_steps=3", "best_of=6", "optim.lr=2.5e-3", "num_iterations=26",
    ],
    "two_steps_extremes": [
        *GROUPS, "sampler.num_steps=2", "times.fraction=1.0", "best_of=6", "num_iterations=34",
    ],
}  # fmt: skip
RUNGS = ((27, 28), (29, 30), (51, 52))
KEPT = (4, 2, 1)
BASE = "flow_grpo"
FINAL = {
    BASE: (["tiny_flow_grpo", "optim.lr=2e-3", "num_iterations=36", *COMMON, "eval_every=9"], (11, 12, 13, 14, 15)),
    "tiny_recommended": (
        [*THEN, "prompts_per_step=24", "group_size=6", "num_iterations=36", "threads=1", "eval_every=12"],
        (101, 102, 103),
    ),
}
WORDINGS = ("single_object", "counting")
CHOOSE_PER_TASK = 60
Evaluations = list[tuple[float, float, float]]


def split(folder: Path) -> list[str]:
    """Prompts for choosing, 60 images a task, split off as the held-out ones are: by what they ask for, or by wording.

    Of the combinations that are trained on a quarter is taken out, at least one; of single_object and counting, whose
    combinations are all trained on, a quarter of the wordings.
    """
    rows = [json.loads(line) for line in Path("assets/prompts/world_train.jsonl").read_text().splitlines()]
    groups = {
        meaning(record): (task, place)
        for task, found in combinations().items()
        for place, group in enumerate(found)
        for record in group
    }
    apart: set[str] = set()
    chosen: list[dict[str, Any]] = []
    for task in combinations():
        own = {row["prompt"]: row for row in rows if row["tag"] == task}
        key = {name: name if task in WORDINGS else str(groups[meaning(row)]) for name, row in own.items()}
        every = sorted(set(key.values()))
        picks = np.random.default_rng(0).permutation(len(every))[: max(1, len(every) // 4)]
        taken = [name for name in own if key[name] in {every[i] for i in picks}]
        apart |= set(taken)
        chosen += [own[taken[i % len(taken)]] for i in range(CHOOSE_PER_TASK)]
    kept = [row for row in rows if row["prompt"] not in apart]
    for name, records in (("train", kept), ("choose", chosen)):
        write_atomically(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in records))
    return [f"prompts.train={folder / 'train.jsonl'}", f"prompts.eval={folder / 'choose.jsonl'}", "eval.initial=false"]


def meaning(record: dict[str, Any]) -> str:
    """What a record asks for, whatever its words."""
    return json.dumps({key: value for key, value in record.items() if key != "prompt"}, sort_keys=True)


def train(folder: Path, arguments: list[str], seed: int) -> None:
    """Runs one training unless somebody has begun it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.with_name(f"{folder.name}.begun").open("x").close()
    except FileExistsError:
        return
    command = [sys.executable, "-m", "flowrl", "train", *arguments, f"seed={seed}", f"out={folder}"]
    with open(folder.with_name(f"{folder.name}.log"), "w") as log:
        if subprocess.run(command, stdout=log, stderr=log).returncode:
            raise SystemExit(f"{folder.name} failed: {log.name}")
    print(f"{time.strftime('%H:%M')} {folder.name} done", flush=True)


def wait_for(folders: list[Path]) -> None:
    while not all((folder / "summary.json").exists() for folder in folders):
        time.sleep(5)


def curve(run: RunData) -> Evaluations:
    """(network evaluations, training seconds, score) of every evaluation, ascending."""
    return [
        (row.get("nfe/total", 0.0), row.get("seconds/total", 0.0), row["eval/geneval/score"]) for row in run.evaluations
    ]


def choose(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """The candidate with the best mean over its seeds, and every rung's scores."""
    overrides, alive = split(folder), list(CANDIDATES)
    rungs: list[dict[str, Any]] = []
    for seeds, kept in zip(RUNGS, KEPT, strict=True):
        for name in alive:
            for seed in seeds:
                train(folder / f"{name}-s{seed}", [*CANDIDATES[name], *COMMON, *overrides, "eval_every=1000"], seed)
        wait_for([folder / f"{name}-s{seed}" for name in alive for seed in seeds])
        so_far = [seed for rung in RUNGS[: len(rungs) + 1] for seed in rung]
        ends = {name: [curve(read_run(folder / f"{name}-s{seed}"))[-1] for seed in so_far] for name in alive}
        scores = {name: [score for _, _, score in found] for name, found in ends.items()}
        rungs.append({
            "seeds": so_far, "scores": scores,
            "nfe": {name: found[-len(seeds)][0] for name, found in ends.items()},
            "seconds": {name: found[-len(seeds)][1] for name, found in ends.items()},
        })  # fmt: skip
        alive = sorted(alive, key=lambda name: -float(np.mean(scores[name])))[:kept]
        print(f"seeds {so_far}:", {name: round(float(np.mean(found)), 3) for name, found in scores.items()}, flush=True)
    return alive[0], rungs


def ratio(curves: dict[str, list[Evaluations]], winner: str, column: int) -> dict[str, Any]:
    """How many times less the winner costs to nine tenths of the baseline's gain, in a column of the evaluations."""
    baseline, own = (
        [([row[column] for row in run], [row[2] for row in run]) for run in curves[name]] for name in (BASE, winner)
    )
    _, score_N = mean_curve(baseline)
    return ratio_numbers(cost_ratio(baseline, own, float(score_N[0] + SHARES[-1] * (score_N[-1] - score_N[0]))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folder = given.runs.resolve()
    winner, rungs = choose(folder)
    sides = FINAL | {winner: ([*CANDIDATES[winner], *COMMON, "eval_every=10"], (31, 32, 33, 34, 35))}
    final = {name: [(seed, folder / f"final-{name}-s{seed}") for seed in seeds] for name, (_, seeds) in sides.items()}
    for name, runs in final.items():
        for seed, run in runs:
            train(run, sides[name][0], seed)
    wait_for([run for runs in final.values() for _, run in runs])
    curves = {name: [curve(read_run(run)) for _, run in runs] for name, runs in final.items()}
    others = [name for name in sides if name != BASE]
    written = origin() | {
        "budget": BUDGET, "candidates": CANDIDATES,
        "final": {name: " ".join(arguments) for name, (arguments, _) in sides.items()},
        "rungs": rungs, "winner": winner, "seeds": {name: list(seeds) for name, (_, seeds) in sides.items()},
        "curves": curves,
        "fewer": {name: ratio(curves, name, 0) for name in others},
        "faster": {name: ratio(curves, name, 1) for name in others},
    }  # fmt: skip
    write_atomically(given.out, json.dumps(written, indent=1) + "\n")
    print(json.dumps({key: written[key] for key in ("winner", "fewer", "faster")}, indent=1))


if __name__ == "__main__":
    main()
