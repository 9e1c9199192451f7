"""Two processes that hold the weights between them, and workers that hold all of them: the bits of no workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from split_runs import command
from tiny_runs import differences, lora, metrics, model_tensors, state
from toy_pipeline import reward_list, write_toy
from two_processes import train_on_two


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("workers/")} for row in metrics(run)]


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
    rows = {name: rows_of(tmp_path / name) for name in runs}
    assert sum("eval/kl" in row for row in rows["there"]) == 3
    assert rows["here"] == rows["there"]
    assert lora(tmp_path / "here") == lora(tmp_path / "there")
    assert all(row.get("ratio_max_deviation", 0) == 0 for row in rows["stale"])
    assert rows["stale"] == rows["whole"]


@pytest.mark.slow
def test_learners_that_hold_all_weights_between_them_lay_down_their_parts(tmp_path: Path, warm_python: str) -> None:
    """Also ahead of their weights, with a stop between; evaluations of three images, of which one process has two."""
    stale, stop = ["workers.rollouts=2", "workers.staleness=1", "num_iterations=3"], ["num_iterations=2"]
    runs = {"here": [], "there": ["workers.rollouts=2"], "stale": stale, "parts": [*stale, *stop]}
    full = ["policy.train=full", "policy.lora_rank=null", "parallel.shard=2", "threads=1", "pipeline.dtype=bfloat16"]

    def told(name: str, family: str = "sd3") -> tuple[int, bool, list[str]]:
        return 0, False, command(tmp_path, family, "grpo", tmp_path / f"{family}-{name}", *full, *runs[name])

    commands = [told(name) for name in runs]
    commands.append((0, False, [f"resume={tmp_path / 'sd3-parts'}", "num_iterations=3"]))
    train_on_two(tmp_path, commands, python=warm_python)
    found = {name: (rows_of(tmp_path / f"sd3-{name}"), model_tensors(tmp_path / f"sd3-{name}")) for name in runs}
    assert found["here"][0] == found["there"][0]
    assert differences(found["here"][1], found["there"][1]) == 0
    trained = [[row for row in found[name][0] if "loss" in row] for name in ("stale", "parts")]
    assert trained[0] == trained[1]
    assert differences(found["stale"][1], found["parts"][1]) == 0
    assert list(state(tmp_path / "sd3-stale")["memory"]["ahead"]) == [2]
