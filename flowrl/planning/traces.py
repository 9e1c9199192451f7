"""Counts FLOPs, peak bytes, and what autograd saves while a network runs on the meta device.

Attention is replaced by one that keeps the same tensors as a fused kernel, and casts are those of autocast on CUDA.
Everything else runs unchanged, without numbers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flowrl.runtime.private_names import TorchDispatchMode, flop_registry, operation_of, storage_key, writes

# What autocast does on CUDA, of the operations that denoisers and decoders use.
_LOW = {
    F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.baddbmm, torch.addmm,
    torch.mm, torch.einsum, F.conv1d, F.conv2d, F.conv3d,
}  # fmt: skip
_FULL = {
    F.layer_norm, F.group_norm, F.softmax, torch.softmax, torch.Tensor.softmax, torch.rsqrt, torch.pow,
    torch.Tensor.pow, torch.sum, torch.Tensor.sum, torch.norm, torch.cumsum, torch.exp, torch.log,
}  # fmt: skip


class _Made(NamedTuple):
    """What an operation makes: shape, strides and dtype of each tensor, whether it is one or a tuple, and FLOPs."""

    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None, ...]  # None: a gradient not asked for
    alone: bool
    flops: int


_MADE: dict[tuple[Any, ...], _Made] = {}
"""Results of operations on the meta device by their arguments' shapes, because torch derives them in Python each time.

A network asks for the same again in every block, and in both passes.
"""


class _Else(Exception):
    """An unknown argument, or a tensor with numbers."""


def _asked(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """All that the result of an operation depends on; None if that is unknown, or if the operation writes in place."""
    if writes(func):
        return None
    try:
        return (func, *map(_seen, args), *((name, _seen(value)) for name, value in kwargs.items()))
    except _Else:
        return None


def _seen(value: Any) -> Any:
    if (kind := type(value)) in _PLAIN:
        return kind, value  # True, 1 and 1.0 are equal, and make other dtypes
    if isinstance(value, Tensor) and value.is_meta:
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_seen, value))
    raise _Else


_PLAIN = {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def _keep(asked: tuple[Any, ...], made: Sequence[Tensor | None], alone: bool, flops: int) -> None:
    """Remembers what was made, if these are tensors that can be made from their shapes alone."""
    some = [one for one in made if one is not None]
    known = tuple(None if one is None else (tuple(one.shape), one.stride(), one.dtype) for one in made)
    again = map(_again, filter(None, known))
    if all(one.is_meta and type(one) is Tensor and not one.storage_offset() for one in some) and all(
        new.untyped_storage().nbytes() == one.untyped_storage().nbytes() for new, one in zip(again, some, strict=True)
    ):
        _MADE[asked] = _Made(known, alone, flops)


def _again(known: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]) -> Tensor:
    return torch.empty_strided(known[0], known[1], dtype=known[2], device="meta")


class Trace(TorchDispatchMode):
    """Adds up the FLOPs of all operations inside, by torch's own formulas, and follows the bytes of their results.

    Operations without a formula count no FLOPs. `FlopCounterMode` gives the same sums, but decomposes every other
    operation to look for products in it. Bytes are those of storages that were made inside and still live; views, and
    tensors from before, count as none.

    Attributes:
        total: FLOPs.
        peak: most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.peak = self._bytes = 0
        self._living: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:  # it makes nothing, and multiplies nothing
            return func(*args, **kwargs)
        asked = _asked(func, args, kwargs)
        known = None if asked is None else _MADE.get(asked)
        if known is not None:
            return self._repeat(known)
        output = func(*args, **kwargs)
        formula = flop_registry.get(operation_of(func))
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=output))
        self.total += flops
        alone = isinstance(output, Tensor)
        several: tuple[Any, ...] = (output,) if alone else tuple(output) if isinstance(output, tuple | list) else ()
        fresh = [made is None or (isinstance(made, Tensor) and self._follow(made, args)) for made in several]
        if asked is not None and several and all(fresh) and not isinstance(output, list):
            _keep(asked, several, alone, flops)
        return output

    def _repeat(self, known: _Made) -> Any:
        """The result of an operation that was met before, counted in the same way."""
        self.total += known.flops
        again = [None if one is None else self._begin(_again(one)) for one in known.tensors]
        return again[0] if known.alone else tuple(again)

    def _follow(self, tensor: Tensor, args: Any) -> bool:
        """Follows a tensor; returns whether it is new, not a view and not met before."""
        key = storage_key(tensor)
        if key in self._living or any(isinstance(one, Tensor) and storage_key(one) == key for one in args):  # a view
            return False
        self._begin(tensor)
        return True

    def _begin(self, tensor: Tensor) -> Tensor:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        size = storage.nbytes()

        def freed(_: object) -> None:
            self._bytes -= size
            del self._living[key]

        self._living[key] = weakref.ref(storage, freed)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)
        return tensor


class _Attention(torch.autograd.Function):
    """Attention that keeps what a fused kernel keeps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        same = query.shape[-1] == value.shape[-1]  # then answers lie as queries do: by tokens, where those did
        output = torch.empty_like(query) if same else query.new_empty(*query.shape[:-1], value.shape[-1])
        row_sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, row_sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = ctx.saved_tensors[:3]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class Fused(TorchFunctionMode):
    """Casts as autocast would in a dtype, and replaces attention, whose FLOPs and longest row it counts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = None if dtype == torch.float32 else dtype
        self.attention = self.attended = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            given = [named[name] for name in ("query", "key", "value")]
            query, key, value = given if self.dtype is None else cast(given, self.dtype)
            self.attended = max(self.attended, query.shape[-2])
            rows = math.prod(query.shape[:-1]) * key.shape[-2]
            self.attention += 2 * rows * (query.shape[-1] + value.shape[-1])
            return _Attention.apply(query, key, value)
        if self.dtype is not None and (func in _LOW or func in _FULL):
            dtype = self.dtype if func in _LOW else torch.float32
            args, kwargs = cast(list(args), dtype), cast(kwargs, dtype)
        return func(*args, **kwargs)


class _Storages:
    """Storages that were met and still live, because a freed one may come back as another."""

    def __init__(self) -> None:
        self._met: dict[int, weakref.ref[Any]] = {}

    def add(self, tensor: Tensor) -> int:
        """Bytes of a tensor's storage if it is new, otherwise 0."""
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._met:
            return 0
        self._met[key] = weakref.ref(storage, lambda _: self._met.pop(key))
        return int(storage.nbytes())

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._met


class Saved:
    """Bytes that autograd saves, block by block: their `total`, those that checkpointing keeps `outside` blocks, and
    the `largest` within a block. `blocks` are those that were called."""

    def __init__(self, network: nn.Module) -> None:
        self._seen, self._kept = _Storages(), _Storages()  # without and with checkpointing
        for tensor in (*network.parameters(), *network.buffers()):
            self._seen.add(tensor)
            self._kept.add(tensor)
        self.total = self.outside = self.largest = 0
        self._within: int | None = None
        self.blocks = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that autograd saves."""
        if size := self._seen.add(tensor):
            self.total += size
            if self._within is not None and tensor not in self._kept:
                self._within += size
        if self._within is None:
            self.outside += self._kept.add(tensor)
        return tensor

    def block(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls a block like `torch.utils.checkpoint`; only its inputs stay."""
        if self._within is not None:  # a block inside a block is recomputed with it
            return function(*arguments, **named)
        self.blocks += 1
        inputs = (*arguments, *named.values())
        self.outside += sum(self._kept.add(given) for given in inputs if isinstance(given, Tensor))
        self._within = 0
        try:
            return function(*arguments, **named)
        finally:
            self.largest, self._within = max(self.largest, self._within), None


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in a dtype, those of lists and dictionaries too, and everything else as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype != dtype and value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    return [cast(item, dtype) for item in value] if type(value) is list else value
