"""A configuration that can be trained, with everything resolved that is known before weights load."""

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
    """What a run is made of, resolved once: `flowrl.session.preflight.preflight` makes it.

    Attributes:
        config: the settings.
        recipe: the module that trains (`flowrl.session.preflight.recipe_of`).
        prompts: to train on and to evaluate on.
        family: of the model.
        location: of the model, at its revision.
        rewards: that are trained on, with their options.
        measured: those that evaluations add, `eval.rewards`.
        kernel: of the sampler; its sigma_max is known with the model's schedule.
        method: of credit assignment, where the recipe assigns credit.
        objective: what the recipe's `objective_of` says.
        layout: of the processes as they were launched.
        lora: that the run starts from; None where it starts from none.
    """

    config: TrainConfig
    recipe: Any
    prompts: RunPrompts
    family: ModelFamily
    location: str
    rewards: tuple[CheckedReward, ...]
    measured: tuple[CheckedReward, ...]
    kernel: Kernel
    method: Method
    objective: Any
    layout: Layout
    lora: Lora | None
