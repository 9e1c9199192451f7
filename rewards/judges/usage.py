"""What judges behind servers cost: requests, repeated ones, tokens and seconds of this process, for the log.

USAGE.add(tokens=740, seconds=0.8)      # a request that was answered
row |= usage_row(USAGE.take())          # judge/requests, judge/tokens ... since the last time
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageCount:
    """Some requests: how many, how many of them were repeated tries, their tokens, and seconds of those answered."""

    requests: int = 0
    retries: int = 0
    tokens: int = 0
    seconds: tuple[float, ...] = ()


class Usage:
    """A count that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used, self._seconds = UsageCount(), list[float]()

    def add(self, *, again: bool = False, tokens: int = 0, seconds: float | None = None) -> None:
        """One request; `again` says that it repeats one, `seconds` is None where it was not answered."""
        with self._lock:
            used = self._used
            self._used = replace(
                used, requests=used.requests + 1, retries=used.retries + again, tokens=used.tokens + tokens
            )
            if seconds is not None:
                self._seconds.append(seconds)

    def take(self) -> UsageCount:
        """All since the last time."""
        with self._lock:
            used, seconds = self._used, tuple(self._seconds)
            self._used, self._seconds = UsageCount(), []
        return replace(used, seconds=seconds)


USAGE = Usage()
"""Of this process: all judges of a run stand in one row of its log."""


def usage_row(parts: Iterable[UsageCount]) -> dict[str, float]:
    """Numbers for the log of what some processes used; nothing where no judge was asked. `judge/requests`,
    `judge/retries` and `judge/tokens` are sums; `judge/seconds` is the median of a request that was answered,
    `judge/seconds_p95` what one in twenty exceeds."""
    parts = list(parts)
    requests = sum(part.requests for part in parts)
    if not requests:
        return {}
    row: dict[str, float] = {
        "judge/requests": requests,
        "judge/retries": sum(part.retries for part in parts),
        "judge/tokens": sum(part.tokens for part in parts),
    }
    seconds = [second for part in parts for second in part.seconds]
    if seconds:
        median, late = np.quantile(seconds, (0.5, 0.95))
        row |= {"judge/seconds": round(float(median), 4), "judge/seconds_p95": round(float(late), 4)}
    return row
