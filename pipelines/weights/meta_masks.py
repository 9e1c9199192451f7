"""Networks that pick tokens by their mask, called without numbers: as if every token were read.

HunyuanVideo 1.5 asks whether an image is all zeros; it and HunyuanImage sort tokens by `text[mask]` and `text[~mask]`.
On the meta device nobody knows. There the answers here are yes, all and none, so that shapes are those of a prompt that
fills its length, and of every other one, since what is masked is put behind what is read. Mochi and Lumina 2 ask where
a mask is not zero and what its rows add up to: everywhere and their length, of which a shorter prompt takes less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SORTING = (
    "HunyuanImageTransformer2DModel",
    "HunyuanVideo15Transformer3DModel",
    "Lumina2Transformer2DModel",
    "MochiTransformer3DModel",
)
"""Classes of networks that do so."""
_CASTING = ("MochiTransformer3DModel",)
"""Classes of networks that switch autocast off for the device of a tensor, which torch refuses of the meta device."""
_NONE = "_flowrl_reads_none"
"""Attribute of a mask without numbers that was turned around."""

_ROW = "_flowrl_reads_a_row"
"""Attribute of sums of a mask's rows without numbers: how long they are."""


def callable_on_meta(network: nn.Module) -> nn.Module:
    """A network on the meta device, made such that it can be called there."""
    name = type(network).__name__
    if name in _SORTING:
        forward = network.forward

        def called(*args: Any, **given: Any) -> Any:
            cast = patch.object(torch, "autocast", _casting) if name in _CASTING else nullcontext()
            with EveryTokenRead(), cast:
                return forward(*args, **given)

        network.forward = called  # type: ignore[method-assign]
    return network


def _casting(device: str, *args: Any, **options: Any) -> Any:
    """`torch.autocast`, which does nothing on the meta device."""
    return nullcontext() if device == "meta" else _AUTOCAST(device, *args, **options)


_AUTOCAST = torch.autocast


class EveryTokenRead(TorchFunctionMode):
    """Inside, masks without numbers are true everywhere, and a condition without numbers holds."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if func is Tensor.__getitem__ and _is_mask(args[1]):
            return args[0][:0] if getattr(args[1], _NONE, False) else first
        if func is Tensor.tolist and (length := getattr(first, _ROW, None)) is not None:
            return [length] * len(args[0])
        if isinstance(first, Tensor) and first.is_meta:
            if func is Tensor.__bool__:
                return True
            if func is torch.nonzero:
                return torch.empty(first.numel(), first.ndim, dtype=torch.int64, device="meta")
        found = func(*args, **(kwargs or {}))
        _note(func, first, found)
        return found


def _note(func: Any, first: Any, found: Any) -> None:
    """Marks what was made of a mask without numbers: its opposite, and the sums of its rows."""
    if func is Tensor.__invert__ and _is_mask(found):
        setattr(found, _NONE, True)
    if func is Tensor.sum and first.is_meta and first.ndim == 2 and not first.is_floating_point():
        setattr(found, _ROW, first.shape[1])


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.is_meta and index.dtype == torch.bool
