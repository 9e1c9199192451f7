"""Options of recipe preference, and what it refuses before a model loads."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from flowrl.config.options import check_options, unknown_name
from flowrl.config.train import TrainConfig, resolve_path
from flowrl.prompts.pairs import Pair, read_pairs
from flowrl.recipes.unread import refuse_unread
from flowrl.samplers.times import permuted_steps, strata
from flowrl.training.parts import read_prompts
from flowrl.training.sampler_checks import check_density

_UNREAD = (
    "clip_range", "adv_std", "adv_baseline", "adv_clip_range", "adv_eps", "adv_correction", "adv_virtual_max",
    "reward_aggregation", "ratio", "loss_aggregation", "best_of", "kl_coef", "kl_type", "credit", "shaping",
    "reward_map", "curriculum", "slots", "sampler.trained_fraction", "sampler.trained_steps",
)  # fmt: skip
_OF_PATHS = (
    "log_ratio", "sampler.sde_window", "sampler.sde_window_size", "sampler.sde_window_range", "sampler.flash_tail"
)  # fmt: skip
_OF_SAMPLING = ("same_latent", "rollout_batch_size", "sampler.solver")


@dataclass(frozen=True, kw_only=True, slots=True)
class Online:
    """Options of objective dpo."""

    beta: float = 100.0
    """For mean squared errors; 100 to 5000 are published."""
    ref_update_every: int | None = None
    """Iterations after which the reference becomes a copy of the policy; null never."""
    behaviour: Literal["old", "policy"] = "old"
    """Who samples: the reference, as in Flow-GRPO's DPO, or the policy, as in Flow-Factory's."""

    def __post_init__(self) -> None:
        _check_values("dpo", self.beta, self.ref_update_every)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offline:
    """Options of objective dpo_offline."""

    pairs: str
    """A JSONL file of pairs, or a folder with `pairs.jsonl` (`flowrl.prompts.pairs`)."""
    beta: float = 100.0
    """As in dpo."""

    def __post_init__(self) -> None:
        _check_values("dpo_offline", self.beta, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Options of objective d3po."""

    beta: float = 0.1
    """For log-ratios per latent dimension (`log_ratio: mean`)."""
    clip: float | None = 0.1
    """Distance from 1 at which ratios are held; null does not."""
    ref_update_every: int | None = None
    """As in dpo."""
    behaviour: Literal["old", "policy"] = "policy"
    """As in dpo."""

    def __post_init__(self) -> None:
        _check_values("d3po", self.beta, self.ref_update_every)
        if self.clip is not None and not 0 <= self.clip < 1:
            raise ValueError(f"objective 'd3po': clip is a distance from 1 in [0, 1), or null, got {self.clip}")


OBJECTIVES: dict[str, Callable[..., Online | Offline | Steps]] = {"dpo": Online, "dpo_offline": Offline, "d3po": Steps}


def check(config: TrainConfig) -> None:
    """Refuses settings of this recipe that cannot work, before a model loads.

    Raises:
        ValueError: an unknown objective or option, a bad file of pairs, or a combination without meaning.
    """
    name = config.objective.name or "dpo"
    if name not in OBJECTIVES:
        raise ValueError(f"objective.name: {unknown_name('objective of recipe preference', name, OBJECTIVES)}")
    check_options(OBJECTIVES[name], config.objective.options, owner=f"objective {name!r}")
    options = OBJECTIVES[name](**config.objective.options)
    unread = {"dpo": _OF_PATHS, "dpo_offline": (*_OF_PATHS, *_OF_SAMPLING), "d3po": ("times",)}[name]
    refuse_unread(config, (*_UNREAD, *unread), f"objective {name} of recipe preference")
    _check_sampler(config, name)
    _check_sizes(config)
    if isinstance(options, Offline):
        _check_pairs(config, read_pairs(resolve_path(options.pairs)))


def _check_values(name: str, beta: float, every: int | None) -> None:
    if not beta > 0:
        raise ValueError(f"objective {name!r}: beta must be above 0, got {beta:g}")
    if every is not None and every < 1:
        raise ValueError(f"objective {name!r}: ref_update_every counts iterations from 1, or is null, got {every}")


def _check_sampler(config: TrainConfig, name: str) -> None:
    sampler, times = config.sampler, config.times
    if name == "d3po":
        check_density(sampler, "objective d3po")
        if not config.same_latent:
            raise ValueError("objective d3po compares images that start from the same noise: set same_latent=true")
        return
    if sampler.kernel != "ode":
        raise ValueError(
            f"objective {name} has no use for stochastic steps, but sampler.kernel is {sampler.kernel}: set "
            "sampler.kernel=ode, or objective.name=d3po"
        )
    if times.fraction == 0:
        raise ValueError("times.fraction is the share of the schedule that is trained and must be above 0")
    if times.kind == "schedule":
        permuted_steps(sampler.num_steps, times.count, "check")
    elif times.kind.startswith("discrete"):
        strata(times.kind, int(sampler.num_steps * times.fraction), times.count)


def _check_sizes(config: TrainConfig) -> None:
    parts = int(os.environ.get("WORLD_SIZE", "1")) * config.updates_per_rollout
    if config.prompts_per_step % parts:
        raise ValueError(
            f"a pair stays on one process and in one update, so prompts_per_step ({config.prompts_per_step}) must be a "
            f"multiple of processes times updates_per_rollout ({parts})"
        )
    if config.micro_batch_size is not None and config.micro_batch_size % 2:
        raise ValueError(
            f"micro_batch_size ({config.micro_batch_size}) counts images, and pairs have two: use an even number"
        )


def _check_pairs(config: TrainConfig, pairs: list[Pair]) -> None:
    if config.group_size != 2:
        raise ValueError(
            f"objective dpo_offline trains on prompts_per_step pairs of two images, so group_size is 2, got "
            f"{config.group_size}"
        )
    if not config.pipeline.free_text_encoders:
        return
    files = [name for name in (config.prompts.train, config.prompts.eval) if name is not None]
    known = {prompt.text for name in files for prompt in read_prompts(config.prompts, name)}
    for pair in pairs:
        if pair.prompt not in known:
            raise ValueError(
                f"prompt {pair.prompt!r} of objective.options.pairs is in no prompt file, so it would not be encoded "
                "before the text encoders are freed: add it to prompts.train, or set pipeline.free_text_encoders=false"
            )
