"""Networks that pick tokens by their mask, called without numbers: as if every token were read.

HunyuanVideo 1.5 asks whether an image is all zeros and sorts tokens by `text[mask]` and `text[~mask]`: on the meta
device nobody knows. There the answers here are yes, all and none, so that shapes are those of a prompt that fills its
length, and of every other one, since what is masked is put behind what is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SORTING = ("HunyuanVideo15Transformer3DModel",)
"""Classes of networks that do so."""
_NONE = "_flowrl_reads_none"
"""Attribute of a mask without numbers that was turned around."""


def callable_on_meta(network: nn.Module) -> nn.Module:
    """A network on the meta device, made such that it can be called there."""
    if type(network).__name__ in _SORTING:
        forward = network.forward

        def called(*args: Any, **given: Any) -> Any:
            with _EveryTokenRead():
                return forward(*args, **given)

        network.forward = called  # type: ignore[method-assign]
    return network


class _EveryTokenRead(TorchFunctionMode):
    """Inside, masks without numbers are true everywhere, and a condition without numbers holds."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        if func is Tensor.__getitem__ and _is_mask(args[1]):
            return args[0][:0] if getattr(args[1], _NONE, False) else args[0]
        found = func(*args, **(kwargs or {}))
        if func is Tensor.__invert__ and _is_mask(found):
            setattr(found, _NONE, True)
        return found


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.is_meta and index.dtype == torch.bool
