"""What a judge is asked and what it answers, whichever program runs it: a server, or a model in this process.

A reward's option `judge` says which one:

    judge: {server: http://127.0.0.1:8000/v1, model: UnifiedReward}      an OpenAI-compatible server
    judge: {model: my/folder-or-hub-id}                                  through transformers, in this process
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import UInt8

from flowrl.config.options import check_options

Pixels = UInt8[np.ndarray, " h w 3"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Question:
    """One user turn, and how it is to be answered.

    Attributes:
        parts: texts and 8-bit images [H, W, 3], in the order in which the judge reads them.
        system: the system turn, None for none.
        max_tokens: length of the answer at most.
        temperature: 0 is greedy.
        top_logprobs: candidates of every answered token whose log-probabilities are wanted; 0 asks for none.
        seed: for sampled answers.
    """

    parts: tuple[str | np.ndarray, ...]
    system: str | None = None
    max_tokens: int = 1
    temperature: float = 0.0
    top_logprobs: int = 0
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came back: the text, for each token its candidates' natural log-probabilities, or why there is nothing.

    Attributes:
        text: the answer, empty where it failed.
        logprobs: a mapping of candidate text to log-probability for each answered token, where asked for.
        error: a short word such as "timeout", "status_500", "truncated" or "garbage"; None where it succeeded.
        tokens: prompt and answer tokens that the server counted, 0 where unknown.
    """

    text: str = ""
    logprobs: tuple[Mapping[str, float], ...] = ()
    error: str | None = None
    tokens: int = 0


class Chat(Protocol):
    """A judge that can be asked; `version` says in the run's manifest which model with which settings."""

    @property
    def version(self) -> str: ...

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions. An item that fails has `error`; nothing is raised for it."""
        ...


def check_chat(judge: Mapping[str, Any], *, owner: str) -> None:
    """Checks the option `judge`: names, types and values. Neither calls a server nor loads weights.

    Raises:
        ValueError: naming what was given and what is allowed.
    """
    factory, check = _functions(judge, owner)
    check_options(factory, judge, owner=f"{owner}, option judge")
    check(**judge)


def build_chat(judge: Mapping[str, Any], *, device: torch.device, owner: str) -> Chat:
    """Makes the judge that `judge` describes.

    Raises:
        ValueError: as `check_chat`, or a model in this process cannot be loaded.
    """
    check_chat(judge, owner=owner)
    chat: Chat = _functions(judge, owner)[0](device=device, **judge)
    return chat


def _functions(judge: Any, owner: str) -> tuple[Any, Any]:
    if not isinstance(judge, Mapping) or "model" not in judge:
        raise ValueError(
            f"{owner}: judge must be a mapping with model, and with server for a model that runs elsewhere, such as "
            f"{{server: http://127.0.0.1:8000/v1, model: NAME}}, got {judge!r}."
        )
    name = "server_chat" if "server" in judge else "local_chat"
    module = importlib.import_module(f"flowrl.rewards.judges.{name}")
    return vars(module)[name], module.check
