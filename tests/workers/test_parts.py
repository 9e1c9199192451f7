"""Trees, branches and completions in parts, and evaluations, by workers in this process: the learner's own bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_workers import Inside
from tiny_runs import TinyRuns, lora, metrics
from toy_pipeline import toy_config, toy_in_place, write_toy

from flowrl.samplers import KERNELS, build_schedule
from flowrl.samplers.branching import sample_branches
from flowrl.samplers.tree import sample_tree
from flowrl.training.paths import images_of_part
from flowrl.trajectory import Sampled
from flowrl.workers import rollouts


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyRuns]:
    monkeypatch.setattr(rollouts, "RayBackend", Inside)
    monkeypatch.setattr(rollouts, "join_cluster", lambda config, run: "here")
    Inside.asked, Inside.drew = [], set()
    for config in toy_in_place(tmp_path):
        yield TinyRuns(folder=tmp_path, config=config)


def rows(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith("workers/")} for row in metrics(run)]


PLANS = {
    "tree": (("credit.method=branch_grpo", "credit.splits=[0, 2]"), 2),
    "branches": (("credit.method=g2rpo", "sampler.kernel=cps", "credit.strides=[1, 2]"), 2),
    "seeds": (("credit.method=tempflow", "credit.branches=2"), 4),
    "anchors": (("credit.method=self_opd", "credit.branches=2"), 4),
    "values": (("credit.method=dense_grpo",), 8),
}


@pytest.mark.parametrize(("settings", "parts"), PLANS.values(), ids=PLANS)
def test_plans_are_drawn_in_parts_with_the_learners_bits(toy: TinyRuns, settings: tuple[str, ...], parts: int) -> None:
    more = ("num_iterations=2", "prompts_per_step=4", "rollout_batch_size=2", *settings)
    here, there = toy.train("here", *more), toy.train("there", *more, "workers.rollouts=2")
    assert [iteration for iteration, _ in Inside.asked] == [0] * parts + [1] * parts
    assert Inside.drew == {0, 1}
    assert rows(here) == rows(there)
    assert lora(here) == lora(there)


def test_evaluations_are_drawn_by_workers_with_the_learners_bits(toy: TinyRuns) -> None:
    settings = [f"prompts.eval={toy.folder}/prompts.txt", "eval_every=1", "policy.ema_decay=0.5", "eval.batch_size=1"]
    settings += ["num_iterations=1", "eval.num_steps=3", "eval.guidance_scale=2"]
    here, there = toy.train("here", *settings), toy.train("there", *settings, "workers.rollouts=1")
    assert [iteration for iteration, _ in Inside.asked].count(-1) == 2 * 4
    assert len({version for iteration, version in Inside.asked if iteration == -1}) == 2  # of each evaluation once
    assert sum("eval/kl" in row for row in rows(there)) == 2
    assert rows(here) == rows(there)
    for name in ("eval/iteration_000001.jsonl", "samples/iteration_000001.png"):
        assert (here / name).read_bytes() == (there / name).read_bytes()


@pytest.mark.parametrize(
    ("method", "batch", "groups", "part"),
    [
        ("branch_grpo", 2, 5, 2),
        ("branch_grpo", 16, 4, 16),
        ("g2rpo", 2, 4, 2),
        ("g2rpo", 2, 5, 5),  # completions of a step would begin within a batch
        ("tempflow credit.branches=2", 4, 4, 2),
        ("dense_grpo", 3, 4, 0.75),
    ],
)
def test_parts_are_of_whole_batches(tmp_path: Path, method: str, batch: int, groups: int, part: float) -> None:
    config = toy_config(write_toy(tmp_path), *f"credit.method={method}".split())
    assert images_of_part(config, batch, 4 * groups) == 4 * part


@pytest.mark.parametrize("kind", ["tree", "branches"])
def test_joined_parts_are_those_of_one_rollout(kind: str) -> None:
    """Four groups at once, and two and two joined: equal columns, and the same latents behind every index."""
    schedule, kernel = build_schedule({"shift": 2.0}, 5, grid="linspace"), KERNELS["flow_sde"]

    def drawn(groups: range) -> Sampled:
        numbers = torch.arange(groups.start, groups.stop)

        def noise(step: int, nodes: range) -> torch.Tensor:
            each = 2 if kind == "branches" else 2 ** sum(split <= step for split in (1, 2))
            own = [(100 * (groups.start + i // each) + 10 * step + i % each) for i in nodes]
            return torch.tensor(own)[:, None].sin() * torch.ones(3)

        start = numbers[:, None] / 7 + torch.arange(3.0)
        given: Any = (lambda index: lambda x, sigma, timestep: torch.tanh(x) * sigma, start)
        given += (torch.arange(len(groups)), numbers, schedule, kernel, noise)
        if kind == "tree":
            more: dict[str, Any] = {"splits": (1, 2), "children": 2, "stochastic": (1, 2, 3)}
            return sample_tree(*given, **more, batch_size=2, keep_means=True)
        return sample_branches(*given, steps=(0, 2), branches=2, strides=(1, 2), batch_size=2, keep_means=True)

    whole, joined = drawn(range(4)), Sampled.cat([drawn(range(2)), drawn(range(2, 4))]).by_step()
    for name in (field.name for field in fields(Sampled)):
        if name not in ("states", "source", "produced"):
            torch.testing.assert_close(getattr(joined, name), getattr(whole, name), rtol=0, atol=0, msg=name)
    for name in ("source", "produced"):
        assert torch.equal(joined.states[getattr(joined, name)], whole.states[getattr(whole, name)])
