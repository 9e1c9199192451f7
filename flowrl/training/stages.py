"""Where an iteration's time goes, and the memory of a GPU.

A stage may lie within another one, which it interrupts: at its ends a mark says whose the time is from here on. On CUDA
a mark is an event, which the device passes when it has come so far and nobody waits for before the iteration's end;
elsewhere it is the time, once the device has done what it was asked for.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from flowrl.training.processes.devices import wait_for

_GIB = 2**30


class Stages:
    """The stages of one iteration after another."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.events = device, device.type == "cuda"
        self._stage = ""  # whose the time is now: of none
        self._marks: list[tuple[str, Any]] = []
        self._peaks: dict[str, int] = defaultdict(int)
        self._highest, self._reserved = 0, 0

    def begin(self) -> None:
        """Forgets the iteration before."""
        self._marks.clear()
        self._peaks.clear()

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """What is done inside belongs to a stage, but for what belongs to stages inside it."""
        outer = self._stage
        self._turn_to(stage)
        try:
            yield
        finally:
            self._turn_to(outer)

    def _turn_to(self, stage: str) -> None:
        if self.events:
            mark: Any = torch.cuda.Event(enable_timing=True)
            mark.record()
            peak = torch.cuda.max_memory_allocated(self.device)
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)
            self._peaks[self._stage] = max(self._peaks[self._stage], peak)
            self._highest = max(self._highest, peak)
        else:
            wait_for(self.device)
            mark = time.perf_counter()
        self._stage = stage
        self._marks.append((stage, mark))

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage so far; waits until a GPU has come to the last mark."""
        found: dict[str, float] = defaultdict(float)
        if self._marks and self.events:
            self._marks[-1][1].synchronize()
        for (stage, begun), (_, ended) in pairwise(self._marks):
            if stage:
                found[stage] += begun.elapsed_time(ended) / 1000 if self.events else ended - begun
        return found

    def memory(self) -> dict[str, float]:
        """The most memory in GiB that tensors have taken up at once on a CUDA device: in each stage of the iteration,
        and, as "peak", since the process began; as "reserved" what torch held of the device for them at most, gaps
        between them and what it keeps for later included. Empty elsewhere."""
        if not self.events:
            return {}
        highest = max(self._highest, torch.cuda.max_memory_allocated(self.device))
        reserved = max(self._reserved, torch.cuda.max_memory_reserved(self.device))
        stages = {stage: peak / _GIB for stage, peak in sorted(self._peaks.items()) if stage}
        return stages | {"peak": highest / _GIB, "reserved": reserved / _GIB}
