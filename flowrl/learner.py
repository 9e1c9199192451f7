"""Parts of a learner: gradient sums, statistics over rows and processes, stage clocks.

Everything that is summed here is summed in float64, so that neither the number of micro-batches nor that of processes
shows in the result.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flowrl.pipelines.lora import Policy
from flowrl.run import Run

_FIRST_SCALE_LOG2 = 14  # of float16 losses


class GradientSum:
    """Sum of the gradients of micro-batches, in float64.

    float16 networks lose small gradients, so there the loss is multiplied by a power of two, and the sum divided by it;
    the power, kept in `counters` and so in checkpoints, falls by one where a gradient overflows and that update is left
    out.
    """

    def __init__(self, policy: Policy, counters: dict[str, int], *, scale_loss: bool) -> None:
        self.parameters = list(policy.parameters.values())
        wide = torch.float32 if self.parameters[0].device.type == "mps" else torch.float64
        self.total = [torch.zeros_like(p, dtype=wide) for p in self.parameters]
        self.counters = counters
        counters.setdefault("loss_scale_log2", _FIRST_SCALE_LOG2 if scale_loss else 0)

    def add(self, loss: Tensor) -> None:
        """Back-propagates a loss and adds its gradient."""
        scale = 2.0 ** self.counters["loss_scale_log2"]
        gradients = torch.autograd.grad(loss * scale, self.parameters, allow_unused=True)
        for total, gradient in zip(self.total, gradients, strict=True):
            if gradient is not None:
                total += gradient.to(total.dtype) / scale

    def apply(self, run: Run, optimizer: torch.optim.Optimizer, max_norm: float, iteration: int) -> Tensor:
        """Adds up the processes, clips, and takes an optimizer step; returns the norm before clipping.

        Raises:
            ValueError: the gradient is not finite; the weights are left as they were.
        """
        flat = torch.cat([total.flatten() for total in self.total])
        if run.world > 1:
            flat = run.accelerator.reduce(flat, reduction="sum")
        if self.counters["loss_scale_log2"] > 0 and not bool(torch.isfinite(flat).all()):
            self.counters["loss_scale_log2"] -= 1
            return flat.new_zeros(())
        pieces = flat.split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).float()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        if not bool(torch.isfinite(norm)):
            raise ValueError(
                f"iteration {iteration}: the gradient is not finite, so no step was taken: lower optim.lr or "
                "sampler.noise_level, or set pipeline.dtype to bfloat16 or float32. The last checkpoint is good"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm


class Statistics:
    """Sums over live rows in float64, joined over processes when read."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._largest: dict[str, float] = defaultdict(float)
        self._noted: dict[str, list[float]] = defaultdict(list)

    def add(self, keep: Tensor, **values_b: Tensor) -> None:
        """Adds values of rows; only live rows count."""
        for name, value in values_b.items():
            self._sums[name] += float(value.detach()[keep].double().sum())
            self._counts[name] += int(keep.sum())

    def maximum(self, name: str, values: Tensor) -> None:
        """Keeps the largest value seen."""
        self._largest[name] = max(self._largest[name], float(values.detach().max()))

    def note(self, name: str, value: Tensor) -> None:
        """Notes a number that all processes share; read as its mean."""
        self._noted[name].append(float(value))

    def largest(self, name: str, run: Run) -> float:
        """The largest value over all processes."""
        mine = torch.tensor([self._largest[name]], dtype=torch.float32, device=run.device)
        return float(run.gather(mine).max())

    def rows(self, run: Run) -> int:
        """Live rows over all processes and updates."""
        return int(run.accelerator.reduce(torch.tensor(self._counts["loss"], device=run.device)).item())

    def means(self, run: Run) -> dict[str, float]:
        """Mean of every quantity over the live rows of all processes; the same keys on each."""
        names = ["loss", "policy_loss", "ratio_mean", "clip_fraction", "approx_kl", "kl"]
        mine = torch.tensor([[self._sums[n], self._counts[n]] for n in names], dtype=torch.float64)
        if run.device.type == "mps":
            mine = mine.float()
        total = run.accelerator.reduce(mine.to(run.device), reduction="sum")
        result = {n: float(s / c) for n, (s, c) in zip(names, total.cpu(), strict=True) if c > 0}
        result |= {name: sum(values) / len(values) for name, values in self._noted.items()}
        return result | {"ratio_max_deviation": self.largest("ratio_max_deviation", run)}


@contextmanager
def clock(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Adds the time spent inside to a stage."""
    begun = time.perf_counter()
    yield
    seconds[stage] += time.perf_counter() - begun
