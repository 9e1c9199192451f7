"""What a run scores whose rollouts are drawn one, two or four iterations ahead (`workers.staleness`), beside one that
waits; from two on with truncated importance weights, and without.

    python tests/trials/stale_rollouts.py --out docs/research/trials/stale_rollouts.json

Nothing is drawn elsewhere: the pieces are drawn in this process under the weights that workers would be sent, which
gives the same bits (`tests/workers/test_rollouts.py`), so that Ray's start is not waited for. Subjects are the toy of
the tests with the reward `brightness`, from 0 to 1, and with `--model` the embedded model with its GenEval reward.
Compared is the mean reward of the last tenth of the iterations, over seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from origin import origin
from torch import Tensor
from toy_pipeline import QuickRun, toy_in_place

from flowrl.config.train import TrainConfig, find_config, load_config
from flowrl.recipes import grpo
from flowrl.session.preflight import resolve
from flowrl.training.draws import Drawn, Draws, Request
from flowrl.training.learner import NetworkCounter
from flowrl.training.parts import Parts, load_parts, read_run_prompts
from flowrl.training.paths import draw_request


class Here(Draws):
    """Draws in the learner's process, with the learner's pipeline, under the weights that a worker would have."""

    def __init__(self, config: TrainConfig, parts: Parts, device: torch.device) -> None:
        self.config, self.geometry, self.device = config, config.resolve_batch(1), device
        self.pipeline, self.policy, _ = parts
        self.network = NetworkCounter(self.pipeline.network, {})
        self.asked: list[tuple[Request, Mapping[str, Tensor]]] = []
        self.layout: dict[str, Any] = {}

    def submit(self, requests: Sequence[Request], weights: Mapping[str, Tensor]) -> list[int]:
        first = len(self.asked)
        self.asked += [(request, weights) for request in requests]
        return list(range(first, len(self.asked)))

    @torch.no_grad()
    def collect(self, tickets: Sequence[int]) -> Iterator[Drawn]:
        own = self.policy.tensors()
        for ticket in tickets:
            request, weights = self.asked[ticket]
            self.policy.load(weights)
            found = draw_request(self, request)
            self.policy.load(own)
            yield Drawn(found=found, evaluations=self.network.hand_over())

    def row(self) -> dict[str, float]:
        return {"alive": 1, "restarts": 0, "wait_seconds": 0.0}

    def lines(self) -> list[str]:
        return []


def score_of(config: TrainConfig, folder: Path) -> tuple[float, float]:
    """Mean reward of the last tenth of a run's iterations, and the largest first deviation of its ratio from 1."""
    run: Any = QuickRun(folder)
    ready = resolve(config, read_run_prompts(config.prompts))
    run.parts = load_parts(ready, run.device, lambda pipeline: None)
    run.rollouts = Here(config, run.parts, run.device)
    grpo.check(config)
    assert grpo.main(ready, run)
    rewards = [row["reward"] for row in run.logged if "reward" in row]
    deviation = max(row["ratio_first_deviation"] for row in run.logged if "ratio_first_deviation" in row)
    return fmean(rewards[-max(1, len(rewards) // 10) :]), deviation


COURSES = {
    "0": ("workers.staleness=0",),
    "1": ("workers.staleness=1",),
    "2": ("workers.staleness=2",),
    "4": ("workers.staleness=4",),
    "4 without weights": ("workers.staleness=4", "workers.importance_cap=0"),
}


def compared(path: Path, seeds: int, folder: Path, *settings: str) -> dict[str, Any]:
    """Scores by staleness, and their differences from those of 0 with standard errors over seeds."""
    found: dict[str, Any] = {"settings": list(settings), "seeds": seeds}
    scores = dict[str, list[float]]()
    for name, course in COURSES.items():
        each = [
            score_of(load_config(path, [*settings, f"seed={seed}", "workers.rollouts=1", *course]), folder)
            for seed in range(seeds)
        ]
        scores[name] = [score for score, _ in each]
        gaps = [after - before for before, after in zip(scores["0"], scores[name], strict=True)]
        found[f"staleness {name}"] = {
            "scores": [round(score, 4) for score in scores[name]],
            "mean difference": round(fmean(gaps), 4),
            "standard error": round(stdev(gaps) / len(gaps) ** 0.5, 4) if len(gaps) > 1 else None,
            "ratio_first_deviation": max(deviation for _, deviation in each),
        }
    return found


def main() -> None:
    """Writes the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument(
        "--model", type=int, default=0, help="iterations of the embedded model, one seed; 0 leaves it out"
    )
    asked = parser.parse_args()
    found: dict[str, Any] = {"origin": origin()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in toy_in_place(folder):
            found["toy"] = [
                compared(path, asked.seeds, folder, "num_iterations=40", "prompts_per_step=2", f"optim.lr={lr}",
                         f"updates_per_rollout={updates}")
                for lr in (0.003, 0.01) for updates in (1, 4)
            ]  # fmt: skip
        if asked.model:
            sizes = ("prompts_per_step=4", "group_size=6", "eval_every=0", "progress=false", "prompts.eval=null")
            found["embedded model"] = compared(
                find_config("tiny_grpo_geneval"), 1, folder, f"num_iterations={asked.model}", *sizes
            )
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
