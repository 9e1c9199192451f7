"""A denoiser whose weights are split over processes (`parallel.shard`), by torch's `fully_shard` (FSDP2).

Each process holds a part of every weight, split along its first dimension. A block's weights are gathered before it
runs and given back after it, and once more in the backward pass. docs/sharding.md says what is held, read and sent.

The LoRA, which is added afterwards, takes no part in it: every process holds the whole of it in float32, so that
gradients, optimizer, checkpoints and files of a run are those of an unsplit one. Numbers are the same bit for bit, for
weights are gathered and never added up.

Where weights are kept in few bits (`pipeline.quantize`) the first process quantises them whole, and what is split and
gathered is codes and scales: the numbers are those of a model that was quantised on one process.

Where the denoiser's own weights are trained, parts are masters in float32, rounded to the network's dtype if gathered.

A gathering waits for every process of the group: all of them have to call the network equally often, in one order, and
walk as many graphs back (`flowrl/training/processes/mesh.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowrl.pipelines.arithmetic.compiling import repeated_blocks
from flowrl.pipelines.arithmetic.quantized_linear import QuantizedLinear
from flowrl.pipelines.weights.loading_choices import Split
from flowrl.runtime.failures import explain
from flowrl.runtime.placement import gathered

_KNOWN: WeakKeyDictionary[nn.Module, tuple[Split, Mapping[str, torch.dtype]]] = WeakKeyDictionary()
"""Of a network that is split: its processes, and the dtypes that it computes in, by weight."""


def without_weights(cls: Any, config: Mapping[str, Any]) -> nn.Module:
    """A network whose weights are still to come; buffers are there."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        network: nn.Module = cls.from_config(dict(config))
    return network


def done_by_first(split: Split, work: Callable[[], object]) -> bool:
    """Has the first process of a group do some work; returns whether this is it. An error is raised there; on the
    others, which would wait for ever, a ValueError with the words of `explain`."""
    first, failed = split.mesh.get_local_rank() == 0, cast("Exception | None", None)
    if first:
        try:
            work()
        except Exception as error:
            failed = error
    said = split.gather(None if failed is None else explain(failed))[0]
    if failed is not None:
        raise failed
    if said is not None:
        raise ValueError(said)
    return first


def split_over(network: nn.Module, split: Split, *, masters: bool = False) -> None:
    """Splits a network in place over processes, each part on its device, and gives every process its part.

    Units that are gathered together are the blocks that a network repeats, as for `pipeline.compile`, and the rest; of
    several experts each is split by itself, so that one that is not called is not gathered. A network has no LoRA yet
    and is on the host: whole on the first process of the group, `without_weights` on the others. With `masters` its
    weights are trained, see the file's docstring.
    """
    from torch.distributed.fsdp import fully_shard

    # Of every block that returns a view: what follows a block in our families adds out of place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    first = split.mesh.get_local_rank() == 0
    for layer in network.modules():
        if isinstance(layer, QuantizedLinear):
            layer.become_parameters()
    whole = {name: parameter.detach() for name, parameter in network.named_parameters()} if first else {}
    facts: Any = split.gather(_facts(network) if first else None)[0]
    for name, (kind, dtype, tensors) in facts["quantised"].items() if not first else ():
        layer = kind(network.get_submodule(name).to(dtype), **tensors)
        layer.become_parameters()
        network.set_submodule(name, layer)
    for name, parameter in network.named_parameters():
        if parameter.is_meta:
            parameter.data = parameter.data.to(facts["dtypes"][name])
    for name, value in (*facts["buffers"].items(), *facts["beside"].items()):
        owner, _, key = name.rpartition(".")
        setattr(network.get_submodule(owner), key, value)
    policy = _precision(set(facts["dtypes"].values()), masters=masters)
    for unit in (*repeated_blocks(network), network):
        made: Any = fully_shard(unit, mesh=split.mesh, reshard_after_forward=True, mp_policy=policy)
        made.set_gradient_divide_factor(1.0)  # a loss is divided before: gradients are added up
        made.set_force_sum_reduction_for_comms(True)
    _hand_out(network, split, whole, torch.float32 if masters else None)
    _KNOWN[network] = split, facts["dtypes"]


def _precision(dtypes: set[torch.dtype], *, masters: bool) -> Any:
    """How weights are gathered and gradients added up. Inputs of blocks stay as the network gives them. Raises
    ValueError: masters of several dtypes, which this torch cannot round each to its own."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not masters:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    narrow, *more = sorted(dtypes, key=lambda dtype: dtype.itemsize)
    how: dict[str, Any] = {"param_dtype": narrow, "reduce_dtype": torch.float32, "cast_forward_inputs": False}
    if more:  # parts that stay in float32
        how["param_dtype_override_fn"] = lambda weight: weight.dtype
    try:
        return MixedPrecisionPolicy(**how)
    except TypeError as error:
        raise ValueError(
            f"the denoiser has weights in {' and '.join(map(str, dtypes))}, which torch {torch.__version__} does not "
            "train split: install torch 2.15 or newer, or set pipeline.dtype=float32, or parallel.shard=1"
        ) from error


def _facts(network: nn.Module) -> dict[str, dict[str, Any]]:
    """Of a network what is not split: dtypes of its weights, buffers, tensors beside them, how layers are quantised."""
    beside = {
        f"{name}.{key}" if name else key: value
        for name, module in network.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    }
    dtypes = {name: parameter.dtype for name, parameter in network.named_parameters()}
    quantised = {
        name: (type(layer), layer.dtype, {key: layer.whole(key).to("meta") for key in layer.names})
        for name, layer in network.named_modules()
        if isinstance(layer, QuantizedLinear)
    }
    return {"dtypes": dtypes, "buffers": dict(network.named_buffers()), "beside": beside, "quantised": quantised}


def _hand_out(network: nn.Module, split: Split, whole: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Sends every weight from the first process to the others, of which each keeps its part, in a dtype or its own."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, distribute_tensor

    group, device = split.mesh.get_group(), torch.device(split.mesh.device_type)
    source, parts = dist.get_global_rank(group, 0), dict[str, Tensor]()
    for name, weight in network.named_parameters():
        assert isinstance(weight, DTensor)
        sent = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        if whole:
            sent.copy_(whole[name])
        dist.broadcast(sent, src=source, group=group)
        own = distribute_tensor(sent, split.mesh, weight.placements, src_data_rank=None)
        parts[name] = nn.Parameter(own.to(dtype or own.dtype, copy=True), requires_grad=False)
    network.load_state_dict(parts, assign=True, strict=False)


def needed(expert: nn.Module, flags: list[bool]) -> list[bool]:
    """Which experts are called, for which this process would: where `expert` is split, what any of its group would."""
    return _KNOWN[expert][0].any_needs(flags) if expert in _KNOWN else flags


def own_part(tensor: Tensor) -> Tensor:
    """This process's piece of a tensor: its part if it is split, in the same memory."""
    from torch.distributed.tensor import DTensor

    return cast("Tensor", cast(Any, tensor.detach()).to_local()) if isinstance(tensor, DTensor) else tensor


def first_held(tensor: Tensor) -> int:
    """The number, in the whole tensor, of the first element of this process's piece."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return 0
    place, number = tensor.device_mesh.get_local_rank(), tensor.device_mesh.size()
    rows, *rest = tensor.shape
    return min(place * -(-rows // number), rows) * math.prod(rest)


def computing_dtypes(network: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes that weights are computed with, by name: those of parts that are masters are others."""
    found = {name: parameter.dtype for name, parameter in network.named_parameters()}
    for place, unit in network.named_modules():
        if unit in _KNOWN:
            found |= {f"{place}.{name}" if place else name: dtype for name, dtype in _KNOWN[unit][1].items()}
    return found


def put_together(network: nn.Module) -> nn.Module | None:
    """A split network as stock has it, on the host of the first process, in the dtype that it computes in; None on the
    others, which give their parts. Every process of the group calls it. Weights are gathered one after another, so that
    no device holds more than one whole."""
    from torch.distributed.fsdp import FSDPModule

    (split, dtypes), state = _KNOWN[network], dict[str, Tensor]()
    for name, value in network.state_dict().items():
        whole = gathered(value.detach().to(dtypes.get(name, value.dtype)))
        if split.mesh.get_local_rank() == 0:
            state[name] = whole.cpu()
    if not state:
        return None
    stock = next(cls for cls in type(network).__mro__ if not issubclass(cls, FSDPModule))
    made = without_weights(stock, cast(Any, network).config)
    made.load_state_dict(state, assign=True)
    return made


def denoiser_bytes(network: nn.Module) -> dict[str, int]:
    """Bytes of a network's weights without a LoRA: of the whole, and of what this process holds."""
    own = [p for p in network.parameters() if not p.requires_grad or own_part(p) is not p]
    return {
        "whole": sum(p.numel() * p.element_size() for p in own),
        "held": sum(part.numel() * part.element_size() for part in map(own_part, own)),
    }
