"""The batch sizes that a run takes: the largest that divide its images, at most those that are set."""

from __future__ import annotations

from dataclasses import replace

from flowrl.config.train import Geometry, TrainConfig
from flowrl.session.preflight import recipe_of


def geometry_of(config: TrainConfig, ranks: int) -> Geometry:
    """How the images of an iteration are split on one of the processes that draw images of their own. Raises
    ValueError: they do not divide by these processes, or groups cannot be kept whole."""
    geometry = config.resolve_batch(ranks)
    micro = recipe_of(config).counts(config).micro_batch_size
    if micro is None:
        return geometry
    size = micro(ranks)
    count = geometry.images_per_process // size // config.updates_per_rollout
    return replace(geometry, micro_batch_size=size, micro_batches_per_update=count)


def sizes_line(config: TrainConfig, ranks: int) -> str:
    """Which batch sizes are smaller than those that are set, and why; empty where none is."""
    geometry = geometry_of(config, ranks)
    own = geometry.images_per_process
    found = []
    for key, images in (("rollout_batch_size", own), ("micro_batch_size", own // config.updates_per_rollout)):
        given, taken = getattr(config, key), getattr(geometry, key)
        if given is not None and taken != given:
            found.append(f"{key} is {taken}, the largest up to {given} that divides {images} images")
    return "; ".join(found)
