"""Parts of a learner: gradient sums, statistics over rows and processes.

All sums are in float64, except gradients of a network's own weights. So neither the number of micro-batches nor that of
processes shows in the result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flowrl.pipelines.weights.parallelize import own_part
from flowrl.pipelines.weights.trained_weights import TrainedWeights
from flowrl.runtime.placement import sent, sent_wide
from flowrl.runtime.private_names import foreach_add_
from flowrl.samplers import Network
from flowrl.samplers.guidance import is_uncounted
from flowrl.training.run import Run
from flowrl.trajectory import Conditioning

_FIRST_SCALE_LOG2 = 14  # of float16 losses
_SCALE_RISES_AFTER = 2000  # updates without overflow, GradScaler's growth_interval
# An overflow by the scale is gone after a halving or two, since the scale rises by one at a time; a kernel that fails
# fails again. Whether it is NaN or infinity says nothing of the two: float16 gives infinity, and the next layer's
# backward pass makes NaN of it (inf - inf in a softmax, inf * 0), while kernels that fail may overflow themselves.
_DOUBTED_AFTER = 3  # overflows in a row
_JOINED = 2**28  # bytes of gradients that travel together
_EVALUATIONS = ("rollout", "completion", "update", "reference", "backward")  # what evaluations are counted as


class NetworkCounter:
    """A network that counts its evaluations: one is one row of a batch, so guidance counts twice.

    `with counter.counting("completion"): ...` names what evaluations are for. A call that builds a graph counts once
    more as "backward", because training walks back every graph once, except those of `keeping`. It does not see what
    checkpointing recomputes, nor what is `uncounted`. `join` adds what this and the other processes counted since the
    last time to `counters`, under "nfe/<kind>" and so in checkpoints: the same totals on every process.
    """

    def __init__(self, network: Network, counters: dict[str, Any]) -> None:
        self._network, self._counters, self._kind = network, counters, "rollout"
        self._own = dict.fromkeys(_EVALUATIONS, 0)
        self._graphs: list[int] | None = None  # rows of the graphs that are kept

    def __call__(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        if not is_uncounted():
            self._own[self._kind] += len(x)
            if torch.is_grad_enabled():
                if self._graphs is None:
                    self.count_backward(len(x))
                else:
                    self._graphs.append(len(x))
        return self._network(x, timestep, cond)

    def count_backward(self, rows: int) -> None:
        """Counts rows of graphs that are walked back."""
        self._own["backward"] += rows

    @contextmanager
    def keeping(self) -> Iterator[list[int]]:
        """Inside, graphs are kept, and counted only once they are walked back. The list gets the rows of each."""
        self._graphs = graphs = list[int]()
        try:
            yield graphs
        finally:
            self._graphs = None

    def join(self, run: Run) -> None:
        """Adds the evaluations of all processes since the last call to the totals; every process calls it."""
        mine = torch.tensor([self._own[kind] for kind in _EVALUATIONS], device=run.device)
        for kind, count in zip(_EVALUATIONS, run.total(mine).tolist(), strict=True):
            if count:
                self._counters[f"nfe/{kind}"] = self._counters.get(f"nfe/{kind}", 0) + count
            self._own[kind] = 0

    def hand_over(self) -> dict[str, int]:
        """The counts since the last call, for another counter to take over; none of them stays here."""
        counted, self._own = self._own, dict.fromkeys(_EVALUATIONS, 0)
        return {kind: count for kind, count in counted.items() if count}

    def take_over(self, counts: Mapping[str, int]) -> None:
        """Adds what another counter has handed over: evaluations made elsewhere."""
        for kind, count in counts.items():
            self._own[kind] += count

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Inside, evaluations count as `kind`. Raises ValueError: there is no such kind."""
        if kind not in _EVALUATIONS:
            raise ValueError(f"evaluations are counted as one of {', '.join(_EVALUATIONS)}, not {kind!r}")
        outer, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = outer

    @property
    def counts(self) -> dict[str, int]:
        """Evaluations by kind, over all processes, up to the last `join`."""
        return {key.removeprefix("nfe/"): value for key, value in self._counters.items() if key.startswith("nfe/")}


class NotFinite(ValueError):
    """A gradient whose norm is NaN or infinity; no step was taken."""

    def __init__(self, where: str, tried: str = "") -> None:
        """`where` it is, and which kernels of attention were `tried`, if several; both in words."""
        super().__init__(
            f"{where}: the gradient is not finite{tried}, so no step was taken: lower optim.lr or "
            "sampler.noise_level, or set pipeline.dtype to bfloat16 or float32"
        )


class GradientSum:
    """Sum of the gradients of micro-batches: of a LoRA in float64, of a network's own weights in float32.

    If weights are split, each process has the sums of its parts. The backward pass of a call adds up the gradients of
    all processes of a copy, a block at a time, so none ever has a whole one. Copies are added up once, at the end.

    float16 networks lose small gradients, so there the loss is multiplied by a power of two, and the sum divided by it.
    The power falls by one if a gradient overflows, and that update is left out; it rises by one after 2000 updates in a
    row, as in torch's GradScaler. `counters`, and so checkpoints, hold it. They also hold how often it fell since an
    update was taken or `doubted` was answered, and whether the last one ran under another kernel.
    """

    def __init__(self, policy: TrainedWeights, counters: dict[str, Any], *, scale_loss: bool) -> None:
        self.policy, self.trained = policy, policy.trained
        self._flat: Tensor | None = None  # all of it, where gradients are of another dtype
        places = {(p.device, policy.sum_dtype(p.device)) for p in self.trained}
        if len(places) == 1 and (place := places.pop())[1] == torch.float64:
            self._flat = torch.zeros(sum(p.numel() for p in self.trained), device=place[0], dtype=place[1])
            pieces = self._flat.split([p.numel() for p in self.trained])
            self.total = [piece.view_as(p) for piece, p in zip(pieces, self.trained, strict=True)]
        else:
            sums = [torch.zeros_like(p, dtype=policy.sum_dtype(p.device)) for p in self.trained]
            self.total = [own_part(total) for total in sums]
            for p, total in zip(self.trained, sums, strict=True) if policy.split is not None else ():
                p.grad = total  # which backward passes add to
        counters.setdefault("loss_scale_log2", _FIRST_SCALE_LOG2 if scale_loss else 0)
        self.counters, self.scale_loss = counters, scale_loss or counters["loss_scale_log2"] > 0
        if self.scale_loss:
            for name in ("loss_scale_held", "loss_scale_fell", "kernel_failed"):
                counters.setdefault(name, 0)
        self._joined = False

    def clear(self) -> None:
        """Drops what was added, so that the sum can be taken again in the same memory."""
        self._joined = False
        for total in self.total:
            total.zero_()

    def add(self, loss: Tensor) -> None:
        """Back-propagates a loss and adds its gradient."""
        scale = 2.0 ** self.counters["loss_scale_log2"]
        if self.policy.split is not None:
            loss.backward()
            return
        gradients = torch.autograd.grad(loss if scale == 1 else loss * scale, self.trained, allow_unused=True)
        known = [(total, own) for total, own in zip(self.total, gradients, strict=True) if own is not None]
        totals, own = [total for total, _ in known], [one for _, one in known]
        # The product with a power of two is exact.
        if self._flat is not None and len(own) == len(self.total):
            self._flat.add_(torch.cat([one.flatten() for one in own]), alpha=1 / scale)  # two launches for all tensors
        elif known:
            foreach_add_(totals, own, alpha=1 / scale)  # one for all of a dtype, and as many as tensors for two

    def add_known(self, gradient: Tensor, factor: float) -> None:
        """Adds a gradient `[P]` of all that is trained, in their order, times a factor."""
        gradient = sent(gradient, self.trained[0].device)
        if self._flat is not None:
            self._flat.add_(gradient, alpha=factor)
        else:
            pieces = gradient.split([p.numel() for p in self.trained])
            own = [piece.view_as(p) for piece, p in zip(pieces, self.trained, strict=True)]
            foreach_add_(self.total, own, alpha=factor)

    def apply(self, run: Run, optimizer: torch.optim.Optimizer, max_norm: float, iteration: int) -> Tensor | None:
        """Adds up the processes, clips, and takes an optimizer step.

        Returns the norm before clipping; None if a scaled gradient overflowed, and then nothing has moved.

        Raises NotFinite: the gradient is not finite; the weights are left as they were.
        """
        gradients = self._gradients(run)
        norm = self._norm(gradients)
        if not bool(torch.isfinite(norm)):
            if self.counters["loss_scale_log2"] == 0:
                raise NotFinite(f"iteration {iteration}")
            fell = {"loss_scale_fell": self.counters["loss_scale_fell"] + 1, "loss_scale_held": 0}
            self.counters |= {"loss_scale_log2": self.counters["loss_scale_log2"] - 1, **fell}
            return None
        parameters = list(self.policy.parameters.values())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        clip_grads_with_norm_(parameters, max_norm, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.policy.settle()
        if self.scale_loss:
            self.counters |= {"loss_scale_fell": 0, "kernel_failed": 0}
            self.counters["loss_scale_held"] += 1
            if self.counters["loss_scale_held"] == _SCALE_RISES_AFTER:
                self.counters |= {"loss_scale_log2": self.counters["loss_scale_log2"] + 1, "loss_scale_held": 0}
        return norm

    def is_finite(self, run: Run) -> bool:
        """Whether `apply` takes a step: the norm of the sum over all processes is finite in float32."""
        return bool(torch.isfinite(self._norm(self._gradients(run))))

    @property
    def doubted(self) -> bool:
        """Whether an overflow looks like a kernel's: the third in a row, or the next of a kernel that has failed."""
        return self.counters["loss_scale_fell"] >= (1 if self.counters["kernel_failed"] else _DOUBTED_AFTER)

    def _gradients(self, run: Run) -> list[Tensor]:
        """The sum over all processes as the optimizer takes it: in float32, on its weights' device."""
        self._join(run)
        weights = self.policy.parameters.values()
        return [total.to(weight.device, torch.float32) for weight, total in zip(weights, self.total, strict=True)]

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        norm = get_total_norm(gradients)
        if (split := self.policy.split) is not None:
            norm = torch.tensor(math.hypot(*split.gather(float(norm))), device=norm.device)
        return norm

    def _join(self, run: Run) -> None:
        """Replaces the sums by those over all processes, once, some hundred million bytes at a time."""
        if self._joined or run.processes == 1:
            return
        add_up = run.total_gradient if self.policy.split is None else run.total_of_copies
        self._joined = True
        first, most = 0, _JOINED // self.total[0].element_size()
        while first < len(self.total):
            last, count = first + 1, self.total[first].numel()
            while last < len(self.total) and count + self.total[last].numel() <= most:
                count, last = count + self.total[last].numel(), last + 1
            part = self.total[first:last]
            flat = add_up(torch.cat([total.flatten() for total in part]))
            for total, piece in zip(part, flat.split([total.numel() for total in part]), strict=True):
                total.copy_(piece.view_as(total))
            first = last


class Statistics:
    """Three reductions of what an update sees: means over live rows, largest values, and shared numbers. Rows stay on
    their device until a number is needed. Sums are taken on the host in float64, in the order of the micro-batches, and
    joined over processes."""

    def __init__(self, *names: str) -> None:
        """`names` are the quantities that may need a mean, the same on every process; "loss" is always one."""
        self.names = names
        self._sums = dict.fromkeys(("loss", *names), 0.0)
        self._counts = dict.fromkeys(("loss", *names), 0)
        self._largest: dict[str, float] = {}
        self._shared: dict[str, list[float]] = defaultdict(list)
        self._waiting: list[tuple[str, bool, Tensor, Tensor | None]] = []  # name, whether summed, values, live rows
        self.settle()

    def settle(self) -> None:
        """What was added so far stays where the newest rows are replaced."""
        self._settled = dict(self._sums), dict(self._counts), dict(self._largest), list(self._waiting)

    def replace_not_finite(self, other: Statistics) -> None:
        """Replaces the rows added since `settle` by another's if they hold NaN or infinity."""
        self._read()
        if all(map(math.isfinite, (*self._sums.values(), *self._largest.values()))):
            return
        names = self._largest  # those that every process knows stay
        self._sums, self._counts, self._largest, self._waiting = self._settled
        self._waiting += other._waiting
        self._read()
        self._largest = dict.fromkeys(names, 0.0) | self._largest

    def mean(self, keep: Tensor | None, **values_b: Tensor) -> None:
        """Adds values of rows for their mean; only live rows count, or all if `keep` is None. Raises KeyError: a name
        that was not announced."""
        if unknown := values_b.keys() - self._sums.keys():
            raise KeyError(f"no mean was announced of {', '.join(sorted(unknown))}")
        self._waiting += [(name, True, value.detach(), keep) for name, value in values_b.items()]

    def largest(self, keep: Tensor | None, **values_b: Tensor) -> None:
        """Adds values of rows for the largest among the live ones, or 0."""
        self._waiting += [(name, False, value.detach(), keep) for name, value in values_b.items()]

    def shared(self, **values: Tensor | float) -> None:
        """Adds numbers that all processes share, for their mean."""
        for name, value in values.items():
            self._shared[name].append(float(value))

    def _read(self) -> None:
        """Copies waiting rows to the host, in one copy per dtype."""
        waiting, self._waiting = self._waiting, []
        tensors = [t for _, _, value, keep in waiting for t in (value, keep) if t is not None]
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            kinds[tensor.device, tensor.dtype].append(tensor)
        pieces = {kind: iter(torch.cat(alike).cpu().split([len(t) for t in alike])) for kind, alike in kinds.items()}
        found = (next(pieces[tensor.device, tensor.dtype]) for tensor in tensors)
        for name, summed, _, keep in waiting:
            value, live = next(found), None if keep is None else next(found)
            value = value if live is None else value[live]
            if summed:
                self._sums[name] += float(value.double().sum())
                self._counts[name] += len(value)
            elif len(value):
                self._largest[name] = max(self._largest.get(name, 0.0), float(value.max()))

    def largest_of_all(self, name: str, run: Run, *others: str) -> float:
        """The largest value over all processes; once asked for, every process knows the name, and those of others."""
        self._read()
        for other in others:
            self._largest.setdefault(other, 0.0)
        return largest_of(run, self._largest.setdefault(name, 0.0))

    def rows(self, run: Run) -> int:
        """Live rows over all processes and updates."""
        self._read()
        return total_of(run, self._counts["loss"])

    def row(self, run: Run) -> dict[str, float]:
        """Every quantity over the live rows of all processes; the same keys on each."""
        self._read()
        names = list(self._sums)
        mine = torch.tensor([[self._sums[n], self._counts[n]] for n in names], dtype=torch.float64)
        total = run.total(sent_wide(mine, run.device))
        result = {n: float(s / c) for n, (s, c) in zip(names, total.cpu(), strict=True) if c > 0}
        result |= {name: sum(values) / len(values) for name, values in self._shared.items()}
        return result | {name: self.largest_of_all(name, run) for name in sorted(self._largest)}


def largest_of(run: Run, number: float) -> float:
    """The largest number of all processes: by the longest time all end at the same iteration."""
    mine = torch.tensor([number], dtype=torch.float32, device=run.device)
    return float(run.gather(mine).max())


def total_of(run: Run, count: int) -> int:
    """The sum of a count over all processes."""
    if run.processes == 1:
        return count
    return int(run.total(torch.tensor(count, device=run.device)).item())
