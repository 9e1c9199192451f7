"""Who reads which key: settings that a recipe or method ignores are refused.

A recipe says which readers its run has; a key that changed from its default must have one of them. Keys that are not
listed are read by every run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from flowrl.config.train import TrainConfig

_READ_BY = {
    # rewards are compared within groups
    "advantages": "adv_std adv_baseline adv_clip_range adv_eps adv_correction adv_min_std adv_virtual_max "
    "reward_aggregation",
    # stochastic paths are trained by policy gradient
    "paths": "clip_range ratio loss_aggregation loss_denominator kl_type kl_coef kl_reference log_ratio credit shaping "
    "reward_map curriculum sampler.noise_levels",
    # how these are sampled: image by image, as branches of an anchor, as trees; with images on the way scored too
    "trajectories": "keep_graphs best_of sampler.trained_fraction sampler.trained_steps",
    # images are trained one by one, so that middling ones can be left out
    "extremes": "best_of",
    "branches": "credit.branches credit.strides",
    "tree": "credit.splits credit.split_noise credit.children",
    "values": "credit.completion sampler.calibration",
    # the best images of a group are trained, the others left out
    "best": "loss_denominator",
    # velocities at noised images are trained on; log-densities of steps are compared
    "matching": "kl_coef kl_reference",
    "densities": "log_ratio",
    # velocities of teachers are learned
    "taught": "policy.teachers policy.teacher_key",
    # finished images are noised again, at levels of a discrete schedule or of a continuous law
    "noised": "times",
    "stepped": "times.fraction",
    "continuous": "times.shift",
    # copies of the policy follow it
    "copies": "slots",
    # images are sampled without gradient, with deterministic steps after the last stochastic one, which can be fewer
    "rollout": "same_latent rollout_batch_size",
    "tail": "sampler.solver",
    "thinned": "sampler.flash_tail",
    # the sampler chooses the stochastic steps
    "window": "sampler.sde_window sampler.sde_window_size sampler.sde_window_range sampler.sde_window_interval "
    "sampler.sde_window_stride sampler.published_window",
}
"""Reader -> keys and sections that it reads."""
_OF_RECIPE: dict[str, Collection[str]] = {
    "forward": "advantages matching rollout tail noised stepped continuous copies best extremes".split(),
    "preference": "densities rollout tail noised stepped continuous window thinned".split(),
    "visited": "taught rollout window".split(),
}
"""Recipe -> readers that its runs may have; those of grpo may have any, those of backprop none."""


class UnreadError(ValueError):
    """A key was set that nothing reads."""

    def __init__(self, key: str, said: str) -> None:
        super().__init__(said)
        self.key = key


def refuse_unread(config: TrainConfig, readers: Collection[str], what: str) -> None:
    """Refuses keys that were changed from their default although nothing would come of it.

    Args:
        config: the run's settings.
        readers: those of the run, words of the table.
        what: names the run, for the message.
    """
    for key, value in _changed_settings(config):
        wanted = _readers(key) or _readers(key.rpartition(".")[0])
        if wanted and not wanted & set(readers):
            raise UnreadError(key, f"{key} is set to {value!r}, but {what} does not read it: remove it")


def is_read(key: str, recipe: str, objective: str = "") -> bool:
    """Whether a run of a recipe, with an objective, reads a key at all; it may still not matter to its method."""
    if key == "clip_range" and objective in ("dppo", "reinforce"):
        return False
    wanted = _readers(key) or _readers(key.rpartition(".")[0])
    return not wanted or recipe == "grpo" or not wanted.isdisjoint(_OF_RECIPE.get(recipe, ()))


def keys_of(*readers: str) -> list[str]:
    """The keys and sections that readers read."""
    return [key for reader in readers for key in _READ_BY[reader].split()]


def _readers(key: str) -> set[str]:
    return {reader for reader, keys in _READ_BY.items() if key in keys.split()}


def _changed_settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys whose values are not their defaults, with the values."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _changed_settings(value, f"{prefix}{field.name}.")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is not dataclasses.MISSING and value != default:
            yield f"{prefix}{field.name}", value
