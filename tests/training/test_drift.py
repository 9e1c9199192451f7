"""The distance of a policy from its base: its value, the base drawn once, prompts shared over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from toy_pipeline import PROMPTS, Toy

from flowrl.pipelines.weights.lora import Policy
from flowrl.prompts.loading import EvalItem, Prompt
from flowrl.training.drift import base_sides, distance_of, velocity_distances
from flowrl.trajectory import Schedule

SCHEDULE = Schedule(sigma=torch.linspace(1, 0, 11), timestep=torch.linspace(1000, 100, 10))
ITEMS = [EvalItem(prompt_id=i, prompt=Prompt(text=text, metadata={}), sample=0) for i, text in enumerate(PROMPTS)]


@pytest.fixture
def toy() -> tuple[Any, Policy]:
    pipeline = Toy()
    policy = Policy(pipeline.denoiser, rank=2, alpha=4, targets=pipeline.lora_targets, seed=0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    return pipeline, policy


def test_constant_velocities_are_apart_by_the_square_of_their_difference(toy: tuple[Any, Policy]) -> None:
    def constant(value: float) -> Any:
        return lambda x, sigma, timestep: torch.full_like(x, value)

    prompts = [item.prompt for item in ITEMS]
    found = distance_of(toy[0], prompts, constant(0.5), constant(2.0), SCHEDULE, seed=0)
    assert found == 2.25


def test_the_base_is_asked_once_and_never_moves(toy: tuple[Any, Policy], monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, policy = toy
    asked, network = [0], pipeline.network

    def counted(x: Tensor, timestep: Tensor, cond: Any) -> Tensor:
        asked[0] += len(x)
        return network(x, timestep, cond)

    monkeypatch.setattr(pipeline, "network", counted)
    sides = base_sides(pipeline, policy, ITEMS, SCHEDULE, scale=1.0, seed=3)
    assert asked == [8 * len(ITEMS)]  # steps 0, 2, 5 and 7 are compared; nothing comes after them
    first = velocity_distances(pipeline, policy, sides, SCHEDULE, scale=1.0)
    assert asked == [12 * len(ITEMS)]
    again = base_sides(pipeline, policy, ITEMS, SCHEDULE, scale=1.0, seed=3)  # as after a resume
    assert velocity_distances(pipeline, policy, again, SCHEDULE, scale=1.0) == first
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.mul_(0)
    assert velocity_distances(pipeline, policy, sides, SCHEDULE, scale=1.0) == [0.0]
    assert min(first) > 0


def test_shares_of_the_prompts_add_up(toy: tuple[Any, Policy]) -> None:
    def summed(items: list[EvalItem], batch_size: int) -> float:
        sides = base_sides(*toy, items, SCHEDULE, scale=2.0, seed=3, batch_size=batch_size)
        return sum(velocity_distances(*toy, sides, SCHEDULE, scale=2.0))

    whole = summed(ITEMS, len(ITEMS))
    assert summed(ITEMS[:1], 24) + summed(ITEMS[1:], 24) == pytest.approx(whole, rel=1e-6)
    assert summed(ITEMS, 1) == pytest.approx(whole, rel=1e-6)
    assert summed([], 1) == 0  # a process for which no prompt is left
