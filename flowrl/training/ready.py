"""A configuration ready to train, with everything resolved that is known before weights load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.config.train import TrainConfig
from flowrl.credit import Method
from flowrl.pipelines import ModelFamily
from flowrl.pipelines.weights.lora_files import Lora
from flowrl.rewards.base.specs import CheckedReward
from flowrl.samplers import Kernel
from flowrl.training.processes.mesh import Layout
from flowrl.training.prompting import RunPrompts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ready:
    """The parts of a run, resolved once; `flowrl.session.preflight.preflight` makes it."""

    config: TrainConfig
    recipe: Any  # the module that trains (`flowrl.session.preflight.recipe_of`)
    prompts: RunPrompts  # to train on and to evaluate on
    family: ModelFamily
    location: str  # of the model, at its revision
    rewards: tuple[CheckedReward, ...]  # that are trained on, with their options
    measured: tuple[CheckedReward, ...]  # those that evaluations add, `eval.rewards`
    kernel: Kernel  # of the sampler; its sigma_max is known with the model's schedule
    method: Method  # of credit assignment, where the recipe assigns credit
    objective: Any  # what the recipe's `objective_of` says
    layout: Layout  # of the processes as they were launched
    lora: Lora | None  # that the run starts from; None where it starts from none
