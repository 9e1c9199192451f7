"""Half-precision products on a CPU that has no instructions for them, taken in float32 and rounded.

Without such instructions (AVX512 on x86) torch multiplies bfloat16 and float16 matrices by plain loops, ten to forty
times slower than float32 ones. Here operands are rounded to the low dtype as autocast does it, multiplied in float32,
and the result is rounded: what the instructions would give, but for the order of sums. Attention likewise, whose
backward pass in bfloat16 is slower by far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_PRODUCTS: frozenset[Callable[..., Any]] = frozenset({
    F.linear, F.conv1d, F.conv2d, F.conv3d, torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.bmm,
    Tensor.__matmul__, F.scaled_dot_product_attention,
})  # fmt: skip


def _missing() -> frozenset[torch.dtype]:
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    known = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, supported in known.items() if not supported)


_MISSING = _missing()  # found once: compiled code cannot ask


def has_products(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of a dtype by instructions of its own: what torch asks before it does."""
    return dtype not in _MISSING


class WideProducts(TorchFunctionMode):
    """Inside, products that CPU autocast would take in its dtype are taken in float32, rounded before and after.

    Where autocast is switched off again, nothing changes. Forward passes that checkpointing repeats in the backward
    pass are outside, so that they are slow.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func not in _PRODUCTS or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs or {})
        dtype = torch.get_autocast_dtype("cpu")

        def widened(value: Any) -> Any:
            given = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype).float() if given else value

        with torch.autocast("cpu", enabled=False):
            product = func(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})
            return product.to(dtype)
