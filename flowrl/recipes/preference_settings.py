"""Options of recipe preference, and what it refuses before a model loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flowrl.config.options import build_options, entry_of
from flowrl.config.readers import refuse_unread
from flowrl.config.train import Geometry, TrainConfig, resolve_path
from flowrl.prompts.pairs import read_pairs
from flowrl.recipes.counting import STEP, Counts, Passes, RecipeCounts, RolloutRecord, draws_nothing, walked
from flowrl.recipes.forward_settings import check_times, readers_of_times
from flowrl.samplers.windows import flash_tail
from flowrl.training.parts import check_density
from flowrl.training.paths import stochastic_steps
from flowrl.training.processes.mesh import data_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Online:
    """Online Diffusion-DPO (arXiv 2311.12908) on the best and the worst image of each drawn group."""

    beta: float = 100.0
    """For mean squared errors; 100 to 5000 are published."""
    ref_update_every: int | None = None
    """Iterations after which the reference becomes a copy of the policy; null never."""
    behaviour: Literal["old", "policy"] = "old"
    """Which weights sample: the reference, as in Flow-GRPO's DPO, or the policy, as in Flow-Factory's."""

    def __post_init__(self) -> None:
        _check_values(self.beta, self.ref_update_every)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offline:
    """Diffusion-DPO (arXiv 2311.12908) on a file of preferred and rejected images; draws nothing."""

    pairs: str
    """A JSONL file of pairs, or a folder with `pairs.jsonl` (`flowrl.prompts.pairs`)."""
    beta: float = 100.0
    """As in dpo."""

    def __post_init__(self) -> None:
        _check_values(self.beta, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """D3PO (arXiv 2311.13231): DPO on the transitions of two sampled trajectories, step by step."""

    beta: float = 0.1
    """For log-ratios per latent dimension (`log_ratio: mean`)."""
    clip: float | None = 0.1
    """Distance from 1 at which ratios are clipped; null does not clip."""
    ref_update_every: int | None = None
    """As in dpo."""
    behaviour: Literal["old", "policy"] = "policy"
    """As in dpo."""

    def __post_init__(self) -> None:
        _check_values(self.beta, self.ref_update_every)
        if self.clip is not None and not 0 <= self.clip < 1:
            raise ValueError(f"objective 'd3po': clip is a distance from 1 in [0, 1), or null, got {self.clip}")


OBJECTIVES: dict[str, type[Online] | type[Offline] | type[Steps]] = {
    "dpo": Online,
    "dpo_offline": Offline,
    "d3po": Steps,
}


def only_here(config: TrainConfig) -> str:
    """Why workers cannot draw for a run; empty where they can."""
    return draws_nothing(config, "pairs") if config.objective.name == "dpo_offline" else ""


def objective_of(config: TrainConfig) -> Online | Offline | Steps:
    """The options of a run's objective. Raises ValueError: an unknown objective or option, or a bad value."""
    name = config.objective.name or "dpo"
    cls = entry_of(OBJECTIVES, name, "objective of recipe preference", owner="objective.name")
    return build_options(cls, config.objective.options, owner=f"objective {name!r}")


def counts(config: TrainConfig) -> RecipeCounts:
    """What a run counts before it starts: both images of a pair per prompt; groups of equal rewards have none."""
    options, sampler = objective_of(config), config.sampler

    def of_iteration(iteration: int, passes: Passes, geometry: Geometry) -> Counts:
        draws, num_steps = config.times.count, sampler.num_steps
        if isinstance(options, Steps):
            steps = stochastic_steps(sampler, config.seed, iteration)
            draws = len(steps)
            if sampler.flash_tail is not None and steps:
                num_steps = flash_tail(num_steps, max(steps), sampler.flash_tail).num_steps
        drawn = 0 if isinstance(options, Offline) else config.num_images
        rows, compared = passes(sampler.guidance_scale), 2 * config.prompts_per_step * draws
        return Counts(
            rollout=drawn * num_steps * rows,
            update=compared * rows,
            reference=compared * rows,
            images=drawn,
            backward=compared * walked(sampler.train_negative, sampler.guidance_scale, passes),
        )

    def record() -> RolloutRecord:
        if isinstance(options, Offline):
            return RolloutRecord(held=2 * config.prompts_per_step)
        steps = stochastic_steps(sampler, config.seed, 0) if isinstance(options, Steps) else ()
        images, states = config.num_images, len({state for step in steps for state in (step, step + 1)})
        return RolloutRecord(columns=(images * states, images), batches=((states + 2 + STEP, images),))

    name = config.objective.name or "dpo"
    return RecipeCounts(objective=name, of_iteration=of_iteration, slots=1, multiple=2, record=record)


def check(config: TrainConfig) -> None:
    """Refuses settings of this recipe that cannot work, before a model loads. Raises ValueError: an unknown objective
    or option, a bad file of pairs, or a combination without meaning."""
    name, options = config.objective.name or "dpo", objective_of(config)
    readers = [] if isinstance(options, Offline) else ["rollout", "tail"]
    readers += ["densities", "window", "thinned"] if isinstance(options, Steps) else readers_of_times(config.times)
    refuse_unread(config, readers, f"objective {name} of recipe preference")
    sampler, parts = config.sampler, data_ranks(config) * config.updates_per_rollout
    if name == "d3po":
        check_density(sampler, "objective d3po")
        if config.same_latent is not True:
            raise ValueError("objective d3po compares images that start from the same noise: set same_latent=true")
    elif sampler.kernel != "ode":
        raise ValueError(
            f"objective {name} has no use for stochastic steps, but sampler.kernel is {sampler.kernel}: set "
            "sampler.kernel=ode, or objective.name=d3po"
        )
    else:
        check_times(config)
    if config.prompts_per_step % parts:
        raise ValueError(
            f"a pair stays on one process and in one update, so prompts_per_step ({config.prompts_per_step}) must be a "
            f"multiple of processes times updates_per_rollout ({parts})"
        )
    if config.micro_batch_size == 1:
        raise ValueError("micro_batch_size (1) counts images, and pairs have two: set it to 2 or more, or remove it")
    if isinstance(options, Offline):
        read_pairs(resolve_path(options.pairs))
        if config.group_size != 2:
            raise ValueError(f"objective dpo_offline trains on pairs, so group_size is 2, got {config.group_size}")


def _check_values(beta: float, every: int | None) -> None:
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta:g}")
    if every is not None and every < 1:
        raise ValueError(f"ref_update_every counts iterations from 1, or is null, got {every}")
