"""The processes of a run on one Ray cluster."""

from __future__ import annotations

from flowrl.cluster import connect
from flowrl.config.train import TrainConfig
from flowrl.training.devices import on_main
from flowrl.training.run import Run
from flowrl.workers.layout import local_gpus


def join_cluster(config: TrainConfig, run: Run) -> str:
    """Starts an instance of Ray for the run, or finds its cluster, in one process; the others join it. Its address.

    Raises:
        ValueError: no cluster answers, or this machine has too few GPUs.
    """
    settings = config.workers
    lent = None if settings.address else local_gpus(config, run.device, run.world)

    def joined(address: str | None) -> str:
        return connect(address, workers=settings.rollouts + settings.rewards, gpus=lent).address

    address = on_main(lambda: joined(settings.address))
    if not run.main:
        joined(address)
    return address
