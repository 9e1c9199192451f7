"""Credit assignment: from scored images to one number for each stochastic step, one file a family of methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flowrl.credit.branches import g2rpo, tempflow
from flowrl.credit.dense import dense_grpo
from flowrl.credit.outcome import outcome
from flowrl.credit.stepwise import stepwise
from flowrl.credit.tp_grpo import tp_grpo, turning_points
from flowrl.credit.trees import back_up, branch_grpo, tree_grpo
from flowrl.credit.vgpo import vgpo
from flowrl.trajectory import Credit

__all__ = ["CREDIT", "Method", "turning_points"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A credit method and what it asks of the rollout.

    Attributes:
        credit: `(sampled, reward_KF, **options) -> Credit`.
        plan: how paths are sampled.
        values: latents on the way are completed and scored too.
        completion: how, unless the run says otherwise: "full", "clean" or a number of ODE steps.
        merged: takes the weighted sum of the rewards as its only channel.
        needs_step_std: takes `step_std`, the kernel's standard deviation at every step.
        needs_dims: takes `per_dim`, the latent dimensions that log-densities are divided by before a softmax.
        needs_everyone: takes `gather` and `rank`, to look at the rows of all processes.
        back_up: applied to the normalised advantages `(sampled, advantage_M, per_dim=...) -> advantage_M`.
    """

    credit: Callable[..., Credit]
    plan: Literal["trajectories", "branches", "tree"] = "trajectories"
    values: bool = False
    completion: Literal["full", "clean"] | int = "full"
    merged: bool = False
    needs_step_std: bool = False
    needs_dims: bool = False
    needs_everyone: bool = False
    back_up: Callable[..., Tensor] | None = None


CREDIT = {
    "outcome": Method(credit=outcome),
    "tp_grpo": Method(credit=tp_grpo, values=True, merged=True, needs_everyone=True),
    "dense_grpo": Method(credit=dense_grpo, values=True),
    "stepwise": Method(credit=stepwise, values=True, completion=5),
    "vgpo": Method(credit=vgpo, values=True, completion="clean", merged=True),
    "g2rpo": Method(credit=g2rpo, plan="branches"),
    "tempflow": Method(credit=tempflow, plan="branches", needs_step_std=True),
    "branch_grpo": Method(credit=branch_grpo, plan="tree", needs_dims=True),
    "tree_grpo": Method(credit=tree_grpo, plan="tree", back_up=back_up),
}
