"""The gradient of a LoRA by each sample of a batch, from one backward pass.

Of `y = W x + s B A x` a backward pass has the inputs x and g = dL/dy of all tokens of all samples, and sums
`dA = s (B^T g) x^T`, `dB = s g (A x)^T` over them. Here `LoraLinear` sums over the tokens of each sample apart. That
needs layers that keep the rows of the network's call first in their inputs, which is looked at (`walk`). What the
formulas do not serve gets a backward pass for each sample: layers that PEFT computes (a DoRA), or that mix samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress

import torch
from torch import Tensor, nn

from flowrl.pipelines.arithmetic.lora_linear import Apart, LoraLinear, together
from flowrl.runtime.shapes import Float


class SampleGradients:
    """Takes gradients sample by sample, of the LoRA that a network has. Letters: b samples, P trained numbers."""

    def __init__(
        self, network: nn.Module, parameters: Sequence[Tensor], agreed: Callable[[list[bool]], list[bool]] = list
    ) -> None:
        """`parameters` are the trained ones; P follows their order. `agreed` tells what is true on any process that
        walks back together with this one."""
        self.parameters, self._agreed = list(parameters), agreed
        self._place, self.count = dict[int, slice](), 0
        for parameter in self.parameters:
            self._place[id(parameter)] = slice(self.count, self.count + parameter.numel())
            self.count += parameter.numel()
        self._layers = [module for module in network.modules() if isinstance(module, LoraLinear)]
        self._calls, self._samples = list[int](), 0  # rows of the network's calls so far, and of how many samples
        self._met, self._looked, self._mixed = (set[LoraLinear]() for _ in range(3))
        self._total: Tensor | None = None

    @contextmanager
    def recording(self, calls: list[int], samples: int) -> Iterator[None]:
        """Inside, a graph is built that `walk` takes. `calls` has the rows of each call of the network as it begins:
        once or more often all samples, in their order."""
        self._calls, self._samples = calls, samples
        self._met.clear()
        for layer in self._layers:
            layer.apart = partial(self._at, layer)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.apart = together

    def walk(self, loss_b: Float[Tensor, " b"], total: Float[Tensor, " b P"], *, again: bool = False) -> int:
        """Adds the gradient of each sample's loss to `total`; returns how often the graph was walked back.

        The first time that layers are met, what the first and the last sample alone give is looked at: a layer from
        which another sample gets a part of it has inputs of another order, and is not served from then on. Samples do
        not see each other in the network; `again` says that the graph will be walked once more.
        """
        alone, samples = torch.eye(len(loss_b), dtype=loss_b.dtype, device=loss_b.device), len(loss_b)
        unknown = self._met - self._looked - self._mixed if samples > 1 else set[LoraLinear]()
        new = [layer for layer in self._layers if layer in unknown]
        for sample in [0, samples - 1] * bool(new):
            probe = torch.zeros_like(total)
            self._back(loss_b, alone[sample], _weights_of(new), probe, again=True)
            probe[sample] = 0
            mixing = self._agreed([any(bool(part.any()) for part in self._of(layer, probe)) for layer in new])
            self._mixed.update(compress(new, mixing))
        self._looked |= unknown
        served = _weights_of(self._met - self._mixed) if samples > 1 else []
        known = {id(parameter) for parameter in served}
        left = [parameter for parameter in self.parameters if id(parameter) not in known]
        times = int(bool(served))
        if served:
            self._back(loss_b, alone.sum(0), served, total, again=again or bool(left))
        for sample in range(samples * bool(left)):
            gradients = self._back(loss_b, alone[sample], left, None, again=again or sample + 1 < samples)
            found = [(p, own) for p, own in zip(left, gradients, strict=True) if own is not None]
            times += bool(found)
            for parameter, own in found:
                total[sample, self._place[id(parameter)]] += own.flatten()
        return times

    def _back(
        self, loss_b: Tensor, of_b: Tensor, inputs: list[Tensor], total: Tensor | None, *, again: bool
    ) -> Sequence[Tensor | None]:
        """Gradients of some samples' losses; those of served layers go to `total`."""
        self._total = total
        try:
            return torch.autograd.grad(loss_b, inputs, of_b, allow_unused=True, retain_graph=again)
        finally:
            self._total = None

    def _of(self, layer: LoraLinear, total: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of `total` that are of a layer, `[b, *shape]` of its two matrices."""
        first, second = (total[:, self._place[id(p)]].unflatten(1, p.shape) for p in _weights(layer))
        return first, second

    def _at(self, layer: LoraLinear, x: Tensor) -> Apart:
        """The receiver of a layer's call in its backward pass."""
        rows = self._calls[-1] if self._calls else 0
        if not rows or not torch.is_grad_enabled():
            return None
        self._met.add(layer)
        if rows % self._samples or len(x) % rows or (x.ndim < 3 and len(x) != rows):
            self._mixed.add(layer)
        return partial(self._add, layer, rows)

    def _add(
        self, layer: LoraLinear, rows: int, through: Tensor, x: Tensor, grads: Tensor, low: Tensor, scale: float
    ) -> bool:
        """Adds `scale through^T x` and `scale grads^T low` sample by sample; False if they are not needed. Guided
        calls hold all samples twice, one half after the other."""
        if self._total is None or layer in self._mixed:
            return False
        for target, left, right in zip(self._of(layer, self._total), (through, grads), (x, low), strict=True):
            halves = (t.view(rows // self._samples, self._samples, -1, t.shape[-1]) for t in (left, right))
            for one, other in zip(*halves, strict=True):
                if target.dtype == one.dtype:
                    target.baddbmm_(one.transpose(1, 2), other, alpha=scale)
                else:
                    target.add_(one.transpose(1, 2).bmm(other), alpha=scale)
        return True


def _weights(layer: LoraLinear) -> tuple[Tensor, Tensor]:
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def _weights_of(layers: Iterable[LoraLinear]) -> list[Tensor]:
    return [weight for layer in layers for weight in _weights(layer)]
