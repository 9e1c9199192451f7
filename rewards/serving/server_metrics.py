"""Counters of a reward server, written as Prometheus text (exposition format 0.0.4)."""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Mapping

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the latency histogram, seconds."""

_HELP = {
    "flowrl_requests_total": "Requests answered, by reward and HTTP status.",
    "flowrl_items_total": "Items scored, failed ones too.",
    "flowrl_item_failures_total": "Items that failed, by error word.",
    "flowrl_batches_total": "Calls of the reward.",
}
_Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counts that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, _Labels]] = Counter()
        self._latencies: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Adds to a counter; `name` without prefix and `_total`, such as "requests"."""
        with self._lock:
            self._counts[f"flowrl_{name}_total", tuple(sorted(labels.items()))] += amount

    def latency(self, reward: str, seconds: float) -> None:
        """Enters the time from a request's arrival to its answer."""
        with self._lock:
            buckets = self._latencies.setdefault(reward, [0] * (len(BUCKETS) + 1))
            buckets[bisect.bisect_left(BUCKETS, seconds)] += 1
            self._seconds[reward] += seconds  # type: ignore[assignment]

    def text(self, queued: Mapping[str, int]) -> str:
        """Everything so far; `queued` is the number of waiting items of each reward."""
        lines: list[str] = []
        with self._lock:
            for name, help_text in _HELP.items():
                lines += [f"# HELP {name} {help_text}", f"# TYPE {name} counter"]
                rows = sorted((labels, value) for (counter, labels), value in self._counts.items() if counter == name)
                lines += [f"{name}{_braces(labels)} {value}" for labels, value in rows]
            name = "flowrl_request_seconds"
            lines += [f"# HELP {name} Seconds from arrival to answer of scored requests.", f"# TYPE {name} histogram"]
            for reward, buckets in sorted(self._latencies.items()):
                total = 0
                for bound, number in zip((*map(str, BUCKETS), "+Inf"), buckets, strict=True):
                    total += number
                    lines.append(f"{name}_bucket{_braces((('le', bound), ('reward', reward)))} {total}")
                labels = _braces((("reward", reward),))
                lines += [f"{name}_sum{labels} {self._seconds[reward]:.6f}", f"{name}_count{labels} {total}"]
        name = "flowrl_queue_items"
        lines += [f"# HELP {name} Items that wait to be scored.", f"# TYPE {name} gauge"]
        lines += [f"{name}{_braces((('reward', reward),))} {number}" for reward, number in sorted(queued.items())]
        return "\n".join(lines) + "\n"


def _braces(labels: _Labels) -> str:
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
