"""A judge that answers by a function of the question, in place of a server or a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_clip import inputs_of

from flowrl.rewards import RewardInputs
from flowrl.rewards.judges.chat import Answer, Question
from flowrl.rewards.judges.local_chat import LocalChat
from flowrl.rewards.judges.server_chat import ServerChat

JUDGE = {"server": "http://127.0.0.1:1/v1", "model": "scripted"}


class ScriptedJudge:
    """Keeps what it was asked, and how many questions at a time."""

    version = "scripted-judge"

    def __init__(self, answer: Callable[[Question], Answer]) -> None:
        self.answer = answer
        self.asked: list[Question] = []
        self.calls: list[int] = []

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        self.asked += questions
        self.calls.append(len(questions))
        return [self.answer(question) for question in questions]


def script(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Question], Answer]) -> ScriptedJudge:
    """Makes all rewards ask this judge; the options for it are checked as ever."""
    judge = ScriptedJudge(answer)
    for options in (ServerChat, LocalChat):
        monkeypatch.setattr(options, "build", lambda self, device: judge)
    return judge


def levels(question: Question) -> list[int]:
    """The 8-bit levels of the images' first pixels."""
    return [int(part[0, 0, 0]) for part in question.parts if isinstance(part, np.ndarray)]


def level(question: Question) -> int:
    """The 8-bit level of the last image's first pixel."""
    return levels(question)[-1]


def text_of(question: Question) -> str:
    """All words of a question's user turn."""
    return "".join(part for part in question.parts if isinstance(part, str))


def yes(probability: float) -> Answer:
    """An answer whose first token is yes with this probability among yes and no."""
    candidates = {"Yes": math.log(probability), " no": math.log(1 - probability), "Well": -0.1}
    return Answer(text="Yes", logprobs=(candidates,))


def grey(levels: Sequence[float], size: int = 4) -> torch.Tensor:
    """Flat images of these 8-bit levels, so that a judge's answer can depend on which image it was shown."""
    return torch.tensor(levels)[:, None, None, None].expand(-1, 3, size, size).float() / 255


def edits(levels: Sequence[float] = (50, 100, 150, 200)) -> RewardInputs:
    """Edited images of these levels, of sources of the levels 10, 11 ..., each with a requirement."""
    sources = [[image] for image in grey([10 + i for i in range(len(levels))])]
    inputs = inputs_of(grey(levels), source_images=sources)
    return replace(inputs, metadata=[{"requirement": f"need {i}"} for i in range(len(levels))])
