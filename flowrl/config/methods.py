"""The sections of a configuration that choose methods: credit, advantages, objective, training times, curriculum.

A method with its own settings takes them as ``options``, the fields of its class; checked before a model loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from flowrl.config.sections import at_least, positive, share
from flowrl.config.strict_yaml import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditConfig:
    """Which images are sampled and scored, and how each stochastic step shares in their rewards (recipe grpo)."""

    method: str = "outcome"
    """Credit method, an entry of ``flowrl.credit.CREDIT``."""
    completion: Literal["full", "clean"] | int | None = None
    """How to finish an intermediate latent for scoring: ODE on the remaining steps (full), this many ODE steps, or the
    one-step clean estimate (clean); null takes the method's own."""
    branches: int | None = None
    """Successors drawn at each branched step; null takes the whole group, from the same start noise."""
    strides: tuple[int, ...] = (1,)
    """Strides of the schedules that complete each branch (granularities of G2RPO)."""
    splits: tuple[int, ...] | None = None
    """Steps at which every node of a tree gets children."""
    children: int = 2
    """Children of a split."""
    split_noise: float | None = None
    """Share of a child's own noise at a split; siblings share the rest (BranchGRPO's s). Null shares nothing."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the method."""

    def __post_init__(self) -> None:
        if isinstance(self.completion, int):
            at_least(1, self, "completion", "credit.")
        at_least(2, self, "branches children", "credit.")
        if not self.strides or any(stride < 1 for stride in self.strides):
            raise ConfigError(f"credit.strides holds strides of at least 1, such as [1, 2], got {list(self.strides)}")
        positive(self, "split_noise", "credit.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """The loss of a recipe."""

    name: str | None = None
    """Which loss; null: the recipe's own (grpo: clip, forward: nft, preference: dpo, backprop: draft, visited: opd)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DmdConfig:
    """Distribution matching of finished images by a fake score, beside the loss of recipe grpo (DMD2, RTDMD)."""

    weight: float = 0.0
    """Weight of its loss beside the policy loss, each a mean; 0 leaves it out. RTDMD has 0.001 over 2 trained steps."""
    guidance_scale: float = 4.5
    """Guidance of the teacher, which is the model without the LoRA."""
    fake_lr: float = 3e-5
    """Learning rate of the fake score, a second LoRA that learns what the policy draws; otherwise as in ``optim``."""
    fake_updates: int = 2
    """Updates of the fake score before each update of the policy."""

    def __post_init__(self) -> None:
        at_least(0, self, "weight guidance_scale", "dmd.")
        positive(self, "fake_lr", "dmd.")
        at_least(1, self, "fake_updates", "dmd.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapingConfig:
    """A change of the advantages after normalisation."""

    name: Literal["none", "dcpo", "a_grae", "real"] = "none"
    """Smooth standardisation over a prompt's visits (dcpo), asymmetry by success rate (a_grae), or verdicts as labels
    of a classifier (real)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardMapConfig:
    """A map of the rewards before credit is assigned."""

    name: Literal["none", "logistic", "backward_corrected", "forward_weights"] = "none"
    """Logistic by percentiles (MedGRPO), or a correction for a verifier with known error rates."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurriculumConfig:
    """Which prompts an iteration trains on, instead of one shuffled pass after another."""

    sampling: Literal["shuffled", "replay", "gaussian"] = "shuffled"
    """Shuffled passes; hard prompts come back (replay); or prompts are drawn by closeness to even odds (gaussian)."""
    max_rounds: int = 1
    """Maximum rounds of sampling in an iteration until ``prompts_per_step`` groups have unequal rewards (DAPO's dynamic
    sampling); 1 is off."""
    accuracy_scaled_kl: bool = False
    """Scale ``kl_coef`` by the group's success rate (FG-ExPO)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the prompt sampling."""

    def __post_init__(self) -> None:
        at_least(1, self, "max_rounds", "curriculum.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimesConfig:
    """Noise levels at which finished images get noise again (recipes forward and preference)."""

    kind: Literal["schedule", "discrete", "discrete_wo_init", "discrete_with_init", "logit_normal", "uniform"] = (
        "schedule"
    )
    """Rule; ``schedule`` takes the rollout's own levels in random order, for each image."""
    count: int = 4
    """Draws per image and update."""
    fraction: float | None = None
    """Leading share of the schedule from which the kinds schedule and discrete draw; null takes all of it for schedule,
    0.99 for the kinds discrete."""
    shift: float = 1.0
    """Static shift of logit_normal and uniform towards noise; 3 for SD3."""

    def __post_init__(self) -> None:
        at_least(1, self, "count", "times.")
        positive(self, "shift", "times.")
        share("times.fraction", self.fraction)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsConfig:
    """How the old policy follows the trained one (recipe forward)."""

    old_decay: Literal["copy", "linear", "delayed", "awm", "crd", "constant"] = "linear"
    """copy: the trained policy itself; linear: decay min(0.001 s, 0.5) after s updates; delayed: 0 until 75, then up to
    0.999; awm: min(0.001 s, 0.3); crd: min(0.25 + 0.005 s, 0.999); constant: ``old_decay_value``."""
    old_decay_value: float = 0.9
    """Decay of the kind constant."""

    def __post_init__(self) -> None:
        share("slots.old_decay_value", self.old_decay_value)


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetConfig:
    """Ends a run once it has spent this much, without evaluations; the first limit reached counts."""

    nfe: int | None = None
    """Network evaluations of one image: forward in rollout, completions, update and reference, and backward."""
    seconds: float | None = None
    """Seconds of training."""
    images: int | None = None
    """Images decoded and scored."""
    evals: int = 0
    """Evaluations spread evenly over the budget, or over ``num_iterations`` if those end first, the last at its end; 0
    leaves it to ``eval_every``."""

    def __post_init__(self) -> None:
        at_least(1, self, "nfe images", "budget.")
        at_least(0, self, "evals", "budget.")
        positive(self, "seconds", "budget.")

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by what they count."""
        return {name: value for name in ("nfe", "seconds", "images") if (value := getattr(self, name)) is not None}
