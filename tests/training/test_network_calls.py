"""How often an iteration calls its network, and with how many rows: exact, so that no call comes in unseen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from toy_pipeline import QuickRun, toy_config, write_toy

from flowrl.pipelines import PIPELINES
from flowrl.rewards import REWARDS
from flowrl.session.preflight import recipe_of, resolve
from flowrl.training.learner import NetworkCounter
from flowrl.training.parts import read_run_prompts

PIECES = ("num_iterations=1", "micro_batch_size=4")
ROLLOUT = ("rollout_batch_size=4",)
FORWARD = (*ROLLOUT, "recipe=forward", "sampler.kernel=ode", "times.count=3", "objective.name=nft")
DPO = (*ROLLOUT, "recipe=preference", "sampler.kernel=ode", "times.count=2")
DRAFT = ("recipe=backprop", "sampler.kernel=ode", "rewards=[{name: smooth_brightness}]", "objective.name=draft")
CASES: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    # 8 images of 4 steps, 3 of them stochastic, in two pieces.
    "grpo": (ROLLOUT, {"rollout": 2 * 4, "update": 2 * 3}),
    "grpo with reference": ((*ROLLOUT, "kl_coef=0.1"), {"rollout": 2 * 4, "update": 2 * 3, "reference": 2 * 3}),
    # Each image at 3 noise levels, under the policy and under the old one.
    "forward": (FORWARD, {"rollout": 2 * 4, "update": 2 * 3, "reference": 2 * 3}),
    # One pair of each of 2 prompts, at 2 noise levels.
    "preference": (DPO, {"rollout": 2 * 4, "update": 2, "reference": 2}),
    "backprop": (DRAFT, {"rollout": 2 * 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_of_an_iteration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    monkeypatch.setitem(REWARDS, "smooth_brightness", "toy_pipeline:SmoothBrightness")
    settings, expected = CASES[name]
    config, calls = toy_config(write_toy(tmp_path), *PIECES, *settings), Counter[str]()
    counted = NetworkCounter.__call__

    def noted(self: NetworkCounter, x: Tensor, timestep: Tensor, cond: Any) -> Tensor:
        calls[self._kind] += 1
        assert len(x) == 4
        return counted(self, x, timestep, cond)

    monkeypatch.setattr(NetworkCounter, "__call__", noted)
    recipe, run = recipe_of(config), QuickRun(tmp_path)
    recipe.check(config)
    assert recipe.main(resolve(config, read_run_prompts(config.prompts)), run)  # type: ignore[arg-type]
    assert calls == expected
