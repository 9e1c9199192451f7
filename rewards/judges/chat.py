"""What a judge is asked and what it answers, whichever program runs it: a server, or a model in this process.

A reward's option `judge` says which one:

    judge: {server: http://127.0.0.1:8000/v1, model: UnifiedReward}      an OpenAI-compatible server
    judge: {model: my/folder-or-hub-id}                                  through transformers, in this process
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import UInt8

from flowrl.config.options import build_options
from flowrl.rewards import load_target

Pixels = UInt8[np.ndarray, " h w 3"]

TOP_LOGPROBS = 20
"""Candidates of a token that are asked for, the most that hosted servers give."""

CHATS = {
    "local": "flowrl.rewards.judges.local_chat:LocalChat",
    "server": "flowrl.rewards.judges.server_chat:ServerChat",
}
"""Name -> "module:Class", the options of a judge: a frozen dataclass whose `build(device)` makes the `Chat`."""


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
        schema: JSON schema of the answer, for servers that hold to one (`structured: true`).
    """

    parts: tuple[str | np.ndarray, ...]
    system: str | None = None
    max_tokens: int = 1
    temperature: float = 0.0
    top_logprobs: int = 0
    seed: int | None = None
    schema: Mapping[str, Any] | None = None

    @property
    def is_text(self) -> bool:
        """Whether the answer is read as text, so that one which is cut off at `max_tokens` has failed."""
        return self.max_tokens > 1 and not self.top_logprobs


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


class ChatOptions(Protocol):
    """The options of a judge; see `CHATS`."""

    def build(self, device: torch.device) -> Chat:
        """Makes the judge; loads its weights, if it runs here."""


def is_server(judge: Mapping[str, Any]) -> bool:
    """Whether a judge runs elsewhere, so that asking it means waiting."""
    return "server" in judge


def check_chat(judge: Mapping[str, Any], *, owner: str = "judge") -> ChatOptions:
    """The checked options of a judge. Neither calls a server nor loads weights.

    Args:
        judge: the option, see the module.
        owner: what messages begin with.

    Raises:
        ValueError: naming what was given and what is allowed.
    """
    made: ChatOptions = build_options(load_target(CHATS["server" if is_server(judge) else "local"]), judge, owner=owner)
    return made


def build_chat(judge: Mapping[str, Any], *, device: torch.device, owner: str = "judge") -> Chat:
    """Makes the judge that `judge` describes.

    Raises:
        ValueError: as `check_chat`, or a model in this process cannot be loaded.
    """
    return check_chat(judge, owner=owner).build(device)
