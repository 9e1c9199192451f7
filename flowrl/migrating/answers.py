"""The questions of a first configuration, and checks of the answers as soon as they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flowrl.config.spelling import closest, edit_distance
from flowrl.config.train import ConfigError, resolve_path
from flowrl.planning.bases import Wish, base_for
from flowrl.planning.catalogue import entries, families
from flowrl.runtime.files import read_json

FIRST = "my.yaml"
"""The default file to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InitQuestion:
    """A question, the meaning of an empty answer, a check that returns a fault or None, and when to ask it."""

    text: str
    usual: str = ""
    fault: Callable[[str], str | None]
    asked: Callable[[Mapping[str, str | None]], bool] = lambda answers: True


def card_fault(answer: str) -> str | None:
    """A card has a whole number of GB."""
    if answer.isdecimal() and int(answer) > 0:
        return None
    return f"a card has a whole number of GB, 24 say, got {answer}"


def hours_fault(answer: str) -> str | None:
    """Hours are a number above 0."""
    try:
        right = 0 < float(answer) < 1e5
    except ValueError:
        right = False
    return None if right else f"hours are a number above 0, 10 for an evening, got {answer}"


def model_fault(answer: str) -> str | None:
    """Nothing at a path, a published name with a slip in it, or a model of no family that a configuration ships for."""
    folder = Path(answer).expanduser()
    if folder.is_dir():
        index = folder / "model_index.json"
        known = [stock for one in families().values() for stock in one["stock"]]
        if index.is_file() and read_json(index).get("_class_name") in known:
            return None
        return f"{answer} is no folder of a pipeline that a family loads: it has to hold a model_index.json"
    published = [name for one in families().values() for name in one["checkpoints"]]
    near = closest(answer, published)
    if answer in published or folder.is_file():
        return None
    if near is not None and 0 < edit_distance(answer, near) <= 2:
        return f"there is no published {answer}: did you mean {near}?"
    if answer.count("/") != 1 or answer.startswith((".", "/", "asset:")):
        return place_fault(answer)
    try:
        base_for(Wish(model=answer, card=0, recommended=True))
    except ValueError as error:
        return str(error)
    return None


def reward_fault(answer: str) -> str | None:
    """Neither the name of a reward nor a function of a file that is there."""
    names = [entry.name for entry in entries("rewards")]
    file, colon, function = answer.partition(":")
    if answer in names or (file.endswith(".py") and colon and function and Path(file).is_file()):
        return None
    if file.endswith(".py"):
        return f"a reward of yours is FILE.py:FUNCTION of a file that is there, got {answer}"
    near = closest(answer, names)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(names)}"
    return f"there is no reward {answer}: {hint}"


def place_fault(answer: str) -> str | None:
    """Nothing is there."""
    try:
        resolve_path(answer)
    except ConfigError as error:
        return str(error)
    return None


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
    "card": InitQuestion(text="Memory of one card in GB", usual="24", fault=card_fault),
    "prompts": InitQuestion(text="Prompt file (empty: prompts that ship)", fault=place_fault),
    "eval_prompts": InitQuestion(
        text="Held-out prompt file (empty: a tenth of yours is held out)",
        fault=place_fault,
        asked=lambda answers: answers["prompts"] is not None,
    ),
    "reward": InitQuestion(text="Reward (empty: the recommended configuration's own)", fault=reward_fault),
    "hours": InitQuestion(text="Hours after which it ends", usual="10", fault=hours_fault),
    "out": InitQuestion(text="File to write", usual=FIRST, fault=out_fault),
}
"""The questions, by the parameter of `flowrl.init` that answers them too."""
