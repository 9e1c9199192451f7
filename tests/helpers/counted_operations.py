"""What torch is asked for, counted: operations, of which each is a launch on a GPU unless it only views; and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.pipelines.shared.family_pipeline import Family
from flowrl.planning.cost import decode_flops
from flowrl.planning.decoding import decode_peaks
from flowrl.planning.network import FewBlocks, Network, Trained, few_blocks, measure, without_gradient

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


@dataclass
class _Few:
    """Stands for `FewBlocks` of a model until something of it is measured for the first time."""

    family: Family
    model: str
    targets: tuple[str, ...]
    trained: Trained | None = None
    dtype: torch.dtype = torch.float32
    made: FewBlocks | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.model, self.targets, str(self.family.card(self.model)))

    def network(self) -> FewBlocks:
        if self.made is None:
            self.made = few_blocks(self.family, self.model, self.targets)
        assert self.made is not None
        return self.made

    def measured(self, call: dict[str, Any]) -> Network:
        assert self.trained is not None
        return measure(self.network(), call, trained=self.trained, dtype=self.dtype)

    def ungraded(self, call: dict[str, Any]) -> tuple[int, int]:
        if self.made is None:
            self.measured(call)  # which gives it its LoRA
        return without_gradient(self.network(), call)


_MEASURED: dict[Any, Any] = {}


def _once(key: Any, make: Callable[[], Any]) -> Any:
    if key not in _MEASURED:
        _MEASURED[key] = make()
    return _MEASURED[key]


def _shapes(call: Mapping[str, Any]) -> str:
    return str({key: value.shape if isinstance(value, Tensor) else value for key, value in call.items()})


def _few(own: Any, model: str, targets: Sequence[str]) -> Any:
    card = own.card(model) if isinstance(own, Family) else None
    if card is None or card.network is None:
        return few_blocks(own, model, targets)
    return _Few(family=own, model=model, targets=tuple(targets))


def _measure(few: Any, call: dict[str, Any], *, trained: Trained, dtype: torch.dtype) -> Any:
    if not isinstance(few, _Few):
        return measure(few, call, trained=trained, dtype=dtype)
    few.trained, few.dtype = trained, dtype
    return _once(("measure", few.key, _shapes(call), str(trained), dtype), lambda: few.measured(call))


def _without_gradient(few: Any, call: dict[str, Any]) -> Any:
    if not isinstance(few, _Few):
        return without_gradient(few, call)
    return _once(("without", few.key, _shapes(call), str(few.trained), few.dtype), lambda: few.ungraded(call))


def _decode_peaks(own: Any, model: str, size: Any, *, dtype: str) -> Any:
    key = ("peaks", own.name, model, str(own.card(model)), size, dtype)
    return _once(key, lambda: decode_peaks(own, model, size, dtype=dtype))


def _decode_flops(model: str, parts: Any, size: Any) -> Any:
    return _once(("flops", model, str(parts), size), lambda: decode_flops(model, parts, size))


def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of one network measure it, and its decoding, once in this process; they make it only for that."""
    for name, function in {"few_blocks": _few, "measure": _measure, "without_gradient": _without_gradient}.items():
        monkeypatch.setattr(f"flowrl.planning.gather.{name}", function)
    monkeypatch.setattr("flowrl.planning.family_route.decode_peaks", _decode_peaks)
    monkeypatch.setattr("flowrl.planning.family_route.decode_flops", _decode_flops)
