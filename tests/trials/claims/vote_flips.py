"""How much of what people's votes teach survives answers that are wrong?

    python tests/trials/claims/vote_flips.py runs/votes --out docs/research/rewards/votes.json

Trains `tiny_votes` once for each share of wrong answers, from one seed, so that both begin with the same images. The
voter is a program: it opens the run's page over HTTP, looks at each image's pixels, answers by the world's own verdict
and, in that share of cases, drawn by question, the opposite. An effect is the gain of the held-out verdict over the
model before training, at the same prompts and start noise; its interval is over prompts, and covers one training.
"""

from __future__ import annotations

import argparse
import io
import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import requests
from PIL import Image
from scripted import chance, origin

import flowrl
from flowrl.rewards.judges.world_judge import holds, world_records
from flowrl.rewards.votes.reward import VotesReward
from flowrl.runtime.files import write_atomically
from flowrl.statistics.bootstrap import percentiles

RESAMPLES = 2000
VOTER = "scripted-voter"


def vote(address: str, flips: float, seed: int, ended: threading.Event, counts: dict[str, int]) -> None:
    """Answers all questions of a page until it closes, wrongly as the training's seed draws it."""
    session, records = requests.Session(), world_records()
    while not ended.wait(0.1):
        state: dict[str, Any] = session.get(f"{address}state?voter={VOTER}", timeout=60).json()
        while state["stage"] == "vote":
            asked = state["question"]
            data = session.get(f"{address}file/{asked['shown'][0]}", timeout=60).content
            image = np.asarray(Image.open(io.BytesIO(data)))
            wrong = chance("flip", seed, state["iteration"], asked["number"]) < flips
            good = holds(image, next(iter(records[asked["prompt"]].values())), None) != wrong
            body = {"question": asked["number"], "voter": VOTER, "answer": "good" if good else "bad"}
            state = session.post(f"{address}vote", json=body, timeout=60).json()
            counts["votes"] += 1
            counts["wrong"] += wrong


def train(folder: Path, flips: float, settings: dict[str, Any]) -> dict[str, Any]:
    """The votes of one training with its voter, counted; a finished training is taken as it is, with its counts."""
    counts, opening = {"votes": 0, "wrong": 0}, VotesReward.open
    kept = folder.with_name(f"{folder.name}.votes.json")
    if (folder / "summary.json").exists():
        return dict(json.loads(kept.read_text(encoding="utf-8")))

    def open_page(reward: VotesReward, path: Path, iterations: int, closing: ExitStack) -> None:
        opening(reward, path, iterations, closing)
        ended = threading.Event()
        given = (reward.address, flips, settings["seed"], ended, counts)
        voter = threading.Thread(target=vote, args=given, daemon=True)
        voter.start()
        closing.callback(voter.join)
        closing.callback(ended.set)

    VotesReward.open = open_page  # type: ignore[method-assign, assignment]
    try:
        trained = flowrl.train("tiny_votes", out=str(folder), show=False, **settings)
    finally:
        VotesReward.open = opening  # type: ignore[method-assign]
    if not trained.finished:
        raise SystemExit(f"{folder} was stopped: remove it, and train again")
    write_atomically(kept, json.dumps(counts) + "\n")
    return counts


def gain(folder: Path) -> dict[str, Any]:
    """The held-out verdict before and after, and their difference with its interval over prompts."""
    first, last = (
        np.array([json.loads(line)["correct"] for line in path.read_text().splitlines()], dtype=np.float64)
        for path in (sorted((folder / "eval").glob("*.jsonl"))[place] for place in (0, -1))
    )
    difference, rng = last - first, np.random.default_rng(0)
    means = difference[rng.integers(0, len(difference), (RESAMPLES, len(difference)))].mean(1)
    found = percentiles(float(difference.mean()), means)
    return {
        "before": float(first.mean()),
        "after": float(last.mean()),
        "prompts": len(difference),
        "gain": found.mean,
        "low": found.low,
        "high": found.high,
    }


def main() -> None:
    """Trains and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--flips", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    settings = {"seed": given.seed, "num_iterations": given.iterations, "eval_every": given.iterations}
    settings |= {"threads": given.threads, "logging": {"tensorboard": False}}
    found: dict[str, Any] = {**origin(), "seed": given.seed, "iterations": given.iterations, "arms": []}
    for flips in given.flips:
        folder = given.folder / f"flips_{flips:g}_seed_{given.seed}"
        counts = train(folder, flips, settings)
        found["arms"].append({"flips": flips, **counts, **gain(folder)})
        print(found["arms"][-1], flush=True)
    if given.out is not None:
        write_atomically(given.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
