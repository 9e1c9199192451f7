"""A fake judge and a simple scorer for the tests of pairwise rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.rewards import REWARDS, FunctionReward, Reward, RewardInputs, RewardOutput, build_reward, output_of
from flowrl.rewards.judges.chat import Answer, Question
from flowrl.rewards.outputs import check_output


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
    return [float(part[0, 0, 0]) / 255 for part in question.parts if isinstance(part, np.ndarray)]


def says_brighter(question: Question) -> Answer:
    first, second = levels_of(question)[-2:]
    winner = "tie" if first == second else f"Image {1 if first > second else 2} is better"
    return Answer(text=f"I looked at Image 1 and Image 2. <answer>{winner}</answer>")


def says_first(question: Question) -> Answer:
    return Answer(text="<answer>Image 1 is better</answer>")


@dataclass
class FakeChat:
    reply: Callable[[Question], Answer]
    version: str = "fake"
    calls: list[int] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        self.calls.append(len(questions))
        self.questions += questions
        return [self.reply(question) for question in questions]


def scores(name: str, inputs: RewardInputs, **options: Any) -> RewardOutput:
    reward = build_reward(name, options=options)
    return check_output(reward(inputs), len(inputs), name)


def close(got: torch.Tensor, wanted: Sequence[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float32), rtol=0, atol=atol, equal_nan=True)


@dataclass
class Brightness:
    """A pointwise reward "brightness", whose items below `fails_below` fail; counts what it was given."""

    scored: int = 0

    def __call__(self, *, device: torch.device, fails_below: float = -1.0, kind: str = "pointwise") -> Reward:
        def score(inputs: RewardInputs) -> RewardOutput:
            self.scored += len(inputs)
            values = inputs.images.mean(dim=(1, 2, 3)).tolist()
            kept = [None if value < fails_below else value for value in values]
            return output_of(kept, inputs, errors=["too_dark"] * len(values))

        needs = frozenset({"images"})
        return FunctionReward(name="brightness", score=score, needs=needs, version="brightness:1", kind=kind)


def register_brightness(monkeypatch: pytest.MonkeyPatch) -> Brightness:
    made = Brightness()
    monkeypatch.setattr("flowrl.rewards.brightness_of_tests", made, raising=False)
    monkeypatch.setitem(REWARDS, "brightness", "flowrl.rewards:brightness_of_tests")
    monkeypatch.setitem(REWARDS, "noisy", "flowrl.rewards.noisy:Noisy")
    return made
