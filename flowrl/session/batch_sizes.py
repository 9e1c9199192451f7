"""The batch sizes of a run: the largest that divide its images and do not exceed the configured ones."""

from __future__ import annotations

from dataclasses import replace

from flowrl.config.train import Geometry, TrainConfig
from flowrl.session.preflight import recipe_of


def geometry_of(config: TrainConfig, ranks: int) -> Geometry:
    """How one process splits its images of an iteration; only processes that draw images of their own count as `ranks`.
    Raises ValueError: the images do not divide by these processes, or a group would be split."""
    geometry = config.resolve_batch(ranks)
    micro = recipe_of(config).counts(config).micro_batch_size
    if micro is None:
        return geometry
    size = micro(ranks)
    count = geometry.images_per_process // size // config.updates_per_rollout
    return replace(geometry, micro_batch_size=size, micro_batches_per_update=count)


def sizes_line(config: TrainConfig, ranks: int) -> str:
    """Names the batch sizes that are smaller than configured, with the reason; empty if there are none."""
    geometry = geometry_of(config, ranks)
    own = geometry.images_per_process
    found = []
    for key, images in (("rollout_batch_size", own), ("micro_batch_size", own // config.updates_per_rollout)):
        given, taken = getattr(config, key), getattr(geometry, key)
        if given is not None and taken != given:
            found.append(f"{key} is {taken}, the largest up to {given} that divides {images} images")
    return "; ".join(found)
