"""The processes of a run on one Ray cluster."""

from __future__ import annotations

import os

from flowrl.config.train import TrainConfig
from flowrl.runtime.cluster import connect
from flowrl.training.processes.devices import on_main
from flowrl.training.run import Run
from flowrl.workers.layout import local_gpus

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
