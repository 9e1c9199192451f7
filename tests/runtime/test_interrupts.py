"""Signals that ask for a stop: each is told once, and under nohup a closed terminal is none."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from flowrl.runtime.interrupts import on_interrupt


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["in a terminal", "under nohup"])
def hangup(request: pytest.FixtureRequest) -> Iterator[signal.Handlers]:
    before = signal.signal(signal.SIGHUP, request.param)
    yield request.param
    signal.signal(signal.SIGHUP, before)


def test_each_signal_asks_once_and_a_closed_terminal_only_outside_of_nohup(hangup: signal.Handlers) -> None:
    asked: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with on_interrupt(lambda: asked.append("stop")):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
    assert len(asked) == (2 if hangup is signal.SIG_IGN else 3)
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGHUP) is hangup
