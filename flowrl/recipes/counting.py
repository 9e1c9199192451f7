"""What a recipe knows of a run before it starts: network evaluations, copies of the weights, sizes of batches.

`counts(config)` of each recipe makes it. One evaluation is one row of a batch, so guidance in two passes counts twice.
Rollouts, completions and images are known exactly. Updates are the most there can be, unless `exact`: a micro-batch is
left out if none of its rows is trained, for equal rewards, a failed image, or a method's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowrl.config.train import Geometry, TrainConfig

Passes = Callable[[float], int]
"""Network rows that a family's guidance takes per sample at a scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Rows that the network evaluates, by purpose: `update` with rows scored again without gradient, `backward` those
    walked back, `images` those decoded and scored."""

    rollout: int = 0
    completion: int = 0
    update: int = 0
    reference: int = 0
    backward: int = 0
    images: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in Counts.__slots__})

    @property
    def forward(self) -> int:
        """Forward passes, with or without gradient."""
        return self.rollout + self.completion + self.update + self.reference

    @property
    def total(self) -> int:
        """What budgets count."""
        return self.forward + self.backward


STEP = 8
"""Latents of a row while a step is taken: source, output, noise, and what a kernel makes of them on the way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRecord:
    """Latents of an iteration's rollout, of all processes."""

    columns: tuple[int, ...] = ()
    """Of each tensor that waits on the host for the update of a round; each has its room."""
    rounds: int = 1
    """At most, of an iteration; the columns of several are joined at the end."""
    batches: tuple[tuple[int, int], ...] = ()
    """Latents on the device of a row of the batches that are drawn, and how many rows there are."""
    held: int = 0
    """Latents on the devices until the update, whatever the batch."""
    finished: int = 0
    """Scored after all are drawn; 0 if each batch is scored when it is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeCounts:
    """What a configuration's recipe counts."""

    objective: str
    """Its name, also if the configuration leaves it to the recipe."""
    credit: str = ""
    """Name of the credit method; empty without one."""
    of_iteration: Callable[[int, Passes, Geometry], Counts]
    """Evaluations of one iteration over all processes, from its number, the passes of guidance and how images are
    split; with `curriculum.max_rounds` above 1, those of one of its rounds."""
    exact: bool = False
    """Whether updates are known exactly."""
    slots: int = 0
    """Copies of the trained weights that the recipe keeps, besides the average."""
    teachers: int = 0
    """Other LoRAs of their size, which no checkpoint has."""
    multiple: int = 1
    """A micro-batch is a multiple of so many images."""
    micro_batch_size: Callable[[int], int] | None = None
    """Its size for a number of drawing processes, if not by `config.resolve_batch`."""
    graphs: Callable[[], int] = lambda: 1
    """Network calls whose activations a trained image holds at once."""
    gradients: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Of the LoRA, kept for each image: on the host, and on the device while it is drawn."""
    through_rewards: bool = False
    """Whether decoder and rewards keep activations too."""
    record: Callable[[], RolloutRecord] = RolloutRecord
    """Latents of an iteration's rollout."""


def only_here(config: TrainConfig) -> str:
    """Why workers cannot draw for a run: "", for recipes for which they always can."""
    return ""


def draws_nothing(config: TrainConfig, read: str) -> str:
    """Why workers cannot draw for an objective that reads what it is trained on; empty where they draw evaluations."""
    if (config.eval_every or config.budget.evals) and config.workers.engine is None:
        return ""
    return f"objective {config.objective.name} reads its {read} from files and draws nothing, not even evaluations"


def trained_scale(config: TrainConfig) -> float:
    """Guidance of the trained velocity, if it is that of sampling."""
    return config.sampler.guidance_scale


def walked(train_negative: bool | str, scale: float, passes: Passes) -> int:
    """Network rows of a velocity, trained at a guidance scale, that the backward pass goes through."""
    return 1 if train_negative is False else passes(scale)
