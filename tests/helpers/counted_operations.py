"""What torch is asked for, counted: operations, of which each is a launch on a GPU unless it only views; and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

STREAM, LEFT_OUT = "stream ", "left out"


class CountedOperations(TorchDispatchMode):
    """Inside, `counts` has the operations by name, without views: `add_`, `_foreach_add_`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def peak_on_cpu(run: Callable[[], object], *, beside: tuple[str, ...] = (), streams: bool = False) -> int:
    """Most bytes that torch's own profiler saw allocated at once, without what is allocated inside operations whose
    names begin with one of `beside`. With `streams` the sum of the most of each: `named_streams`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    waiting = [(event, "") for event in seen.profiler.kineto_results.experimental_event_tree()]
    found = []
    while waiting:
        event, place = waiting.pop()
        if event.name == "[memory]":
            own: Any = event.extra_fields
            found.append((event.start_time_ns, own.alloc_size, own.ptr, place))
        if event.name.startswith(beside) or place == LEFT_OUT:
            place = LEFT_OUT
        elif streams and event.name.startswith(STREAM):
            place = event.name
        waiting += [(child, place) for child in event.children]
    now, most, places = Counter[str](), Counter[str](), dict[int, str]()
    for _, size, pointer, place in sorted(found):
        if size > 0:
            places[pointer] = place
        own = places.pop(pointer, "") if size < 0 else place
        now[own] += size
        most[own] = max(most[own], now[own])
    return sum(most.values()) - most[LEFT_OUT]


@contextmanager
def named_streams() -> Iterator[None]:
    """Inside, what is allocated within `torch.cpu.stream` is known to `peak_on_cpu` by its stream, as a GPU's allocator
    has it: memory that is freed goes to the stream that asked for it, and to no other."""
    stock = torch.cpu.stream
    torch.cpu.stream = lambda stream: record_function(f"{STREAM}{id(stream)}")  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cpu.stream = stock


@contextmanager
def one_of(number: int) -> Iterator[Any]:
    """This process as the first of a group of so many, of which there are no others: nothing is sent, and what is
    received is whatever memory holds. A split model allocates as in a real group, without the copies of gloo."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)  # type: ignore[no-untyped-call]
    try:
        mesh = init_device_mesh("cpu", (number,))
        yield SimpleNamespace(mesh=mesh, gather=lambda mine: [mine] * number, any_needs=lambda flags: flags)
    finally:
        dist.destroy_process_group()


_MEASURED: dict[tuple[Any, ...], Any] = {}


def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of one network measure it once in this process."""
    from flowrl.planning.network import FewBlocks, Network, measure

    def remembered(denoisers: FewBlocks, call: dict[str, Any], **settings: Any) -> Network:
        shapes = tuple(str(value.shape) for value in call.values() if isinstance(value, Tensor))
        key = (shapes, sum(p.numel() for p in denoisers.least.parameters()), *map(str, settings.values()))
        if key not in _MEASURED:
            _MEASURED[key] = measure(denoisers, call, **settings)
        found: Network = _MEASURED[key]
        return found

    monkeypatch.setattr("flowrl.planning.gather.measure", remembered)
