"""What rollout workers can be asked for, before anything starts."""

from __future__ import annotations

import os

import torch

from flowrl.config.train import TrainConfig
from flowrl.runtime.cluster import check_extra, connect
from flowrl.training.processes.devices import on_main
from flowrl.training.processes.launched import num_launched
from flowrl.training.run import Run


def check_workers(config: TrainConfig, only_here: str, *, here: bool = True) -> None:
    """Refuses workers that draw where the run samples nothing that they could, or what they draw is not all there is.
    `only_here` says why the recipe can draw in its own process alone, empty where it is not so; `here`: this machine
    trains. Raises ValueError: names the key, and what to set instead."""
    workers = config.workers
    if not workers.rollouts:
        return
    world = num_launched()
    if only_here:
        raise ValueError(f"{only_here}: set workers.rollouts=0")
    if workers.rollouts % world:
        raise ValueError(
            f"each of the {world} processes that learn has as many workers, and workers.rollouts ({workers.rollouts}) "
            f"does not divide by {world}: set it to a multiple"
        )
    if here:
        check_extra(f"workers.rollouts={workers.rollouts}")


def local_gpus(config: TrainConfig, device: torch.device, processes: int) -> list[str]:
    """GPUs that an instance of Ray on this machine lends to workers: those that no learner has, or all if there is none
    besides. `device` is this process's; all `processes` that learn count, also those that share the tokens of an image:
    each has a GPU. Raises ValueError: they are too few for the workers."""
    if device.type != "cuda":
        return []
    count, workers = torch.cuda.device_count(), config.workers
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = names or [str(number) for number in range(count)]
    learners = {device.index or 0} if processes == 1 else set(range(processes))
    free = [name for number, name in enumerate(names) if number not in learners] or names
    wanted = workers.drawing * workers.rollout_gpus + workers.rewards * workers.reward_gpus
    if wanted > len(free):
        parts = f"workers.shard={workers.shard} processes of " * (workers.shard > 1)
        raise ValueError(
            f"workers ask for {wanted:g} GPUs (workers.rollouts={workers.rollouts} of {parts}{workers.rollout_gpus:g}, "
            f"workers.rewards={workers.rewards} of {workers.reward_gpus:g}), and this machine has {len(free)} for them "
            f"of its {count}: lower the numbers, give shares below 1, or name a cluster in workers.address"
        )
    return free


_MODE = "RAY_AUTH_MODE"
"""An instance that Ray starts asks whoever joins it for the user's token, and sets this where it was started; a process
that joins presents the token only where it is set too."""


def join_cluster(config: TrainConfig, run: Run) -> str:
    """Starts an instance of Ray for the run, or finds its cluster, in one process; the others join it. Its address.
    Raises ValueError: no cluster answers, or this machine has too few GPUs."""
    settings = config.workers
    lent = None if settings.address else local_gpus(config, run.device, run.processes)

    def joined(address: str | None) -> tuple[str, str | None]:
        made = connect(address, workers=settings.drawing + settings.rewards, gpus=lent)
        return made.address, os.environ.get(_MODE)

    address, mode = on_main(lambda: joined(settings.address))
    if not run.main:
        if mode is not None:
            os.environ.setdefault(_MODE, mode)
        joined(address)
    return address
