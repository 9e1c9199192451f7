"""Linear layers that keep their frozen weight in few bits.

    int8, fp8   codes * scale, a scale for each row of the weight (torchao's weight-only kinds)
    nf4         4-bit codes of normal quantiles, a scale for each 64 weights, these in 8 bits (bitsandbytes)
    int8_bnb    codes * scale / 127, and inputs are rounded to int8 row by row (bitsandbytes' LLM.int8)

But for the last, a layer answers what a plain one would whose weight is `restored`: the rounded weight W in the base's
dtype, `y = W x + b`, `dL/dx = W^T g`. It is restored for one product at a time and again in the backward pass, so that
no graph keeps it: without that a backward pass would hold the whole network in 16 bits.

LLM.int8 computes `y = (codes of W) (codes of x)` in whole numbers, scaled; its gradient is that of W. The library can
set columns of x apart that hold outliers; which ones those are depends on the other rows of a batch, and an image would
depend on what it is drawn beside. So none are: each row is rounded by its own largest value.

Over processes (`parallel.shard`) tensors of a layer are split, not its weight: what is gathered has the bits of a layer
that was never split.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowrl.pipelines.arithmetic.wide_products import has_products
from flowrl.runtime.placement import gathered


class _Restored(torch.autograd.Function):
    """A product with a weight that is restored in each of the two directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return layer.product(x, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.matmul(ctx.layer.restored(grad.dtype)), None, None


class QuantizedLinear(nn.Linear):
    """A frozen linear layer; `weight` restores the weight it stands for, and is not a parameter."""

    names: ClassVar[tuple[str, ...]] = ("codes", "scale")
    """Its tensors, kept as buffers, or as parameters if they are split."""
    codes: Tensor
    scale: Tensor

    def __init__(self, plain: nn.Linear, **tensors: Tensor) -> None:
        nn.Module.__init__(self)  # a weight of nn.Linear's own would be as large as the one that is saved
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.dtype = plain.weight.dtype
        self.bias = plain.bias
        self._form = tensors["codes"].dtype
        for name in self.names:
            self.register_buffer(name, tensors[name])

    def become_parameters(self) -> None:
        """Makes its tensors parameters, which `fully_shard` splits: codes as bytes; a single number stays whole."""
        for name in self.names:
            tensor: Tensor = getattr(self, name)
            if tensor.ndim:
                delattr(self, name)
                tensor = tensor.view(torch.uint8) if name == "codes" else tensor
                setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    def whole(self, name: str) -> Tensor:
        """One of its tensors; where it is split and not gathered for a call, every process asks for it."""
        tensor = gathered(getattr(self, name))
        return tensor.view(self._form) if name == "codes" else tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The rounded weight in the dtype that it was read in."""
        return self.restored(self.dtype)

    def restored(self, dtype: torch.dtype) -> Tensor:
        """The rounded weight [out, in], rounded to the dtype of the base and then given in `dtype`."""
        return (self.whole("codes").float() * self.whole("scale")).to(self.dtype).to(dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`W x + b`, without gradient."""
        return F.linear(x, self.restored(x.dtype), bias)

    def forward(self, x: Tensor) -> Tensor:
        """`W x + b` in the dtype of the region, or of x outside of one."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        x, bias = x.to(dtype), None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(kind, enabled=False):  # all is in one dtype by now
            if kind == "cpu" and not has_products(dtype):
                wide = None if bias is None else bias.float()
                answer: Tensor = _Restored.apply(x.float(), self, wide).to(dtype)  # type: ignore[no-untyped-call]
                return answer
            return _Restored.apply(x, self, bias)  # type: ignore[no-untyped-call, no-any-return]


class NormalFloatLinear(QuantizedLinear):
    """A layer of 4-bit codes; `scale` is that of blocks of 64, itself in 8 bits."""

    names = ("codes", "scale", "quantiles", "scale_scale", "scale_codes", "scale_offset")
    quantiles: Tensor
    scale_scale: Tensor
    scale_codes: Tensor
    scale_offset: Tensor

    def restored(self, dtype: torch.dtype) -> Tensor:
        """The weight of the codes, in a dtype."""
        from bitsandbytes import functional  # an extra that only this form needs

        made: Any = functional.QuantState  # it has no types
        codes, scale, quantiles, scale_scale, scale_codes, offset = map(self.whole, self.names)
        outer = made(absmax=scale_scale, code=scale_codes, blocksize=256, dtype=torch.float32)
        state = made(
            absmax=scale, shape=torch.Size((self.out_features, self.in_features)), code=quantiles,
            blocksize=64, quant_type="nf4", dtype=self.dtype, offset=offset, state2=outer,
        )  # fmt: skip
        weight: Tensor = functional.dequantize_4bit(codes, state)
        return weight.to(dtype)


class WholeNumberLinear(QuantizedLinear):
    """A layer of LLM.int8."""

    def restored(self, dtype: torch.dtype) -> Tensor:
        """The weight of the codes, in a dtype."""
        return (self.whole("codes").float() * (self.whole("scale")[:, None] / 127)).to(self.dtype).to(dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x W^T + bias` with whole numbers, rows of `x` quantised one by one."""
        from bitsandbytes.functional import int8_vectorwise_quant

        rows = x.reshape(-1, x.shape[-1]).float()
        largest = rows.abs().amax(1, keepdim=True)
        largest = torch.where(largest == 0, 1.0, largest)
        # Its kernels take and give float16, which ends at 65504: rows come with 1 as their largest value.
        codes, scale, _ = int8_vectorwise_quant((rows / largest).half(), threshold=0.0)
        own = self.whole("codes"), self.whole("scale")
        y: Tensor = torch.ops.bitsandbytes.int8_scaled_mm(codes, own[0], scale, own[1], dtype=torch.float32)
        y = (y * largest if bias is None else y * largest + bias).to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)
