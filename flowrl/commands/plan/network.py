"""One evaluation of a family's denoiser on the meta device: parameters, FLOPs, and activations that training saves.

The network and its arguments are the family's: `flowrl.pipelines.ModelFamily`. Of the blocks of a large network only a
few run: see `flowrl.pipelines.like_blocks`. Everything that is counted is a whole number, so that what is reckoned from
a few blocks is exactly what all of them would have counted.

FLOPs: 1 multiply-add is 2. Forward and backward run for real, with the LoRA in place and everything else frozen, so
that weights without gradient cost none. Attention is reckoned by its formula, `4 b h q k d` forward and twice that
backward, as fused kernels do it without recomputation.

Activations: the distinct storages that autograd saves, under the casts of autocast, with attention that keeps its
inputs, its output and one number per row. Not counted are gradients on their way and what an allocator wastes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flowrl.pipelines import ModelFamily
from flowrl.pipelines.common import first_expert
from flowrl.pipelines.like_blocks import fewest, names_a_block
from flowrl.pipelines.lora import check_targets

# What autocast does on CUDA, of the operations that denoisers use.
_LOW = {
    F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.baddbmm, torch.addmm,
    torch.mm, torch.einsum, F.conv1d, F.conv2d, F.conv3d,
}  # fmt: skip
_FULL = {
    F.layer_norm, F.group_norm, F.softmax, torch.softmax, torch.Tensor.softmax, torch.rsqrt, torch.pow,
    torch.Tensor.pow, torch.sum, torch.Tensor.sum, torch.norm, torch.cumsum, torch.exp, torch.log,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A denoiser with its LoRA, and one evaluation of one sample of it.

    Attributes:
        parameters: frozen ones, of all experts.
        lora_parameters: trained ones, of all experts.
        latent: shape of the image as the network takes it, without batch.
        attended: most tokens that attend to something at once; 0 without attention.
        forward: FLOPs of a forward pass with the LoRA.
        backward: FLOPs of the backward pass after it.
        attention: share of attention in `forward`.
        saved: bytes that autograd saves for the backward pass.
        saved_checkpointed: the same with gradient checkpointing, the block that is recomputed included.
        blocks: that are checkpointed one by one; 0 where the network cannot be.
    """

    parameters: int
    lora_parameters: int
    latent: tuple[int, ...]
    attended: int
    forward: float
    backward: float
    attention: float
    saved: int
    saved_checkpointed: int
    blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted:
    """What was counted of one evaluation, as `Network` says it.

    `kept` are the bytes that checkpointing keeps outside of blocks, `largest` those of the largest block.
    """

    latent: tuple[int, ...]
    attended: int
    largest: int
    parameters: int
    lora_parameters: int
    forward: int
    backward: int
    attention: int
    saved: int
    kept: int
    blocks: int

    def __add__(self, other: _Counted) -> _Counted:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _LINEAR}
        most = {name: max(getattr(self, name), getattr(other, name)) for name in ("attended", "largest")}
        return replace(self, **sums, **most)

    def block(self, more: _Counted, times: int) -> _Counted:
        """So many times what one block takes, by which `more` has more than this."""
        return replace(more, **{name: times * (getattr(more, name) - getattr(self, name)) for name in _LINEAR})


_LINEAR = tuple(f.name for f in fields(_Counted))[3:]


@dataclass(frozen=True, kw_only=True, slots=True)
class FewBlocks:
    """Networks by which one with many blocks is measured.

    Attributes:
        least: with as few blocks as there can be, or all of them.
        more: for each kind of block how many `least` lacks, and a network with one more than `least`.
    """

    least: nn.Module
    more: Sequence[tuple[int, nn.Module]] = ()


def few_blocks(family: ModelFamily, model: str, targets: Sequence[str]) -> FewBlocks | None:
    """The networks by which a model's denoiser is measured; None where nothing is known of the model.

    Args:
        family: of the model.
        model: folder or hub id.
        targets: layers of the LoRA; where they name a block, all blocks are there.
    """
    kinds = {} if names_a_block(targets) else family.block_kinds(model)
    few = fewest(kinds)
    least = family.meta_denoiser(model, few)
    if least is None:
        return None
    more = [
        (kinds[kind] - count, family.meta_denoiser(model, {**few, kind: count + 1}))
        for kind, count in few.items() if kinds[kind] > count
    ]  # fmt: skip
    return FewBlocks(least=least, more=[(lacking, network) for lacking, network in more if network is not None])


def measure(
    denoisers: FewBlocks, call: dict[str, Any], *, targets: Sequence[str], rank: int, dtype: torch.dtype
) -> Network:
    """Forward and backward of one sample.

    Args:
        denoisers: on the meta device; they get a LoRA here.
        call: keyword arguments of the network.
        targets: layers of the LoRA.
        rank: of the LoRA.
        dtype: of the frozen weights and the arithmetic; the LoRA is float32.

    Raises:
        ValueError: a LoRA target matches no layer.
    """
    least = total = _count(denoisers.least, call, targets, rank, dtype)
    for lacking, network in denoisers.more:
        total += least.block(_count(network, call, targets, rank, dtype), lacking)
    return Network(
        parameters=total.parameters, lora_parameters=total.lora_parameters, latent=total.latent,
        attended=total.attended, forward=total.forward, backward=total.backward,
        attention=total.attention / total.forward, saved=total.saved,
        saved_checkpointed=total.kept + total.largest if total.blocks else total.saved, blocks=total.blocks,
    )  # fmt: skip


def forward_flops(denoisers: FewBlocks, call: dict[str, Any]) -> int:
    """FLOPs of an evaluation without gradient, once the LoRA is on the networks."""

    def of(denoiser: nn.Module) -> int:
        network = first_expert(denoiser)
        with torch.no_grad(), Flops() as counter:
            network(**cast(call, next(network.parameters()).dtype))
        return counter.total

    least = of(denoisers.least)
    return least + sum(lacking * (of(network) - least) for lacking, network in denoisers.more)


def _count(
    denoiser: nn.Module, call: Mapping[str, Any], targets: Sequence[str], rank: int, dtype: torch.dtype
) -> _Counted:
    check_targets(denoiser, targets)
    frozen = sum(parameter.numel() for parameter in denoiser.parameters())
    trained = _add_lora(denoiser, targets, rank)
    network = first_expert(denoiser)
    nn.Module.to(network, dtype)  # diffusers' own `to` warns of parts it would keep in float32
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    given = cast(call, dtype)
    saved = _Saved(network, dtype)
    blocks = _checkpointed(network, saved.block)
    with saved, saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        with Flops() as there:
            output = network(**given)
        answer = output
        while not isinstance(answer, Tensor):  # one of a tuple, and of Z-Image's list of samples
            answer = answer[0]
        with Flops() as back:
            answer.float().sum().backward()
    return _Counted(
        parameters=frozen, lora_parameters=trained, latent=_latent(given), attended=saved.attended,
        forward=there.total + saved.attention, backward=back.total + 2 * saved.attention, attention=saved.attention,
        saved=saved.total, kept=saved.outside, largest=saved.largest, blocks=saved.blocks if blocks else 0,
    )  # fmt: skip


def _add_lora(denoiser: nn.Module, targets: Sequence[str], rank: int) -> int:
    """Puts a LoRA on the layers that targets match; how many parameters it has."""
    denoiser.requires_grad_(False)
    endings = tuple(f".{target}" for target in targets)
    bound = [name for name, part in denoiser.named_modules()
             if isinstance(part, nn.Linear) and f".{name}".endswith(endings)]  # fmt: skip
    for name in bound:
        parent, _, own = name.rpartition(".")
        setattr(denoiser.get_submodule(parent), own, _WithLora(denoiser.get_submodule(name), rank))
    return sum(parameter.numel() for parameter in denoiser.parameters() if parameter.requires_grad)


class _WithLora(nn.Module):
    """A linear layer with a LoRA: the operations and casts of PEFT's, whose import takes longer than all of a plan."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.base = base
            self.down = nn.Linear(base.in_features, rank, bias=False)
            self.up = nn.Linear(rank, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        """The frozen weight, of which networks ask the dtype."""
        weight: Tensor = self.base.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        """Likewise."""
        bias: Tensor | None = self.base.bias
        return bias

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        change = self.up(self.down(x.to(self.down.weight.dtype))) * 1.0
        return (result + change).to(result.dtype)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in a dtype, those of lists and dictionaries too, and everything else as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    return [cast(item, dtype) for item in value] if type(value) is list else value


def _latent(call: dict[str, Any]) -> tuple[int, ...]:
    if "x" in call:  # a list, one image per sample
        return tuple(call["x"][0].shape)
    value = call.get("hidden_states", call.get("sample"))
    return tuple(value.shape[1:]) if isinstance(value, Tensor) else ()


def _checkpointed(network: Any, function: Callable[..., Any]) -> bool:
    """Has the network call its blocks through a function, as for gradient checkpointing."""
    try:
        network.enable_gradient_checkpointing(function)
    except (AttributeError, TypeError, ValueError):  # it has no blocks that could be recomputed
        return False
    return True


class Flops(TorchDispatchMode):
    """Adds up the FLOPs of what runs inside, by torch's own formulas; what has none counts nothing.

    `FlopCounterMode` gives the same sums, but takes every other operation apart to look for products in it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=output))
        return output


class _Attention(torch.autograd.Function):
    """Attention that keeps what a fused kernel keeps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        row_sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, row_sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = ctx.saved_tensors[:3]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Saved(TorchFunctionMode):
    """What autograd saves, block by block; casts as autocast would, and replaces attention."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = None if dtype == torch.float32 else dtype
        weights = {_storage(tensor) for tensor in (*network.parameters(), *network.buffers())}
        self.seen, self.kept = set(weights), set(weights)  # without and with checkpointing
        self.held: list[Tensor] = []  # a storage that is freed may come back as another one
        self.total = self.outside = self.largest = 0
        self.within: int | None = None
        self.blocks = self.attended = 0
        self.attention = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that autograd saves."""
        storage, size = _storage(tensor), int(tensor.untyped_storage().nbytes())
        self.held.append(tensor)
        if storage not in self.seen:
            self.seen.add(storage)
            self.total += size
            if self.within is not None and storage not in self.kept:
                self.within += size
        if self.within is None:
            self._keep(tensor)
        return tensor

    def block(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a block as `torch.utils.checkpoint` would; its inputs are what stays."""
        if self.within is not None:  # a block inside a block is recomputed with it
            return function(*arguments)
        self.blocks += 1
        for argument in arguments:
            if isinstance(argument, Tensor):
                self._keep(argument)
        self.within = 0
        try:
            return function(*arguments)
        finally:
            self.largest, self.within = max(self.largest, self.within), None

    def _keep(self, tensor: Tensor) -> None:
        """Counts a tensor that checkpointing keeps."""
        self.held.append(tensor)
        if _storage(tensor) not in self.kept:
            self.kept.add(_storage(tensor))
            self.outside += int(tensor.untyped_storage().nbytes())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            query, key, value = (self._low(named[name]) for name in ("query", "key", "value"))
            self.attended = max(self.attended, query.shape[-2])
            rows = math.prod(query.shape[:-1]) * key.shape[-2]
            self.attention += 2 * rows * (query.shape[-1] + value.shape[-1])
            return _Attention.apply(query, key, value)
        if self.dtype is not None and func in _LOW:
            args, kwargs = _mapped(self._low, args), {name: self._low(value) for name, value in kwargs.items()}
        elif self.dtype is not None and func in _FULL:
            args, kwargs = _mapped(_float, args), {name: _float(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _low(self, value: Any) -> Any:
        return value if self.dtype is None else cast(value, self.dtype)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _float(value: Any) -> Any:
    return cast(value, torch.float32)


def _mapped(cast: Callable[[Any], Any], arguments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(cast(value) for value in arguments)
