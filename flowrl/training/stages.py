"""Where an iteration's time goes, and the memory of a GPU.

A stage may interrupt another one: marks at its ends say which stage the time belongs to. On CUDA a mark is an event
that the device passes in turn; nothing waits for it before the iteration's end. Elsewhere it is the time at which the
device has done its work.
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
        self._stage = ""  # the stage the time belongs to; None is none
        self._marks: list[tuple[str, Any]] = []
        self._peaks: dict[str, int] = defaultdict(int)
        self._highest, self._reserved = 0, 0

    def begin(self) -> None:
        """Forgets the iteration before."""
        self._marks.clear()
        self._peaks.clear()

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """Work inside belongs to a stage, except that of stages inside it."""
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
        """Peak memory in GiB of tensors on a CUDA device: for each stage of the iteration, and as "peak" since the
        process began; as "reserved" the most that torch held for them, with gaps and spare blocks. Empty elsewhere."""
        if not self.events:
            return {}
        highest = max(self._highest, torch.cuda.max_memory_allocated(self.device))
        reserved = max(self._reserved, torch.cuda.max_memory_reserved(self.device))
        stages = {stage: peak / _GIB for stage, peak in sorted(self._peaks.items()) if stage}
        return stages | {"peak": highest / _GIB, "reserved": reserved / _GIB}
