"""The questions of a first configuration, and checks of the answers as soon as they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flowrl.config.base import card_memory
from flowrl.config.options import unknown_name
from flowrl.config.train import resolve_path
from flowrl.planning.bases import Wish, base_for
from flowrl.planning.catalogue import entries
from flowrl.runtime.failures import found_by

FIRST = "my.yaml"
"""The default file to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InitQuestion:
    """A question, the meaning of an empty answer, a check that returns a fault or None, and when to ask it."""

    text: str
    usual: str = ""
    fault: Callable[[str], str | None]
    asked: Callable[[Mapping[str, str | None]], bool] = lambda answers: True


def fault_by(check: Callable[[str], object], answer: str) -> str | None:
    """What a check refuses of an answer."""
    return next(iter(found_by(lambda: check(answer))), None)


def hours_fault(answer: str) -> str | None:
    """Hours are a number above 0."""
    try:
        right = 0 < float(answer) < 1e5
    except ValueError:
        right = False
    return None if right else f"hours are a number above 0, 10 for an evening, got {answer}"


def model_fault(answer: str) -> str | None:
    """Nothing at a path, a folder of no family, or a model of none that a configuration ships for."""
    from flowrl.pipelines import family_of

    folder = Path(answer).expanduser()
    if folder.is_dir():
        return fault_by(family_of, str(folder))
    if answer.startswith((".", "/", "asset:")) or folder.is_file():
        return fault_by(resolve_path, answer)
    return fault_by(lambda model: base_for(Wish(model=model, card=0, recommended=True)), answer)


def reward_fault(answer: str) -> str | None:
    """Neither the name of a reward nor a function of a file that is there."""
    names = [entry.name for entry in entries("rewards")]
    file, colon, function = answer.partition(":")
    if answer in names or (file.endswith(".py") and colon and function and Path(file).is_file()):
        return None
    if file.endswith(".py"):
        return f"a reward of yours is FILE.py:FUNCTION of a file that is there, got {answer}"
    return unknown_name("reward", answer, names)


def out_fault(answer: str) -> str | None:
    """A file that is there already, or in a folder that is not."""
    path = Path(answer).expanduser()
    if path.exists():
        return f"{answer} exists already: name another file"
    return None if path.parent.is_dir() else f"there is no folder {path.parent}"


QUESTIONS = {
    "model": InitQuestion(
        text="Model (hub id or folder)", usual="stabilityai/stable-diffusion-3.5-medium", fault=model_fault
    ),
    "card": InitQuestion(text="Memory of one card in GB", usual="24", fault=partial(fault_by, card_memory)),
    "prompts": InitQuestion(text="Prompt file (empty: prompts that ship)", fault=partial(fault_by, resolve_path)),
    "eval_prompts": InitQuestion(
        text="Held-out prompt file (empty: a tenth of yours is held out)",
        fault=partial(fault_by, resolve_path),
        asked=lambda answers: answers["prompts"] is not None,
    ),
    "reward": InitQuestion(text="Reward (empty: the recommended configuration's own)", fault=reward_fault),
    "hours": InitQuestion(text="Hours after which it ends", usual="10", fault=hours_fault),
    "out": InitQuestion(text="File to write", usual=FIRST, fault=out_fault),
}
"""The questions, by the parameter of `flowrl.init` that answers them too."""
