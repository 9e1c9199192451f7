"""A fake judge and a simple scorer for the tests of pairwise rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scripted_judges import levels

from flowrl.rewards import REWARDS, FunctionReward, Reward, RewardInputs, RewardOutput, build_reward, output_of
from flowrl.rewards.base.outputs import check_output
from flowrl.rewards.judges.chat import Answer, Question


def inputs_of(levels: Sequence[float], groups: Sequence[int] | None = None, **more: Any) -> RewardInputs:
    """Flat grey images; a judge can read their quality off the level."""
    images = torch.tensor(levels, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 3, 4, 4).contiguous()
    group_ids = torch.tensor(groups if groups is not None else [0] * len(levels))
    return RewardInputs(
        prompts=[f"prompt {g} {{answer}}" for g in group_ids.tolist()],
        images=images,
        metadata=[{} for _ in levels],
        group_ids=group_ids,
        sample_ids=torch.arange(len(levels)),
        **more,
    )


def levels_of(question: Question) -> list[float]:
    return [level / 255 for level in levels(question)]


def says_brighter(question: Question) -> Answer:
    first, second = levels_of(question)[-2:]
    winner = "tie" if first == second else f"Image {1 if first > second else 2} is better"
    return Answer(text=f"I looked at Image 1 and Image 2. <answer>{winner}</answer>")


def says_first(question: Question) -> Answer:
    return Answer(text="<answer>Image 1 is better</answer>")


def scores(name: str, inputs: RewardInputs, **options: Any) -> RewardOutput:
    reward = build_reward(name, options=options)
    return check_output(reward(inputs), len(inputs), name)


def close(got: torch.Tensor, wanted: Sequence[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float32), rtol=0, atol=atol, equal_nan=True)


SCORED: list[int] = []
"""How many samples each call of the reward "brightness" was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Brightness:
    """A pointwise reward "brightness", whose items below `fails_below` fail."""

    fails_below: float = -1.0
    kind: str = "pointwise"

    def build(self, device: torch.device) -> Reward:
        def score(inputs: RewardInputs) -> RewardOutput:
            SCORED.append(len(inputs))
            values = inputs.images.mean(dim=(1, 2, 3)).tolist()
            kept = [None if value < self.fails_below else value for value in values]
            return output_of(kept, inputs, errors=["too_dark"] * len(values))

        needs = frozenset({"images"})
        return FunctionReward(name="brightness", score=score, needs=needs, version="brightness:1", kind=self.kind)


def register_brightness(monkeypatch: pytest.MonkeyPatch) -> None:
    SCORED.clear()
    monkeypatch.setitem(REWARDS, "brightness", "pairwise_fakes:Brightness")
