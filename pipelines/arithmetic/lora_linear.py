"""A linear layer with a LoRA in fewer operations than PEFT's own: `y = W x + b + s B A x`, s = alpha / rank.

PEFT stays the container: names, adapters and switches are its own, and it computes everything but one plain adapter on
a plain linear layer. Two ways, both without a cache, so that they follow the layer's current weights:

- On the CPU in float32 (or float64) a call multiplies by `V = W + s B A`. Making V costs rank / rows of the product
  with x, and the answer is equal to the sum up to float32's rounding.
- Elsewhere `s B (A x)` is added within the matrix product that makes it. In 16 bits V would lose small updates to
  rounding; on a GPU TF32 rounds nearly as much.

The backward pass knows that W and b are frozen: with g = dL/dy over n rows, `dL/dx = W^T g + s A^T B^T g`,
`dL/dA = s (B^T g) x^T`, `dL/dB = s g (A x)^T`. If W is kept in few bits (`quantized_linear`), each pass restores it:
the formulas, and the numbers, are those of a plain layer with the rounded weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional as F

from flowrl.pipelines.arithmetic.quantized_linear import QuantizedLinear, WholeNumberLinear
from flowrl.pipelines.arithmetic.wide_products import has_products
from flowrl.runtime.placement import gathered
from flowrl.runtime.private_names import PeftLoraLinear, register_layers

Weight = Tensor | QuantizedLinear
Apart = Callable[[Tensor, Tensor, Tensor, Tensor, float], bool] | None
"""Takes `B^T g`, x, g and A x of a backward pass, all of rows, and s; says whether it has kept their products."""
_NOTHING: tuple[Tensor | None, Tensor | None] = (None, None)


def add_lora(network: nn.Module, config: LoraConfig, name: str) -> None:
    """Adds an adapter under a name to the layers that the configuration targets; linear ones become `LoraLinear`."""
    register_layers(config, {nn.Linear: LoraLinear})
    inject_adapter_in_model(config, network, adapter_name=name)


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`scale * a @ b` of two matrices in one operation."""
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)  # beta 0: what is in the first is not read


def together(x: Tensor) -> Apart:
    """No call's gradients are kept sample by sample."""
    return None


class LoraLinear(PeftLoraLinear):  # type: ignore[misc]
    """PEFT's layer, with a forward pass of its own for the usual case."""

    apart: Callable[[Tensor], Apart] = staticmethod(together)
    """Of a call's input what keeps its gradients sample by sample (`sample_gradients`); usually nothing."""

    def _get_in_out_features(self, module: nn.Linear) -> tuple[int, int]:
        """PEFT's own takes a weight that is split over processes for a layer that is."""
        return module.in_features, module.out_features

    def update_layer(self, *args: Any, config: LoraConfig, **kwargs: Any) -> None:
        """PEFT's own; a DoRA's magnitudes need the whole weight, which is gathered for it if it is split."""
        base = self.get_base_layer()
        part = dict(base.named_parameters(recurse=False)).get("weight") if config.use_dora else None
        if part is not None:
            base.weight = nn.Parameter(gathered(part), requires_grad=False)
        super().update_layer(*args, config=config, **kwargs)
        if part is not None:
            base.weight = part

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer with its active adapter; PEFT computes several active ones, and uncommon kinds."""
        base, kind, name = self.base_layer, x.device.type, self._plain_adapter()
        if name is None or args or kwargs:
            return super().forward(x, *args, **kwargs)
        first, second = self.lora_A[name], self.lora_B[name]
        cast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if cast else first.weight.dtype
        kept = base.dtype if isinstance(base, QuantizedLinear) else base.weight.dtype
        if kept != dtype or not (cast or x.dtype == dtype):
            return super().forward(x)
        whole = kind == "cpu" and dtype in (torch.float32, torch.float64)
        rule = Merged if whole and first.weight.dtype == dtype else Added
        weight = base if isinstance(base, QuantizedLinear) else base.weight
        given = (x.to(dtype), weight, base.bias, first.weight, second.weight, self.scaling[name], self.apart(x))
        if kind == "cpu" and not has_products(dtype):
            return _multiply_wide(*given)
        answer: Tensor = rule.apply(*given)  # type: ignore[no-untyped-call]
        return answer

    def _plain_adapter(self) -> str | None:
        """The one adapter at work, of the usual kind, on a layer whose weight is plain or can be restored."""
        names = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]
        base = self.base_layer
        restored = isinstance(base, QuantizedLinear) and not isinstance(base, WholeNumberLinear)
        if len(names) != 1 or self.merged or not (type(base) is nn.Linear or restored):
            return None
        usual = names[0] not in self.lora_variant and isinstance(self.lora_dropout[names[0]], nn.Identity)
        return names[0] if usual and self.lora_B[names[0]].bias is None else None


def _whole(w: Weight, dtype: torch.dtype) -> Tensor:
    """A weight to multiply with, restored if it is kept in few bits."""
    return w if isinstance(w, Tensor) else w.restored(dtype)


def _save(ctx: Any, w: Weight, *tensors: Tensor) -> None:
    """Saves tensors for the backward pass, and the weight: a layer of few bits as itself, since it restores it."""
    ctx.layer = None if isinstance(w, Tensor) else w
    ctx.save_for_backward(*tensors, *((w,) if isinstance(w, Tensor) else ()))


def _load(ctx: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What was saved, the weight last."""
    tensors: tuple[Tensor, ...] = ctx.saved_tensors
    return tensors if ctx.layer is None else (*tensors, ctx.layer.restored(dtype))


def _for_lora(ctx: Any, through: Tensor, x: Tensor, grads: Tensor, low: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """dL/dA and dL/dB; nothing if each sample's have been kept apart."""
    if ctx.apart is not None and ctx.apart(through, x, grads, low, ctx.scale):
        return _NOTHING
    first, second = scaled_product(through.t(), x, ctx.scale), scaled_product(grads.t(), low, ctx.scale)
    return first.to(ctx.dtype), second.to(ctx.dtype)


def _multiply_wide(
    x: Tensor, w: Weight, b: Tensor | None, lora_a: Tensor, lora_b: Tensor, s: float, apart: Apart
) -> Tensor:
    """The layer in float32 on operands that are rounded to the dtype of x, and its answer rounded to it: for 16 bits on
    a CPU that has no products of them (`pipelines/arithmetic/wide_products.py`)."""
    rounded = (t.to(x.dtype).float() if isinstance(t, Tensor) else t for t in (x, w, b, lora_a, lora_b))
    with torch.autocast("cpu", enabled=False):
        answer: Tensor = Merged.apply(*rounded, s, apart).to(x.dtype)  # type: ignore[no-untyped-call]
    return answer


class Merged(torch.autograd.Function):
    """By the sum of weights, made at each call; all of one dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Weight, b: Tensor | None, lora_a: Tensor, lora_b: Tensor, s: float, apart: Apart = None
    ) -> Tensor:
        _save(ctx, w, x, lora_a, lora_b)
        ctx.scale, ctx.dtype, ctx.apart = s, lora_a.dtype, apart
        return F.linear(x, torch.addmm(_whole(w, x.dtype), lora_b, lora_a, alpha=s), b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, lora_a, lora_b, w = _load(ctx, grad.dtype)
        rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        for_x, for_lora = None, _NOTHING
        if ctx.needs_input_grad[0]:
            for_x = grads.mm(torch.addmm(w, lora_b, lora_a, alpha=ctx.scale)).view(x.shape)
        if any(ctx.needs_input_grad[3:5]):
            for_lora = _for_lora(ctx, grads.mm(lora_b), rows, grads, rows.mm(lora_a.t()))
        return for_x, None, None, *for_lora, None, None


class Added(torch.autograd.Function):
    """By a product of low rank on top of the layer's; LoRA weights are rounded to the dtype of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Weight, b: Tensor | None, lora_a: Tensor, lora_b: Tensor, s: float, apart: Apart = None
    ) -> Tensor:
        first, second = lora_a.to(x.dtype), lora_b.to(x.dtype)
        y = F.linear(x, _whole(w, x.dtype), b)
        low = x.reshape(-1, x.shape[-1]).mm(first.t())
        y.view(-1, y.shape[-1]).addmm_(low, second.t(), alpha=s)
        _save(ctx, w, x, first, second, low)
        ctx.scale, ctx.dtype, ctx.apart = s, lora_a.dtype, apart
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, first, second, low, w = _load(ctx, grad.dtype)
        rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        through = grads.mm(second)
        for_x, for_lora = None, _NOTHING
        if ctx.needs_input_grad[0]:
            for_x = grads.mm(w).addmm_(through, first, alpha=ctx.scale).view(x.shape)
        if any(ctx.needs_input_grad[3:5]):
            for_lora = _for_lora(ctx, through, rows, grads, low)
        return for_x, None, None, *for_lora, None, None
