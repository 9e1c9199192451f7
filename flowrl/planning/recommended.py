"""The recommended recipe for any family: the one that learned most for its cost on the embedded models.

It is written once, in the configuration `SHAPE`: DiffusionNFT with several updates a rollout, on the noisier levels, at
a rate that falls to nothing. What follows from a run's own numbers is worked out here: how many updates divide its
images, how many levels half of its steps are, and whether its guidance has a half that training can leave out.
"""

from __future__ import annotations

from pathlib import Path

from flowrl.config.base import config_files
from flowrl.config.strict_yaml import read_mapping
from flowrl.config.train import TrainConfig, load_config, mapping_of
from flowrl.recipes.counting import Passes

SHAPE = "qwen_image_recommended"
"""The configuration that states the method's settings."""
OF_THE_MODEL = ("base", "pipeline", "updates_per_rollout")
"""Other keys of that configuration."""
UPDATES = 6
"""Largest number of updates per rollout, as measured on the embedded model."""
KEPT = ("guidance_scale", "grid", "shift")
"""Settings of the sampler that belong to the model."""
STEPS = 20
"""Steps of a rollout, at most: what the recommended configurations that ship take of their solver of second order."""
DEFAULTS = read_mapping(Path(__file__).with_suffix(".yaml"))
"""Settings of other methods, with their values if no such method is used."""


def recommended(config: TrainConfig, passes: Passes) -> TrainConfig:
    """A run by the recommended recipe with a configuration's model, prompts, rewards and batches, at most as long;
    `passes` are the network rows of a sample at a guidance scale. Raises ConfigError: they contradict."""
    given = mapping_of(config)
    shape = {key: value for key, value in read_mapping(config_files()[SHAPE]).items() if key not in OF_THE_MODEL}
    steps, guided = min(config.sampler.num_steps, STEPS), passes(config.sampler.guidance_scale) > passes(1.0)
    made = {
        **DEFAULTS,
        **shape,
        "num_iterations": min(config.num_iterations, shape["num_iterations"]),
        "times": {**shape["times"], "count": max(1, steps // 2)},
        "objective": shape["objective"] if guided else {"name": shape["objective"]["name"]},
        "updates_per_rollout": max(n for n in range(1, UPDATES + 1) if config.num_images % n == 0),
        "sampler": {**{key: given["sampler"][key] for key in KEPT}, "num_steps": steps, **shape["sampler"]},
        **{section: {**given[section], **shape[section]} for section in ("policy", "optim")},
    }
    return load_config({**given, **made})


def is_recommended(config: TrainConfig) -> bool:
    """Whether a run has this recipe already: it learns from noised images and uses each rollout several times."""
    method = read_mapping(config_files()[SHAPE])["objective"]["name"]
    return config.objective.name == method and config.updates_per_rollout > 1
