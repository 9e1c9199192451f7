"""Settings of the forward-process recipe: options, copies of the policy, sizes of micro-batches, and their checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flowrl.config.options import check_options, option_parameters, unknown_name
from flowrl.config.train import BATCH_LIMIT, TrainConfig
from flowrl.objectives.forward_losses import FORWARD, Matched, old_decay
from flowrl.recipes.unread import refuse_unread
from flowrl.samplers.times import permuted_steps, strata

_OLD_IF = {"awm": "off_policy", "dgpo": "clip"}  # options that need the old policy
_BY_REWARD = ("rwr", "rft")  # weigh rewards themselves, not advantages
_SAMPLING_DECAY = "delayed"  # of crd's second copy, as published
_ADVANTAGE = [
    "adv_std", "adv_baseline", "adv_clip_range", "adv_eps", "adv_correction", "adv_virtual_max", "reward_aggregation",
]  # fmt: skip
_UNREAD = (
    "clip_range", "ratio", "loss_aggregation", "best_of", "kl_type", "log_ratio", "credit", "shaping", "reward_map",
    "curriculum", "sampler.sde_window_size", "sampler.sde_window_range", "sampler.sde_window", "sampler.flash_tail",
    "sampler.trained_fraction", "sampler.trained_steps",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of every objective of this recipe, given beside those of its loss in `objective.options`."""

    guidance_scale: float | None = None
    """Guidance of the velocity that is trained, and of the old policy's; null takes `sampler.guidance_scale`."""
    reference_guidance_scale: float | None = None
    """Guidance of the reference; null takes that of training."""
    old_kl_coef: float = 0.0
    """Weight of the squared distance to the old policy's velocity (AWM's proximal term)."""


def objective_of(config: TrainConfig) -> str:
    """The entry of `FORWARD` that is trained with."""
    return config.objective.name or "nft"


def split_options(config: TrainConfig) -> tuple[Options, dict[str, Any]]:
    """`objective.options` as those of the recipe and those of the loss."""
    given = config.objective.options
    own = {key: value for key, value in given.items() if key in option_parameters(Options)}
    return Options(**own), {key: value for key, value in given.items() if key not in own}


def keeps_old(config: TrainConfig) -> bool:
    """Whether the method reads the old policy's velocity."""
    name, given = objective_of(config), config.objective.options
    asked = given.get(_OLD_IF.get(name, ""))
    return FORWARD[name].needs_old or (asked is not None and asked is not False) or bool(given.get("old_kl_coef"))


def whole_groups(config: TrainConfig) -> bool:
    """Whether a micro-batch has to hold groups as a whole; rft has chosen from whole groups before."""
    name = objective_of(config)
    return FORWARD[name].group_complete and name != "rft"


def slot_decays(config: TrainConfig) -> dict[str, str]:
    """The copies of the policy that a method keeps, and how each follows."""
    decays = {"old": config.slots.old_decay} if keeps_old(config) else {}
    return decays | ({"sampling": _SAMPLING_DECAY} if objective_of(config) == "crd" else {})


def sampling_slot(config: TrainConfig) -> str:
    """The weights that images are sampled with."""
    name = objective_of(config)
    if name == "crd":
        return "sampling"
    old = name == "nft" or (name == "awm" and config.objective.options.get("off_policy", False))
    return "old" if old else "policy"


def decay_of(config: TrainConfig, kind: str, updates: int) -> float:
    """Decay of a copy after so many optimizer updates."""
    return config.slots.old_decay_value if kind == "constant" else old_decay(kind, updates)


def check(config: TrainConfig) -> None:
    """Refuses settings of this recipe that cannot work, before a model loads.

    Raises:
        ValueError: an unknown method or option, or a combination without meaning, with what to change.
    """
    name, sampler, times = objective_of(config), config.sampler, config.times
    if name not in FORWARD:
        raise ValueError(f"objective.name: {unknown_name('objective of recipe forward', name, FORWARD)}")
    function, owner, given = FORWARD[name].function, f"objective {name!r}", config.objective.options
    known = option_parameters(function) | option_parameters(Options)
    for key in given:
        if key not in known:
            raise ValueError(f"{owner}: {unknown_name('option', key, known)}")
    own = {key: value for key, value in given.items() if key in option_parameters(Options)}
    check_options(Options, own, owner=owner)
    check_options(function, {key: value for key, value in given.items() if key not in own}, owner=owner)
    _try_out(function, {key: value for key, value in given.items() if key not in own})
    for key, value in own.items():
        if value is not None and value < 0:
            raise ValueError(f"{owner}: option {key} must not be negative, got {value:g}")
    if "reference_guidance_scale" in own and not (FORWARD[name].needs_reference or config.kl_coef > 0):
        raise ValueError(
            f"{owner}: reference_guidance_scale is set, but no reference is evaluated: set kl_coef above 0, or remove "
            "the option"
        )
    if sampler.kernel != "ode":
        raise ValueError(
            f"recipe forward needs no density of the sampler and samples by the ODE, got sampler.kernel "
            f"{sampler.kernel}: set sampler.kernel=ode, and remove sampler.noise_level"
        )
    unread = [*_UNREAD, *(() if slot_decays(config) else ("slots",))]
    unread += _ADVANTAGE if name in _BY_REWARD else []
    unread += [] if times.kind.startswith("discrete") else ["times.fraction"]
    unread += [] if times.kind in ("logit_normal", "uniform") else ["times.shift"]
    refuse_unread(config, unread, f"objective {name} of recipe forward")
    if config.reward_aggregation != "sum" and len([reward for reward in config.rewards if reward.weight]) < 2:
        raise ValueError(
            f"reward_aggregation={config.reward_aggregation} needs two rewards of nonzero weight, there is one: add "
            "another, or set it to sum"
        )
    if times.fraction == 0:
        raise ValueError("times.fraction is the share of the schedule that is trained and must be above 0")
    if times.kind == "schedule":
        permuted_steps(sampler.num_steps, times.count, "check")
    elif times.kind.startswith("discrete"):
        strata(times.kind, int(sampler.num_steps * times.fraction), times.count)
    for kind in slot_decays(config).values():
        decay_of(config, kind, 0)
    micro_batch_size(config, int(os.environ.get("WORLD_SIZE", "1")))


def _try_out(function: Callable[..., Any], loss_options: dict[str, Any]) -> None:
    """Calls a loss on two images of one number, so that values out of range are refused with its own message."""
    two, latent = torch.ones(2), torch.ones(2, 1)
    function(
        Matched(clean=latent, noise=latent, sigma=two, velocity=latent, old=latent, reference=latent, advantage=two,
                reward=two, group=torch.zeros(2, dtype=torch.long)),
        **loss_options,
    )  # fmt: skip


def micro_batch_size(config: TrainConfig, world: int) -> int:
    """Images of one backward pass; a multiple of the group size where the loss looks at whole groups.

    Raises:
        ValueError: groups cannot be kept whole, with what to change.
    """
    geometry, group, name = config.resolve_batch(world), config.group_size, objective_of(config)
    if not whole_groups(config):
        return geometry.micro_batch_size
    part = geometry.images_per_process // config.updates_per_rollout
    if part % group:
        raise ValueError(
            f"objective {name} compares the images of a group, so an update of a process must hold whole groups, and "
            f"{part} images are no multiple of group_size ({group}): make prompts_per_step a multiple of "
            f"{world * config.updates_per_rollout} (processes times updates_per_rollout)"
        )
    fitting = [size for size in range(group, part + 1, group) if part % size == 0]
    if config.micro_batch_size is None:
        return max(size for size in fitting if size <= max(BATCH_LIMIT, group))
    if config.micro_batch_size % group:
        raise ValueError(
            f"objective {name} compares the images of a group, so micro_batch_size ({config.micro_batch_size}) must "
            f"be a multiple of group_size ({group}): use one of {fitting} or remove it"
        )
    return config.micro_batch_size
