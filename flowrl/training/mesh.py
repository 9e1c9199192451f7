"""How the processes of a run lie: copies of the model (replicate), parts of one (shard), of a picture (context).

Processes are numbered row by row, `rank = (replicate * S + shard) * C + context`: those that share a picture's tokens
stand next to each other, then those that share a copy of the weights, so that both lie on one machine where it has
enough cards, and only gradients and numbers travel between copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flowrl.config.sections import ParallelConfig
from flowrl.config.train import TrainConfig
from flowrl.training.devices import num_launched

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("replicate", "shard", "context")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Numbers of processes along each of `AXES`; their product is the number of processes."""

    replicate: int = 1
    shard: int = 1
    context: int = 1

    @property
    def world(self) -> int:
        """Processes."""
        return self.replicate * self.shard * self.context

    @property
    def data(self) -> int:
        """Groups of processes that draw images of their own; those of a group draw the same ones together."""
        return self.replicate * self.shard

    def place(self, rank: int) -> tuple[int, int, int]:
        """Where a process stands along each of `AXES`."""
        copy, rest = divmod(rank, self.shard * self.context)
        return copy, rest // self.context, rest % self.context


def layout_of(settings: ParallelConfig, world: int) -> Layout:
    """The layout of `world` processes.

    Raises:
        ValueError: the product of the three numbers is another one.
    """
    shard, context = settings.shard, settings.context
    asked = f"parallel.shard ({shard}) x parallel.context ({context})"
    copies, rest = divmod(world, shard * context)
    processes = "1 process was launched" if world == 1 else f"{world} processes were launched"
    if rest:
        raise ValueError(
            f"{asked} is {shard * context} processes for one copy of the model, and {processes}, which is no multiple "
            f"of it: launch a multiple of {shard * context} (torchrun --nproc-per-node), or lower them"
        )
    if settings.replicate not in (None, copies):
        raise ValueError(
            f"parallel.replicate ({settings.replicate}) x {asked} is {settings.replicate * shard * context} processes, "
            f"and {processes}: set parallel.replicate to {copies}, or leave it out"
        )
    return Layout(replicate=copies, shard=shard, context=context)


def data_ranks(config: TrainConfig) -> int:
    """Groups of processes that draw images of their own, of a run that is launched as this process was.

    Raises:
        ValueError: as `layout_of`.
    """
    return layout_of(config.parallel, num_launched()).data


def device_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The processes as a mesh with the dimensions `AXES`, each with groups of its own.

    Every process calls it, once the default group exists: gloo on the CPU, NCCL on CUDA.
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(
        device.type, (layout.replicate, layout.shard, layout.context), mesh_dim_names=AXES
    )  # fmt: skip
