"""What `flowrl init` asks on a terminal: each answer is looked at when it is given, and asked for again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flowrl.config.spelling import closest, edit_distance
from flowrl.config.train import ConfigError, resolve_path
from flowrl.planning.catalogue import entries
from flowrl.runtime.scrubbing import say as print


@dataclass(frozen=True, kw_only=True, slots=True)
class InitQuestion:
    """A question, what an empty answer means, and what is wrong with an answer (None: nothing)."""

    text: str
    usual: str = ""
    fault: Callable[[str], str | None]


def ask(given: Mapping[str, str | None]) -> dict[str, str | None]:
    """Asks for what is not given, where somebody sits at a terminal; an end of the input leaves the rest unasked."""
    answers = dict(given)
    if sys.stdin is None or not sys.stdin.isatty():
        return answers
    for name, question in QUESTIONS.items():
        while answers[name] is None:
            usual = f" [{question.usual}]" if question.usual else ""
            print(f"{question.text}{usual}: ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            answer = line.strip() or question.usual
            fault = question.fault(answer) if answer else None
            if fault is None:
                answers[name] = answer or None
                break
            print(f"  {fault}", file=sys.stderr)
            if not line:
                return answers
    return answers


def card_fault(answer: str) -> str | None:
    """A card has a whole number of GB."""
    if answer.isdecimal() and int(answer) > 0:
        return None
    return f"a card has a whole number of GB, 24 say, got {answer}"


def _model_fault(answer: str) -> str | None:
    """Nothing at a path, or a published name with a slip in it; what else a hub holds is not known here."""
    if Path(answer).expanduser().exists():
        return None
    published = [
        line.split(" (")[0] for entry in entries("families") for line in dict(entry.more)["models"].split("\n")
    ]
    near = closest(answer, published)
    if near is not None and 0 < edit_distance(answer, near) <= 2:
        return f"there is no published {answer}: did you mean {near}?"
    return None if answer.count("/") == 1 and not answer.startswith((".", "/")) else _place_fault(answer)


def _reward_fault(answer: str) -> str | None:
    names = [entry.name for entry in entries("rewards")]
    file, colon, function = answer.partition(":")
    if answer in names or (file.endswith(".py") and colon and function and Path(file).is_file()):
        return None
    if file.endswith(".py"):
        return f"a reward of yours is FILE.py:FUNCTION of a file that is there, got {answer}"
    near = closest(answer, names)
    return f"there is no reward {answer}: " + (f"did you mean {near}?" if near else "'flowrl list rewards' has them")


def _place_fault(answer: str) -> str | None:
    try:
        resolve_path(answer)
    except ConfigError as error:
        return str(error)
    return None


QUESTIONS = {
    "model": InitQuestion(
        text="Model (hub id or folder)", usual="stabilityai/stable-diffusion-3.5-medium", fault=_model_fault
    ),
    "card": InitQuestion(text="Memory of one card in GB", usual="24", fault=card_fault),
    "reward": InitQuestion(text="Reward ('flowrl list rewards'; empty: the configuration's own)", fault=_reward_fault),
    "prompts": InitQuestion(text="Prompt file (empty: the configuration's own)", fault=_place_fault),
}
"""What is asked, by the name of the flag that says it too."""
