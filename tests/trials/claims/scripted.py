"""What the scripts with scripted judges share: a judge that every reward asks, and chances drawn from counters."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

HELPERS = Path(__file__).parents[2] / "helpers"
sys.path[:0] = [str(Path(__file__).parents[1]), str(HELPERS), str(HELPERS / "families"), str(HELPERS / "judges")]

from origin import origin as origin  # noqa: E402
from scripted_judges import ScriptedJudge  # noqa: E402

from flowrl.rewards.judges.chat import Answer, Question  # noqa: E402
from flowrl.rewards.judges.server_chat import ServerChat  # noqa: E402
from flowrl.runtime.randomness import counter_integers  # noqa: E402

_MANY = 1 << 30


def judge_by(answer: Callable[[Question], Answer]) -> None:
    """Makes every reward of this process ask this function in place of a server."""
    judge = ScriptedJudge(answer)
    ServerChat.build = lambda self, device: judge  # type: ignore[assignment, method-assign, return-value]


def chance(*key: object) -> float:
    """A number in [0, 1) that belongs to a key."""
    return counter_integers(0, _MANY, 0, "claims", *map(str, key)) / _MANY


def named(image: np.ndarray) -> str:
    """What tells an image from others."""
    return hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest()


def images_of(question: Question) -> list[np.ndarray]:
    """The images of a question, as the judge sees them."""
    return [part for part in question.parts if isinstance(part, np.ndarray)]


def area(score: np.ndarray, right: np.ndarray) -> float:
    """Area under the ROC curve: how often a right item scores above a wrong one, a tie being half."""
    above = score[right][:, None] - score[~right][None]
    return float(((above > 0) + 0.5 * (above == 0)).mean())
