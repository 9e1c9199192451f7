"""What the reward model decides in DPO and in GRPO (arXiv 2505.17017): five rewards, in and out of domain.

    python tests/trials/claims/reward_models.py runs/reward_models --out docs/research/claims/reward_models.json

The plan, committed before the first of these trainings:

- Rewards, each alone, after the paper's kinds: `verdict`, GenEval's own (its metric); `scorer`, the network that
  learned from drawn scenes (its verifier, tuned in domain); `rubric`, rules that a judge answers, one answer of ten
  wrong (its VLM); `taste`, the verdict and a strong liking for colour (a preference model with a bias); `noisy`, the
  verdict with noise, one score of twenty off by a lot.
- Methods: `tiny_dpo` and `tiny_flow_grpo_fast`, which draw 8 prompts x 6 images an iteration; 8,400 network
  evaluations each; all else as configured, float32 and rate 1e-3 too. Seeds 51, 52 and 53, in no earlier run. None is
  left out; if time ends earlier, the seeds whose ten trainings are all finished count, and the page says how many were
  planned. Single iterations of seed 41 had been seen, for their seconds.
- In domain: share of right images among 72 held-out ones, 12 a task. Out of domain: mean graded credit of the prompts
  of `out_of_domain.py`, 96 x 2 images, the same start noise for all. Graded credit because that script found verdicts
  there nearly always wrong before training.
- What a reward is worth by itself: the mean graded credit, out of domain, of the best of four images of the model
  before training, chosen by that reward; where it gives several images the same, the mean of these. No training.
- Four rows, each with one number a seed, above 0 the paper's way. Primary: `intrinsic`, the rank correlation over the
  five rewards of that worth with the score out of domain after training, mean of both methods; Student's over seeds,
  which speaks for these five rewards. `in`: DPO less GRPO in domain, mean of the five. `out`: GRPO less DPO out of
  domain, mean of the five. `spread`: standard deviation over the five of the score out of domain, DPO's less GRPO's.
  These three by Welch's test. The page of claims corrects over all its rows.
- Order: seed by seed, so that what is missing at the end is a whole seed.

A finished training is taken as it is, one that was stopped begins again. It trains in its own process.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from out_of_domain import records
from recipe_search import origin
from scipy.stats import spearmanr

import flowrl
from flowrl.comparing.question import NO_LIMIT
from flowrl.config.overrides import typed_settings
from flowrl.config.train import resolve_path
from flowrl.media.reading import read_rgb
from flowrl.prompts.loading import spread
from flowrl.rewards import RewardInputs
from flowrl.rewards.base import reward_options
from flowrl.rewards.judges import world_judge
from flowrl.runs.run_data import RunData, read_run
from flowrl.runtime.files import write_atomically

SEEDS = (51, 52, 53)
METHODS = {"dpo": "tiny_dpo", "grpo": "tiny_flow_grpo_fast"}
TASTE = Path(__file__).parents[3] / "docs" / "research" / "hacking" / "hackable_rewards.py"
VERDICT = {"name": "geneval", "options": {"credit": "official"}}
REWARDS: dict[str, dict[str, Any]] = {
    "verdict": VERDICT,
    "scorer": {"name": "attributes"},
    "rubric": {
        "name": "rubric",
        "options": {
            "rules": "asset:rubrics/world.json",
            "normalise": True,
            "judge": {"model": "world:shapes", "wrong": 0.1},
        },
    },
    "taste": {"file": str(TASTE), "function": "colourful_judge", "options": {"liking": 20.0}},
    "noisy": {
        "name": "noisy",
        "options": {"reward": "geneval", "options": {"credit": "official"}, "std": 0.3, "outliers": 0.05},
    },
}
COMMON = [
    "prompts_per_step=8",
    "group_size=6",
    "budget.nfe=8400",
    "budget.evals=1",
    f"num_iterations={NO_LIMIT}",
    "threads=1",
    "logging.tensorboard=false",
    "checkpoint_every=100000",
    "eval.num_images=0",
    "eval.batch_size=48",
]
HELD_OUT, SAMPLES, CHOICES = 72, 2, 4


def prepare(folder: Path) -> Path:
    """Writes the prompts of evaluations, of both domains, and shows those out of domain to the rubric's judge."""
    rows = Path(resolve_path("asset:prompts/world_heldout.jsonl")).read_text(encoding="utf-8").splitlines()
    beyond = records()
    lines = [rows[place] for place in spread(len(rows), HELD_OUT)] + [json.dumps(r) for r in beyond] * SAMPLES
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "prompts.jsonl", "\n".join(lines) + "\n")
    write_atomically(folder / "beyond.jsonl", "".join(json.dumps(r) + "\n" for r in beyond))
    known = world_judge.world_records()
    both = sorted([*known.items(), *((r["prompt"], {b"": r}) for r in beyond)], key=lambda item: -len(item[0]))
    known.clear()
    known.update(both)  # it looks for the longest prompt first
    return folder / "prompts.jsonl"


def once_an_image() -> None:
    """Lets the rubric's judge, which looks at an image for every rule, detect its shapes once."""
    detect = world_judge.detect_shapes  # type: ignore[attr-defined]
    found = cache(lambda data, shape: detect(np.frombuffer(data, dtype=np.uint8).reshape(shape)))
    world_judge.detect_shapes = lambda image: found(image.tobytes(), image.shape)  # type: ignore[attr-defined]


def train(folder: Path, method: str, reward: str, seed: int, prompts: Path) -> None:
    """Trains with one reward and seed unless it is there."""
    run = folder / f"{method}-{reward}-s{seed}"
    if (run / "summary.json").exists():
        return
    shutil.rmtree(run, ignore_errors=True)
    begun, measured = time.monotonic(), [] if reward == "verdict" else [VERDICT | {"weight": 0.0}]
    first = (method, reward, seed) == (next(iter(METHODS)), next(iter(REWARDS)), SEEDS[0])
    words = [*COMMON, f"prompts.eval={prompts}", f"seed={seed}", f"eval.initial={str(first).lower()}"]
    settings = typed_settings(words) | {"rewards": [REWARDS[reward] | {"weight": 1.0}, *measured]}
    if not flowrl.train(METHODS[method], out=str(run), show=False, **settings).finished:
        raise SystemExit(f"{run} was stopped")
    print(f"{time.strftime('%H:%M:%S')} {run.name} {time.monotonic() - begun:.0f} s", flush=True)


def scores(run: RunData, at: int | None = None) -> dict[str, float]:
    """Both domains' scores at the last evaluation, or that of an iteration."""
    beyond = {record["prompt"] for record in records()}
    rows = run.image_rows[max(run.image_rows) if at is None else at]
    return {
        "in": fmean(float(row["correct"]) for row in rows if row["prompt"] not in beyond),
        "out": fmean(float(row["graded"]) for row in rows if row["prompt"] in beyond),
    }


def worth(folder: Path) -> dict[str, list[float]]:
    """Graded credit out of domain of the best of four by each reward, and of any of them, prompt by prompt."""
    found = flowrl.evaluate(
        "asset:tiny-sd3",
        prompts=folder / "beyond.jsonl",
        samples=CHOICES,
        out=folder / "choices",
        seed=SEEDS[0],
        steps=10,
        guidance=3.0,
        dtype="float32",
        batch_size=48,
        show=False,
    )
    by_prompt = {record["prompt"]: record for record in records()}
    prompts = [str(row["prompt"]) for row in found.rows]
    groups = torch.tensor([list(by_prompt).index(prompt) for prompt in prompts])
    images = [torch.from_numpy(np.array(read_rgb(path))).permute(2, 0, 1) / 255 for path in found.files]
    inputs = RewardInputs(
        images=torch.stack(images),
        prompts=prompts,
        metadata=[by_prompt[prompt] for prompt in prompts],
        group_ids=groups,
        sample_ids=torch.arange(len(prompts)),
    )
    graded = torch.tensor([float(row["graded"]) for row in found.rows])
    values = {name: judged(entry, inputs) for name, entry in REWARDS.items()} | {"any": torch.zeros(len(prompts))}
    return {
        name: [
            float(graded[groups == group][own[groups == group] == own[groups == group].max()].mean())
            for group in range(len(by_prompt))
        ]
        for name, own in values.items()
    }


def judged(entry: Mapping[str, Any], inputs: RewardInputs) -> torch.Tensor:
    """What a reward says of images."""
    if "file" not in entry:
        output = reward_options(entry["name"], entry.get("options", {})).build(torch.device("cpu"))(inputs)
        if not output.valid.all():
            raise SystemExit(f"{entry['name']} failed: {output.errors}")
        return output.values
    taste = runpy.run_path(entry["file"])[entry["function"]]
    values: torch.Tensor = taste(inputs.images, inputs.prompts, inputs.metadata, **entry["options"])
    return values


def told(own: Sequence[float], of_any: Sequence[float]) -> dict[str, float]:
    """The mean over prompts, and how far it is above that of any image, with the standard error over prompts."""
    above = np.array(own) - np.array(of_any)
    error = float(above.std(ddof=1) / len(above) ** 0.5)
    return {"mean": fmean(own), "above_any": float(above.mean()), "standard_error": error}


def report(folder: Path, worths: Mapping[str, Sequence[float]], out: Path) -> None:
    """Writes what rewards are worth, and the figures of seeds whose trainings are all finished."""

    def runs_of(seed: int) -> dict[tuple[str, str], Path]:
        return {(method, name): folder / f"{method}-{name}-s{seed}" for method in METHODS for name in REWARDS}

    seeds = [seed for seed in SEEDS if all((run / "summary.json").exists() for run in runs_of(seed).values())]
    written = origin() | {
        "planned_seeds": list(SEEDS),
        "seeds": seeds,
        "settings": " ".join(COMMON),
        "methods": METHODS,
        "rewards": REWARDS | {"taste": REWARDS["taste"] | {"file": TASTE.name}},
        "worth": {name: told(own, worths["any"]) for name, own in worths.items()},
    }
    if seeds:
        written |= trained({seed: runs_of(seed) for seed in seeds}, worths)
        written["before"] = scores(read_run(runs_of(SEEDS[0])[next(iter(METHODS)), next(iter(REWARDS))]), 0)
    write_atomically(out, json.dumps(written, indent=1) + "\n")


def trained(
    folders: Mapping[int, Mapping[tuple[str, str], Path]], worths: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """The figures of seeds, each with its trainings by method and reward."""
    seeds = list(folders)
    read = {seed: {key: read_run(run) for key, run in runs.items()} for seed, runs in folders.items()}
    found = {seed: {key: scores(run) for key, run in runs.items()} for seed, runs in read.items()}

    def over(method: str, domain: str, seed: int) -> list[float]:
        return [found[seed][method, name][domain] for name in REWARDS]

    own = [fmean(worths[name]) for name in REWARDS]
    ranks = {
        method: [float(spearmanr(own, over(method, "out", seed)).statistic) for seed in seeds] for method in METHODS
    }
    after: dict[str, list[float]] = {}
    for method in METHODS:
        after[f"{method}_in"] = [fmean(over(method, "in", seed)) for seed in seeds]
        after[f"{method}_out"] = [fmean(over(method, "out", seed)) for seed in seeds]
        after[f"{method}_spread"] = [stdev(over(method, "out", seed)) for seed in seeds]
    every = {method: [runs[method, name] for runs in read.values() for name in REWARDS] for method in METHODS}
    return {
        "commits": sorted({str(run.manifest.get("git_commit")) for runs in every.values() for run in runs}),
        "nfe": {method: fmean(run.train[-1]["nfe/total"] for run in runs) for method, runs in every.items()},
        "seconds": {method: fmean(run.train[-1]["seconds/total"] for run in runs) for method, runs in every.items()},
        "scores": {m: {n: [found[seed][m, n] for seed in seeds] for n in REWARDS} for m in METHODS},
        "drift": {
            m: {n: [read[seed][m, n].evaluations[-1].get("eval/kl") for seed in seeds] for n in REWARDS}
            for m in METHODS
        },
        "ranks": ranks,
        "after": after,
        "effects": {"intrinsic": {"per_seed": [fmean(pair) for pair in zip(*ranks.values(), strict=True)]}},
    }


def main(words: Sequence[str] | None = None) -> None:
    """Trains what is not there, seed by seed, and writes the figures after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report-only", action="store_true", help="write the figures of what is finished")
    given = parser.parse_args(words)
    folder = given.runs.resolve()
    once_an_image()
    prompts, kept = prepare(folder), folder / "worths.json"
    if not kept.exists():
        write_atomically(kept, json.dumps(worth(folder)) + "\n")
    worths = json.loads(kept.read_text(encoding="utf-8"))
    for seed in () if given.report_only else SEEDS:
        for reward in REWARDS:
            for method in METHODS:
                train(folder, method, reward, seed, prompts)
        report(folder, worths, given.out)
    report(folder, worths, given.out)


if __name__ == "__main__":
    main()
