"""Stages of an iteration: whose time it was, without waiting for a GPU; the memory of each; work beside them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from flowrl.training import stages
from flowrl.training.beside import Beside
from flowrl.training.stages import Stages

GIB = 2**30


class Gpu:
    """A device that is handed work: the host's clock goes on only where somebody waits for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.asked, self.waits, self.held = 0.0, 0.0, 0, 0
        gpu = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                self.reached = -1.0

            def record(self) -> None:
                self.reached = gpu.now + gpu.asked

            def elapsed_time(self, later: Event) -> float:
                return 1000 * (later.reached - self.reached)

            def synchronize(self) -> None:
                gpu.synchronize()

        patch.setattr(stages, "time", self)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.accelerator, "synchronize", self.synchronize)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.held)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.held + GIB // 2)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def perf_counter(self) -> float:
        return self.now

    def synchronize(self, device: torch.device | None = None) -> None:
        self.now, self.asked, self.waits = self.now + self.asked, 0.0, self.waits + 1

    def reset(self, device: torch.device) -> None:
        self.held = GIB  # what stays


@pytest.mark.parametrize(("kind", "waits"), [("cuda", 1), ("mps", 6)])
def test_a_stage_is_booked_with_the_work_that_it_asked_of_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, waits: int
) -> None:
    gpu, found = Gpu(monkeypatch), Stages(torch.device(kind))
    for _ in range(2):
        found.begin()
        gpu.asked += 4  # nobody's
        with found.of("rollout"):
            gpu.asked += 5
            with found.of("reward"):
                gpu.asked += 2
            gpu.asked += 1
        gpu.asked += 8
        with found.of("update"):
            gpu.asked += 1
        assert found.seconds() == {"rollout": 6.0, "reward": 2.0, "update": 1.0}
        assert gpu.waits == waits
        gpu.waits = 0


def test_time_of_a_stage_that_fails_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, found = Gpu(monkeypatch), Stages(torch.device("cpu"))

    @found.of("update")
    def fails() -> None:
        gpu.now += 3
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    gpu.now += 5
    assert found.seconds() == {"update": 3.0}
    assert found.memory() == {}


def test_memory_of_each_stage_is_that_of_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, found = Gpu(monkeypatch), Stages(torch.device("cuda"))
    gpu.held = 9 * GIB  # loading
    with found.of("rollout"):
        gpu.held = 4 * GIB
        with found.of("reward"):
            gpu.held = 6 * GIB
        gpu.held = 3 * GIB
    assert found.memory() == {"rollout": 4.0, "reward": 6.0, "peak": 9.0, "reserved": 9.5}
    found.begin()
    with found.of("rollout"):
        gpu.held = 2 * GIB
    assert found.memory() == {"rollout": 2.0, "peak": 9.0, "reserved": 9.5}


# ---- work beside it --------------------------------------------------------------------------------------------------


def test_work_is_done_in_order_in_one_thread_without_gradient() -> None:
    aside, seen = Beside(torch.device("cpu")), list[tuple[int, str, bool]]()

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name, torch.is_grad_enabled()))

    for number in range(20):
        aside.start(partial(note, number))
    aside.finish()
    assert [number for number, _, _ in seen] == list(range(20))
    assert {(name, grad) for _, name, grad in seen} == {("beside_0", False)}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("beside")]


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name, self.device = str(name), "cuda"

        def record_event(self) -> str:
            return f"all that {self.name} was asked for"

        def wait_event(self, event: str) -> None:
            said.append(f"{self.name} waits for {event}")

        def wait_stream(self, other: Stream) -> None:
            said.append(f"{self.name} waits for {other.name}")

    class Read(torch.Tensor):
        is_cuda = True

        def record_stream(self, stream: Any) -> None:
            said.append(f"memory is kept for {stream.name}")

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        said.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("beside"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("caller"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    aside = Beside(torch.device("cuda"))
    aside.start(lambda: said.append("work"), Read())
    aside.finish()
    assert said == [
        "memory is kept for beside", "on beside", "beside waits for all that caller was asked for", "work",
        "caller waits for beside",
    ]  # fmt: skip


def test_work_after_a_failure_or_a_stop_is_not_begun() -> None:
    aside, begun, go_on = Beside(torch.device("cpu")), list[int](), threading.Event()

    def fail() -> None:
        go_on.wait(10)
        raise ValueError("the first has failed")

    aside.start(fail)
    for number in range(3):
        aside.start(partial(begun.append, number))
    go_on.set()
    with pytest.raises(ValueError, match="the first has failed"):
        aside.finish()
    assert begun == []

    aside, held = Beside(torch.device("cpu")), threading.Event()
    aside.start(lambda: begun.append(int(held.wait(10))))
    for number in range(2, 5):
        aside.start(partial(begun.append, number))
    threading.Timer(0.05, held.set).start()
    aside.stop()
    assert begun == [1], "what was begun is ended, nothing else"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("beside")]


def test_a_failure_is_told_with_the_next_work() -> None:
    aside, failed = Beside(torch.device("cpu")), threading.Event()

    def fail() -> None:
        failed.set()
        raise ValueError("it has failed")

    aside.start(fail)
    failed.wait(10)

    def ask_on() -> None:
        for _ in range(10_000):  # the failure is known a moment later
            aside.start(lambda: None)

    with pytest.raises(ValueError, match="it has failed"):
        ask_on()
    aside.stop()
