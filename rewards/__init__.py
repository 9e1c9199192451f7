"""Rewards: what an image is worth, higher is better.

A reward is a function object `reward(inputs: RewardInputs) -> RewardOutput` with the attributes of `Reward`. `REWARDS`
names the built-in ones, `build_reward` makes one, `flowrl.rewards.compose` sums a run's list of rewards,
and a user's own file is loaded by `flowrl.rewards.base.user_file`.

Shapes: B images of one batch, [H, W] their size.
"""

from __future__ import annotations

from flowrl.rewards.base import ABSENT as ABSENT
from flowrl.rewards.base import JUDGED as JUDGED
from flowrl.rewards.base import KINDS as KINDS
from flowrl.rewards.base import REWARDS as REWARDS
from flowrl.rewards.base import VERDICTS as VERDICTS
from flowrl.rewards.base import FunctionReward as FunctionReward
from flowrl.rewards.base import Model as Model
from flowrl.rewards.base import NamesModels as NamesModels
from flowrl.rewards.base import Reward as Reward
from flowrl.rewards.base import RewardInputs as RewardInputs
from flowrl.rewards.base import RewardOptions as RewardOptions
from flowrl.rewards.base import RewardOutput as RewardOutput
from flowrl.rewards.base import SharesPart as SharesPart
from flowrl.rewards.base import TrainedReward as TrainedReward
from flowrl.rewards.base import addresses_of as addresses_of
from flowrl.rewards.base import asks_people as asks_people
from flowrl.rewards.base import aspects_of as aspects_of
from flowrl.rewards.base import build_reward as build_reward
from flowrl.rewards.base import can_be_differentiable as can_be_differentiable
from flowrl.rewards.base import gives_verdicts as gives_verdicts
from flowrl.rewards.base import load_target as load_target
from flowrl.rewards.base import models_of as models_of
from flowrl.rewards.base import option_names as option_names
from flowrl.rewards.base import output_of as output_of
from flowrl.rewards.base import reproduction_of as reproduction_of
from flowrl.rewards.base import reward_options as reward_options
from flowrl.rewards.base import tensor_output as tensor_output
from flowrl.rewards.base import to_uint8 as to_uint8
