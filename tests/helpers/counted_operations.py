"""What torch is asked for, counted: operations, of which each is a launch on a GPU unless it only views; and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


class CountedOperations(TorchDispatchMode):
    """Inside, `counts` has the operations by name, without views: `add_`, `_foreach_add_`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def peak_on_cpu(run: Callable[[], object]) -> int:
    """Most bytes that torch's own profiler saw allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = (event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
