"""One evaluation of a family's denoiser on the meta device: parameters, FLOPs, and activations that training saves.

The network and its arguments are the family's: `flowrl.pipelines.ModelFamily`.

FLOPs: 1 multiply-add is 2. Forward and backward run for real, with the LoRA in place and everything else frozen, so
that weights without gradient cost none. Attention is reckoned by its formula, `4 b h q k d` forward and twice that
backward, as fused kernels do it without recomputation.

Activations: the distinct storages that autograd saves, under the casts of autocast, with attention that keeps its
inputs, its output and one number per row. Not counted are gradients on their way and what an allocator wastes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flowrl.pipelines.common import first_expert
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


def with_lora(denoiser: nn.Module, targets: Sequence[str], rank: int) -> tuple[nn.Module, int, int]:
    """The denoiser on the meta device with a LoRA on it, its own parameters and the LoRA's.

    Raises:
        ValueError: a target matches no layer.
    """
    check_targets(denoiser, targets)
    frozen = sum(parameter.numel() for parameter in denoiser.parameters())
    denoiser.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets), init_lora_weights=False)
    inject_adapter_in_model(config, denoiser, adapter_name="default")
    trained = sum(parameter.numel() for parameter in denoiser.parameters() if parameter.requires_grad)
    return denoiser, frozen, trained


def measure(
    denoiser: nn.Module, call: dict[str, Any], *, targets: Sequence[str], rank: int, dtype: torch.dtype
) -> Network:
    """Forward and backward of one sample.

    Args:
        denoiser: on the meta device; it gets a LoRA here.
        call: keyword arguments of the network.
        targets: layers of the LoRA.
        rank: of the LoRA.
        dtype: of the frozen weights and the arithmetic; the LoRA is float32.

    Raises:
        ValueError: a LoRA target matches no layer.
    """
    denoiser, frozen, trained = with_lora(denoiser, targets, rank)
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
    forward = there.total + saved.attention
    return Network(
        parameters=frozen, lora_parameters=trained, latent=_latent(given), attended=saved.attended,
        forward=forward, backward=back.total + 2 * saved.attention,
        attention=saved.attention / forward, saved=saved.bytes(), saved_checkpointed=saved.bytes(checkpointed=True),
        blocks=saved.blocks if blocks else 0,
    )  # fmt: skip


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
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=output)
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
        self.attention = 0.0

    def bytes(self, *, checkpointed: bool = False) -> int:
        """Bytes saved in all, or with only the blocks' inputs kept and the largest block recomputed."""
        return self.outside + self.largest if checkpointed and self.blocks else self.total

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
