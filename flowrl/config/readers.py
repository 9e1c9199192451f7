"""Who reads which key: settings that a recipe or method ignores are refused.

A recipe says which readers its run has; a key that changed from its default must have one of them. Keys that are not
listed are read by every run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from flowrl.config.train import TrainConfig

READERS: dict[str, str] = {
    # rewards to advantages
    "adv_std": "advantages",
    "adv_baseline": "advantages",
    "adv_clip_range": "advantages",
    "adv_eps": "advantages",
    "adv_correction": "advantages",
    "adv_virtual_max": "advantages",
    "reward_aggregation": "advantages",
    # the update on paths
    "clip_range": "paths",
    "ratio": "paths",
    "loss_aggregation": "paths",
    "kl_type": "paths",
    "kl_coef": "paths matching",
    "log_ratio": "paths densities",
    "best_of": "trajectories",
    "credit": "paths",
    "credit.completion": "values",
    "credit.branches": "branches",
    "credit.strides": "branches",
    "credit.splits": "tree",
    "credit.split_noise": "tree",
    "credit.children": "tree",
    "shaping": "paths",
    "reward_map": "paths",
    "curriculum": "paths",
    # finished images that are noised again
    "times": "noised",
    "times.fraction": "discrete",
    "times.shift": "continuous",
    "slots": "copies",
    # sampling
    "same_latent": "rollout",
    "rollout_batch_size": "rollout",
    "sampler.solver": "tail",
    "sampler.sde_window": "window",
    "sampler.sde_window_size": "window",
    "sampler.sde_window_range": "window",
    "sampler.sde_window_interval": "window",
    "sampler.sde_window_stride": "window",
    "sampler.published_window": "window",
    "sampler.flash_tail": "thinned",
    "sampler.trained_fraction": "trajectories",
    "sampler.trained_steps": "trajectories",
    "sampler.noise_levels": "paths",
    "sampler.calibration": "values",
}
"""Key or section -> readers, one of which a run must have:

advantages: rewards are compared within groups. paths: stochastic paths are trained by policy gradient; trajectories,
branches, tree: how these are sampled; values: images on the way are scored too. densities: log-densities of steps are
compared. matching: velocities at noised images are trained on. noised: images are noised again, at levels of a discrete
schedule or of a continuous law. copies: of the policy that follow it. rollout: images are sampled without gradient.
tail: deterministic steps after the last stochastic one; thinned: their number can be lowered. window: stochastic steps
are chosen by the sampler.
"""


def refuse_unread(config: TrainConfig, readers: Collection[str], what: str) -> None:
    """Refuses keys that were changed from their default although nothing would come of it.

    Args:
        config: the run's settings.
        readers: those of the run, words of `READERS`.
        what: names the run, for the message.

    Raises:
        ValueError: names the first such key and its value.
    """
    for key, value in _changed(config):
        wanted = READERS.get(key) or READERS.get(key.rpartition(".")[0])
        if wanted and not set(wanted.split()) & set(readers):
            raise ValueError(f"{key} is set to {value!r}, but {what} does not read it: remove it")


def _changed(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys whose values are not their defaults, with the values."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _changed(value, f"{prefix}{field.name}.")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is not dataclasses.MISSING and value != default:
            yield f"{prefix}{field.name}", value
