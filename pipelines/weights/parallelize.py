"""A denoiser whose frozen weights are split over processes (`parallel.shard`), by torch's `fully_shard` (FSDP2).

Each of N processes holds a part of every weight, split along its first dimension. A block's weights are gathered
before it runs and given back after it, and once more in the backward pass, so that a process holds at most

    bytes of all weights / N + bytes of the largest two blocks + bytes of what lies outside the blocks

The LoRA is left out of it: every process holds the whole of it in float32, so that gradients, optimizer, checkpoints
and files of a run are those of an unsplit one. Numbers are the same bit for bit: weights are gathered, never added up.

A gathering waits for every process of the group: all of them have to call the network equally often, in one order, and
walk as many graphs back (`flowrl/training/in_step.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowrl.pipelines.arithmetic.compiling import repeated_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ANYWHERE: WeakKeyDictionary[nn.Module, Callable[[list[bool]], list[bool]]] = WeakKeyDictionary()


def shard_denoiser(
    network: nn.Module, mesh: DeviceMesh, whole: Iterable[nn.Parameter], anywhere: Callable[[list[bool]], list[bool]]
) -> None:
    """Splits a denoiser in place over a mesh of one dimension; this process's part moves to the mesh's device.

    Units that are gathered together are the blocks that a network repeats, as for `pipeline.compile`, and the rest; of
    several experts each has units of its own, and one that is not called is not gathered.

    Args:
        network: a denoiser or a ModuleDict of experts, with its LoRA.
        mesh: of the processes that hold one copy between them.
        whole: parameters that each process keeps: the LoRA's.
        anywhere: of which experts this process would call, makes which any process of the group would: see `needed`.
    """
    from torch.distributed.fsdp import fully_shard

    # Of every block that returns a view: what follows a block in our families adds out of place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    kept, device = set(whole), torch.device(mesh.device_type)
    for parameter in kept:
        parameter.data = parameter.data.to(device)
    experts = list(network.values()) if isinstance(network, nn.ModuleDict) else [network]
    units = [*repeated_blocks(network), *experts]
    for unit in units:  # the rest of an expert after its blocks
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
    _ANYWHERE.update(dict.fromkeys(experts, anywhere))


def needed(expert: nn.Module, flags: list[bool]) -> list[bool]:
    """Which experts are called, for which of them this process would: where `expert` is split, those that any process
    of its group would."""
    return _ANYWHERE.get(expert, list)(flags)


def bytes_held(network: nn.Module) -> int:
    """Bytes of a network's frozen weights on this process; of split ones those of its own part."""
    from torch.distributed.tensor import DTensor

    frozen = (p for p in network.parameters() if not p.requires_grad)
    parts: Iterable[Tensor] = (p.to_local() if isinstance(p, DTensor) else p for p in frozen)
    return sum(part.numel() * part.element_size() for part in parts)
