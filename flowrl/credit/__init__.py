"""Credit assignment: from scored images to one number for each stochastic step, one file per family of methods.

A method is a frozen dataclass: its fields are the options, calling it `(sampled, reward_KF, context) -> Credit` is the
method. To add one, write the class and give it an entry in `CREDIT`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from flowrl.credit.branches import G2rpo, SelfOpd, TempFlow
from flowrl.credit.dense import DenseGrpo, Outcome, Stepwise
from flowrl.credit.tp_grpo import TpGrpo, turning_points
from flowrl.credit.trees import BranchGrpo, TreeGrpo, back_up
from flowrl.credit.vgpo import Vgpo

__all__ = ["CREDIT", "Method", "turning_points"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A credit method and its needs in the rollout."""

    options: type[Any]
    """The class of its options; `options(...)(sampled, reward_KF, context) -> Credit`."""
    plan: Literal["trajectories", "branches", "tree"] = "trajectories"
    """How paths are sampled."""
    values: bool = False
    """Whether intermediate latents are completed and scored too."""
    completion: Literal["full", "clean"] | int = "full"
    """How, unless the run says otherwise: "full", "clean" or a number of ODE steps."""
    against_ode: bool = False
    """Whether branches are compared with the ODE's own images, by the means of their steps."""
    merged: bool = False
    """Whether the weighted sum of the rewards is its only channel."""
    back_up: Callable[..., Tensor] | None = None
    """Applied to the normalised advantages `(sampled, advantage_M, per_dim=...) -> advantage_M`."""

    @property
    def whole_paths(self) -> bool:
        """Whether every image has a path of its own, rather than sharing transitions with others."""
        return self.plan == "trajectories"

    @property
    def of_outcomes(self) -> bool:
        """Whether all steps of a path get the same credit, that of its finished image."""
        return self.whole_paths and not self.values


CREDIT = {
    "outcome": Method(options=Outcome),
    "tp_grpo": Method(options=TpGrpo, values=True, merged=True),
    "dense_grpo": Method(options=DenseGrpo, values=True),
    "stepwise": Method(options=Stepwise, values=True, completion=5),
    "vgpo": Method(options=Vgpo, values=True, completion="clean", merged=True),
    "g2rpo": Method(options=G2rpo, plan="branches"),
    "tempflow": Method(options=TempFlow, plan="branches"),
    "self_opd": Method(options=SelfOpd, plan="branches", against_ode=True, merged=True),
    "branch_grpo": Method(options=BranchGrpo, plan="tree"),
    "tree_grpo": Method(options=TreeGrpo, plan="tree", back_up=back_up),
}
