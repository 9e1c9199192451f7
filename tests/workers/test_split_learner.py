"""Two processes that hold the weights between them, and workers that hold all of them: the bits of no workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import lora, metrics
from toy_pipeline import reward_list, write_toy
from two_processes import train_on_two


@pytest.mark.slow
def test_workers_of_a_split_learner_draw_what_it_would_have_drawn(tmp_path: Path, warm_python: str) -> None:
    settings = [
        str(write_toy(tmp_path)),
        reward_list(tmp_path, "half_fail"),
        "num_iterations=2",
        "rollout_batch_size=2",
    ]
    settings += [f"prompts.eval={tmp_path / 'prompts.txt'}", "eval_every=1", "eval.batch_size=1", "parallel.shard=2"]
    settings += ["prompts_per_step=4", "rollout_batch_size=2"]
    stale = ["workers.rollouts=2", "workers.staleness=2"]
    runs = {"here": [], "there": ["workers.rollouts=2"], "stale": stale, "whole": [*stale, "parallel.shard=1"]}
    commands = [(0, True, [*settings, *more, f"out={tmp_path / name}"]) for name, more in runs.items()]
    train_on_two(tmp_path, commands, python=warm_python)
    rows = {
        name: [{k: v for k, v in row.items() if not k.startswith("workers/")} for row in metrics(tmp_path / name)]
        for name in runs
    }
    assert sum("eval/kl" in row for row in rows["there"]) == 3
    assert rows["here"] == rows["there"]
    assert lora(tmp_path / "here") == lora(tmp_path / "there")
    assert all(row.get("ratio_max_deviation", 0) == 0 for row in rows["stale"])
    assert rows["stale"] == rows["whole"]
