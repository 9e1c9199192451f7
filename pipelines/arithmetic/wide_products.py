"""Half-precision products on a CPU without instructions for them, taken in float32 and rounded.

Without such instructions (AVX512 on x86) torch multiplies bfloat16 and float16 matrices by plain loops, ten to forty
times slower than float32 ones. Here operands are rounded to the low dtype as autocast does it, multiplied in float32,
and the result is rounded: what the instructions would give, except for the order of sums. Attention keeps its kernel,
which `pipeline.attention` names (`attention_words.chosen`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from flowrl.runtime.private_names import products_by_dtype

_PRODUCTS: frozenset[Callable[..., Any]] = frozenset({
    F.linear, F.conv1d, F.conv2d, F.conv3d, torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.bmm,
    Tensor.__matmul__,
})  # fmt: skip


_MISSING = frozenset(
    getattr(torch, dtype)
    for dtype, supported in products_by_dtype().items()
    if not supported and torch.backends.mkldnn.is_available()
)
"""Found once: compiled code cannot ask."""


def has_products(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions that multiply matrices of a dtype; torch asks the same."""
    return dtype not in _MISSING


class WideProducts(TorchFunctionMode):
    """Inside, products that CPU autocast would take in its dtype are taken in float32, rounded before and after. Those
    are products of CPU tensors in 16 or 32 bits; float64, integers and other devices stay as they are, and so does all
    where autocast is switched off again."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func not in _PRODUCTS or not torch.is_autocast_enabled("cpu"):
            return func(*args, **given)
        tensors = [value for value in (*args, *given.values()) if isinstance(value, Tensor)]
        if not all(t.device.type == "cpu" and t.is_floating_point() and t.dtype != torch.float64 for t in tensors):
            return func(*args, **given)
        dtype = torch.get_autocast_dtype("cpu")

        def widened(value: Any) -> Any:
            return value.to(dtype).float() if isinstance(value, Tensor) else value

        with torch.autocast("cpu", enabled=False):
            product = func(*map(widened, args), **{name: widened(value) for name, value in given.items()})
            return product.to(dtype)


def checkpoint_blocks(network: Any, device: torch.device | str, dtype: torch.dtype) -> None:
    """Has a network of diffusers recompute its blocks in the backward pass, with products as in the forward pass."""
    again: Callable[..., Any] = partial(checkpoint, use_reentrant=False)
    if torch.device(device).type == "cpu" and not has_products(dtype):
        # The backward pass runs outside of the network's region; autocast is brought back by torch, a mode is not.
        again = partial(again, context_fn=lambda: (nullcontext(), WideProducts()))
    network.enable_gradient_checkpointing(_with_masks(network, again))


def _with_masks(network: nn.Module, again: Callable[..., Any]) -> Callable[..., Any]:
    """The function by which a network calls blocks that are recomputed, so that Chroma's single-stream blocks get their
    mask: that of the double-stream blocks, which are called before them and with the same one. Stock leaves it out
    there and nowhere else (diffusers 0.42), so that an update would see another network than the rollout did."""
    if not type(network).__name__.endswith("ChromaTransformer2DModel"):  # or split, with a word before it
        return again
    from flowrl.runtime.private_names import ChromaSingleTransformerBlock  # diffusers, a second

    masks: tuple[Any, ...] = ()

    def masked(block: nn.Module, *args: Any) -> Any:
        nonlocal masks
        if isinstance(block, ChromaSingleTransformerBlock):
            return again(block, *args, *(masks if len(args) == 3 else ()))
        masks = args[-1:]
        return again(block, *args)

    return masked
