"""Repeats a call: measures seconds with their spread, and counts operations, saved bytes and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from flowrl.profiling.result import OUT_OF_MEMORY, Phase, TimeSpread
from flowrl.runtime.failures import out_of_memory
from flowrl.runtime.private_names import TorchDispatchMode, storage_key
from flowrl.training.processes.devices import wait_for

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopwatch:
    """How calls are timed."""

    device: torch.device
    repeats: int
    """Number of timed calls; fewer if time runs out, but at least one."""
    warm_ups: int
    """Number of calls before; one of them is counted instead of timed."""
    deadline: float
    """Deadline on the clock of `time.monotonic()`."""
    weights: frozenset[int] = frozenset()
    """Storages that are not saved activations."""
    counts: bool = True
    """Whether calls are counted; compiled code shows no operations."""

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def phase(self, section: str, name: str, call: Call, *, counted: bool = True, **facts: Any) -> Phase:
        """Times a call, which takes one repeat; the phase says if memory is not enough. `counted` adds operations and
        saved bytes, which compiled calls do not show; `facts` are other fields."""
        try:
            return self._time(section, name, call, counted=counted and self.counts, **facts)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return Phase(section=section, name=name, note=OUT_OF_MEMORY)

    def _time(self, section: str, name: str, call: Call, *, counted: bool, **facts: Any) -> Phase:
        operations = saved = None
        if counted:
            operations, saved = self._count(call)
        for _ in range(self.warm_ups - counted):
            call()
        wait_for(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        own, wall = list[float](), list[float]()
        while len(own) < self.repeats and (not own or self.left > 0):
            first, second = self._once(call)
            own.append(first)
            wall.append(second)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return Phase(
            section=section, name=name, seconds=TimeSpread.of(own), wall=TimeSpread.of(wall), repeats=len(own),
            operations=operations, saved_bytes=saved or None, peak_bytes=peak, **facts,
        )  # fmt: skip

    def _once(self, call: Call) -> tuple[float, float]:
        """Seconds of the device and of the clock."""
        begun = time.perf_counter()
        if self.device.type == "cuda":
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            call()
            last.record()
            last.synchronize()
            return first.elapsed_time(last) / 1e3, time.perf_counter() - begun
        used = time.process_time()
        call()
        wait_for(self.device)
        return time.process_time() - used, time.perf_counter() - begun

    def _count(self, call: Call) -> tuple[int, int]:
        """Operations that a call dispatches, and bytes of the distinct storages that autograd saves."""
        seen, held = set(self.weights), list[Tensor]()
        saved = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal saved
            storage = tensor.untyped_storage()
            if (key := storage_key(tensor)) not in seen:
                seen.add(key)
                held.append(tensor)  # a storage that is freed may come back as another one
                saved += storage.nbytes()
            return tensor

        with Operations() as counter, saved_tensors_hooks(pack, lambda tensor: tensor):
            call()
        return counter.number, saved


class Operations(TorchDispatchMode):
    """Counts the operations that torch dispatches, without views of tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


def storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Storages of weights."""
    return frozenset(storage_key(tensor) for tensor in tensors)
