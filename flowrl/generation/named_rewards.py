"""The rewards that a command line names: built-in names, or a YAML file with a list of rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.config.base import read_with_base
from flowrl.config.options import unknown_name
from flowrl.config.train import find_config
from flowrl.rewards import REWARDS


def reward_list(given: Sequence[str]) -> list[dict[str, Any]]:
    """The rewards that a command line names, as specs; what a file says of weights is for training and left out.

    Raises:
        ValueError: neither names of rewards nor a file with rewards.
    """
    if all(name in REWARDS for name in given):
        return [{"name": name} for name in given]
    if len(given) > 1:
        wrong = next(name for name in given if name not in REWARDS)
        raise ValueError(unknown_name("reward", wrong, REWARDS) + " A configuration must stand alone.")
    try:
        path = find_config(given[0])
    except ValueError as error:
        looks_like_file = given[0].endswith((".yaml", ".yml")) or "/" in given[0]
        raise (
            error
            if looks_like_file
            else ValueError(unknown_name("reward", given[0], REWARDS) + " Or give a YAML file with a list rewards:.")
        ) from None
    rewards = read_with_base(path).get("rewards")
    if not isinstance(rewards, list) or not rewards or not all(isinstance(spec, Mapping) for spec in rewards):
        raise ValueError(f"{path}: rewards must be a list with entries such as {{name: hps}}, got {rewards!r}.")
    training = ("weight", "schedule", "clip", "gate")
    return [{key: value for key, value in spec.items() if key not in training} for spec in rewards]
