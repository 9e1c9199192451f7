"""Reads the rewards of a command line (names, functions of files, or a YAML file with a list) and their options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.config.base import read_with_base
from flowrl.config.options import unknown_name
from flowrl.config.strict_yaml import Override, apply_override
from flowrl.config.train import find_config
from flowrl.rewards import REWARDS


def reward_list(given: Sequence[str]) -> list[dict[str, Any]]:
    """The rewards of a command line as specs, without the weights of a file, which are for training. Raises ValueError:
    neither names of rewards nor a file with rewards, or a name twice."""
    if twice := [name for name in given if given.count(name) > 1]:
        raise ValueError(f"reward {twice[0]} is named twice: name it once, or give a YAML file with options and labels")
    if (wrong := next((name for name in given if _named(name) is None), None)) is None:
        return [spec for name in given if (spec := _named(name))]
    if len(given) > 1:
        raise ValueError(unknown_name("reward", wrong, REWARDS) + " A configuration must stand alone.")
    try:
        path = find_config(wrong)
    except ValueError:
        if re.search(r"/|\.ya?ml$", wrong):
            raise
        unknown = unknown_name("reward", wrong, REWARDS)
        raise ValueError(f"{unknown} Or give FILE.py:FUNCTION, or YAML with a list rewards:.") from None
    rewards = read_with_base(path).get("rewards")
    if not isinstance(rewards, list) or not rewards or not all(isinstance(spec, Mapping) for spec in rewards):
        raise ValueError(f"{path}: rewards must be a list with entries such as {{name: hps}}, got {rewards!r}.")
    training = ("weight", "schedule", "clip", "gate", "routes")
    return [{key: value for key, value in spec.items() if key not in training} for spec in rewards]


def _named(name: str) -> dict[str, Any] | None:
    """A built-in reward, or a function of a Python file; None for anything else."""
    if own := re.fullmatch(r"(.+\.py):?(\w*)", name):
        return {"file": own[1], "function": own[2] or "FUNCTION"}  # a file alone is answered with its functions
    return {"name": name} if name in REWARDS else None


def reward_label(spec: Mapping[str, Any]) -> str:
    """The name of a reward."""
    return str(spec.get("label") or spec.get("name") or spec.get("function"))


def reward_specs(rewards: str, options: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rewards of a command line as specs: names by commas or a YAML file, and `--option` texts.

    Args:
        rewards: "pick_score,hps" or a file with a list `rewards:`.
        options: "scale=raw", or "pick_score.scale=raw", which it must be with several rewards.

    Raises ValueError: an unknown reward, an option without a reward, or no such file.
    """
    specs = [dict(spec) for spec in reward_list([name.strip() for name in rewards.split(",")])]
    labels = [reward_label(spec) for spec in specs]
    for text in options:
        owner, dot, rest = text.partition("=")[0].partition(".")
        if dot and owner in labels:
            text = text.removeprefix(f"{owner}.")
        elif len(specs) > 1:
            raise ValueError(
                f"`options` {text}: with several rewards begin with the name of one, {labels[0]}.KEY=VALUE; "
                + unknown_name("reward", owner if rest else text, labels)
            )
        spec = specs[labels.index(owner) if dot and owner in labels else 0]
        merged: dict[str, Any] = dict(spec.get("options") or {})
        apply_override(merged, text)
        spec["options"] = _plain(merged)
    return specs


def _plain(value: Any) -> Any:
    """A value with overrides replaced by their values."""
    value = value.value if isinstance(value, Override) else value
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, dict) else value
