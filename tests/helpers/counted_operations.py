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


def peak_on_cpu(run: Callable[[], object], *, beside: tuple[str, ...] = ()) -> int:
    """Most bytes that torch's own profiler saw allocated at once, without what is allocated inside operations whose
    names begin with one of `beside`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    waiting = [(event, False) for event in seen.profiler.kineto_results.experimental_event_tree()]
    found = []
    while waiting:
        event, inside = waiting.pop()
        if event.name == "[memory]":
            own: Any = event.extra_fields
            found.append((event.start_time_ns, own.alloc_size, own.ptr, inside))
        inside = inside or event.name.startswith(beside)
        waiting += [(child, inside) for child in event.children]
    now, most, left_out = 0, 0, set[int]()
    for _, size, pointer, inside in sorted(found):
        if size < 0 and pointer in left_out:
            left_out.remove(pointer)
        elif size > 0 and inside:
            left_out.add(pointer)
        else:
            now += size
            most = max(most, now)
    return most
