"""The layout of a run's processes: copies of the model (replicate), parts of one (shard), of an image (context).

Processes are numbered row by row, `rank = (replicate * S + shard) * C + context`: those that share an image's tokens
are neighbours, then those that share a copy of the weights. So both are on one machine if it has enough cards, and only
gradients and numbers travel between copies.

Processes that hold one copy of the weights between them take their network calls together (docs/sharding.md). One that
has less to do takes idle turns (`in_step`): the same calls, on a row of its own, with a loss of nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flowrl.config.sections import ParallelConfig
from flowrl.training.processes.devices import PATIENCE
from flowrl.training.processes.launched import num_launched

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from flowrl.config.train import TrainConfig

T = TypeVar("T")

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
        """Groups of processes that draw different images; the processes of a group draw the same ones together."""
        return self.replicate * self.shard

    def place(self, rank: int) -> tuple[int, int, int]:
        """A process's place along each of `AXES`."""
        copy, rest = divmod(rank, self.shard * self.context)
        return copy, rest // self.context, rest % self.context


def layout_of(settings: ParallelConfig, world: int) -> Layout:
    """The layout of `world` processes. Raises ValueError: the product of the three numbers is another one."""
    shard, context = settings.shard, settings.context
    asked = f"parallel.shard ({shard}) x parallel.context ({context})"
    copies, rest = divmod(world, shard * context)
    processes = "1 process was launched" if world == 1 else f"{world} processes were launched"
    if rest:
        raise ValueError(
            f"{asked} splits one copy of the model over {shard * context} processes, and {processes}, which is not a "
            f"multiple: launch a multiple of {shard * context} (torchrun --nproc-per-node), or lower them"
        )
    if settings.replicate not in (None, copies):
        raise ValueError(
            f"parallel.replicate ({settings.replicate}) x {asked} needs {settings.replicate * shard * context} "
            f"processes, and {processes}: set parallel.replicate to {copies}, or leave it out"
        )
    return Layout(replicate=copies, shard=shard, context=context)


def data_ranks(config: TrainConfig) -> int:
    """Groups of processes that draw different images, in a run launched as this process was. If fewer were launched
    than one copy of the model takes, as for `flowrl plan`, they are those of one copy."""
    settings = config.parallel
    return settings.shard * max(1, num_launched() // (settings.shard * settings.context))


@cache
def device_mesh(layout: Layout, device: str) -> DeviceMesh:
    """The processes as a mesh with the dimensions `AXES`, each with groups of its own, which are made once. Every
    process calls it, once the default group exists, whose backends and patience its groups have; `device` is "cpu" or
    "cuda". (Groups that a mesh makes by itself would wait for ten minutes.)"""
    from torch.distributed import new_subgroups_by_enumeration
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.arange(layout.world).view(layout.replicate, layout.shard, layout.context)
    lines = (ranks.movedim(axis, -1).flatten(0, 1).tolist() for axis in range(len(AXES)))
    groups: list[Any] = [new_subgroups_by_enumeration(each, timeout=PATIENCE)[0] for each in lines]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=AXES)


# ---- turns -----------------------------------------------------------------------------------------------------------


class Shards:
    """The processes, this one among them, that hold one copy of the weights; they ask each other on the host by gloo,
    so they wait for no GPU."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """`mesh` has one dimension."""
        self.mesh, self._group = mesh, mesh.get_group()

    def any_needs(self, flags: list[bool]) -> list[bool]:
        """For each place whether it is true on any of the processes."""
        import torch.distributed as dist

        mine = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in mine.tolist()]

    def gather(self, mine: T) -> list[T]:
        """What each of the processes has, in their order."""
        import torch.distributed as dist

        found = [mine] * self.mesh.size()
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def most(self, counts: Mapping[int, int]) -> dict[int, int]:
        """For each key the largest count of any of the processes, keys ascending."""
        found = self.gather(dict(counts))
        keys = sorted({key for each in found for key in each})
        return {key: max(each.get(key, 0) for each in found) for key in keys}


def shards_of(layout: Layout, device: torch.device) -> Shards | None:
    """The processes that share a copy with this one; None if each has the whole."""
    return None if layout.shard == 1 else Shards(device_mesh(layout, device.type)["shard"])


def in_step(
    shards: Shards | None, turns: Sequence[T], idle: Callable[[int], T], key: Callable[[T], int] = lambda turn: 0
) -> Iterator[tuple[T, bool]]:
    """This process's turns, each with True, and idle ones with False, up to the most of any process in its group.

    If weights are split, all processes of the group call this together and take turns of one key together, keys
    ascending: the calls of a turn depend only on `key` and its rows. Otherwise it yields the turns unchanged. `idle`
    makes an idle turn of a key.
    """
    if shards is None:
        yield from ((turn, True) for turn in turns)
        return
    own: dict[int, list[T]] = defaultdict(list)
    for turn in turns:
        own[key(turn)].append(turn)
    for number, most in shards.most(Counter(map(key, turns))).items():
        yield from ((turn, True) for turn in own[number])
        yield from ((idle(number), False) for _ in range(most - len(own[number])))
