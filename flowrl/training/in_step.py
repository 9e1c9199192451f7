"""Processes that hold one copy of the weights between them take their network calls together (`parallel.shard`).

Each draws and trains images of its own, and some have less to do than others: micro-batches without a row that is
trained, groups without a pair, a shorter share of an evaluation. Where another process of the group is still at work,
such a process takes an idle turn: the same calls, on a row of its own, with a loss of nothing. Idle turns are counted
nowhere, and what they add to a gradient is exactly 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from flowrl.training.mesh import device_mesh
from flowrl.training.run import Run

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class Shards:
    """The processes that hold one copy of the weights between them, this one among them."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        """`mesh` has one dimension, `device` is what its group sends from."""
        self.mesh, self.device, self._group = mesh, device, mesh.get_group()

    def any_needs(self, flags: list[bool]) -> list[bool]:
        """For each place whether it is true on any of the processes."""
        import torch.distributed as dist

        mine = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device=self.device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in mine.tolist()]

    def most(self, counts: Mapping[int, int]) -> dict[int, int]:
        """For each key the largest count of any of the processes, keys ascending."""
        import torch.distributed as dist

        found: list[Mapping[int, int]] = [{}] * self.mesh.size()
        dist.all_gather_object(found, dict(counts), group=self._group)
        keys = sorted({key for each in found for key in each})
        return {key: max(each.get(key, 0) for each in found) for key in keys}


def shards_of(run: Run) -> Shards | None:
    """The processes that share a copy with this one; None where each has the whole."""
    if run.layout.shard == 1:
        return None
    return Shards(device_mesh(run.layout, run.device.type)["shard"], run.device)


def in_step(
    shards: Shards | None, turns: Sequence[T], idle: Callable[[int], T], key: Callable[[T], int] = lambda turn: 0
) -> Iterator[tuple[T, bool]]:
    """This process's turns, each with True, and idle ones, with False, up to the most that a process of its group has.

    Where weights are split all processes of the group come here together, and take turns of one key together, keys
    ascending: `key` is what the calls of a turn depend on besides its rows. Else the turns are given as they are.

    Args:
        shards: the group, or None.
        turns: what this process has to do.
        idle: makes an idle turn of a key.
        key: of a turn.
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
