"""How the processes of a run lie: copies of the model (replicate), parts of one (shard), of an image (context).

Processes are numbered row by row, `rank = (replicate * S + shard) * C + context`: those that share an image's tokens
stand next to each other, then those that share a copy of the weights, so that both lie on one machine where it has
enough cards, and only gradients and numbers travel between copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from flowrl.config.sections import ParallelConfig
from flowrl.training.devices import num_launched

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from flowrl.config.train import TrainConfig

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

    Where fewer were launched than one copy of the model takes, as for `flowrl plan`, they are those of one copy.
    """
    settings = config.parallel
    return settings.shard * max(1, num_launched() // (settings.shard * settings.context))


@cache
def device_mesh(layout: Layout, device: str) -> DeviceMesh:
    """The processes as a mesh with the dimensions `AXES`, each with groups of its own, which are made once.

    Every process calls it, once the default group exists; `device` is "cpu" (gloo) or "cuda" (NCCL).
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (layout.replicate, layout.shard, layout.context), mesh_dim_names=AXES)


def check_parallel(config: TrainConfig, world: int | None) -> None:
    """Refuses numbers of processes that do not fit together, and what a model that is split cannot do.

    Args:
        config: the run's settings.
        world: processes; None where that is not known.

    Raises:
        ValueError: says what was given and what to change.
    """
    settings, pipeline, policy = config.parallel, config.pipeline, config.policy
    if world is not None:
        layout_of(settings, world)
    if settings.shard == 1:
        return
    refused = {
        f"pipeline.quantize={pipeline.quantize}": pipeline.quantize != "none"
        and "quantised weights are not split: set pipeline.quantize=none; or parallel.shard=1, they may fit",
        f"policy.train={policy.train}": policy.train != "lora"
        and "only frozen weights are split: set policy.train=lora, or parallel.shard=1",
        "keep_graphs=true": config.keep_graphs
        and "a graph that is kept would hold its gathered weights: set keep_graphs=false",
        f"pipeline.compile={pipeline.compile}": pipeline.compile != "none"
        and "compiled blocks are not tried with split weights: set pipeline.compile=none",
        "pipeline.device=mps": pipeline.device == "mps"
        and "weights are split over CUDA devices or CPUs: set parallel.shard=1",
        f"parallel.context={settings.context}": settings.context > 1
        and "weights and the tokens of an image are not split at once yet: set one of the two to 1",
        f"workers.rollouts={config.workers.rollouts}": config.workers.rollouts > 0
        and "a worker that draws holds a whole model: set workers.rollouts=0, or parallel.shard=1",
    }
    for given, why in refused.items():
        if why:
            raise ValueError(f"parallel.shard is {settings.shard} and {given}: {why}")
