"""Rewards: what an image is worth, higher is better.

A reward is a function object `reward(inputs: RewardInputs) -> RewardOutput` with the attributes of `Reward`. `REWARDS`
names the built-in ones, `build_reward` makes one, `flowrl.rewards.compose` sums a run's list of rewards,
and a user's own file is loaded by `flowrl.rewards.base.user_file`.

Shapes: B images of one batch, [H, W] their size.
"""

from __future__ import annotations

from flowrl.rewards.base import (
    JUDGED,
    KINDS,
    REWARDS,
    VERDICTS,
    FunctionReward,
    Model,
    NamesModels,
    Reward,
    RewardInputs,
    RewardOptions,
    RewardOutput,
    SharesPart,
    TrainedReward,
    addresses_of,
    aspects_of,
    build_reward,
    can_be_differentiable,
    gives_verdicts,
    load_target,
    models_of,
    option_names,
    output_of,
    reproduction_of,
    reward_options,
    tensor_output,
    to_uint8,
)

__all__ = [
    "JUDGED",
    "KINDS",
    "REWARDS",
    "VERDICTS",
    "FunctionReward",
    "Model",
    "NamesModels",
    "Reward",
    "RewardInputs",
    "RewardOptions",
    "RewardOutput",
    "SharesPart",
    "TrainedReward",
    "addresses_of",
    "aspects_of",
    "build_reward",
    "can_be_differentiable",
    "gives_verdicts",
    "load_target",
    "models_of",
    "option_names",
    "output_of",
    "reproduction_of",
    "reward_options",
    "tensor_output",
    "to_uint8",
]
