"""What a terminal shows of workers: a line each in 80 columns, below the bar."""

from __future__ import annotations

import io
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import flowrl.runtime.progress
from flowrl.workers.dispatch import Worker
from flowrl.workers.rollouts import Rollouts


def lines_of(*workers: Worker) -> list[str]:
    alive = sum(worker.state == "here" for worker in workers)
    dispatcher = SimpleNamespace(workers=list(workers), alive=alive)
    stand_in: Any = SimpleNamespace(
        _lock=threading.Condition(), backend=SimpleNamespace(now=lambda: 100.0), dispatcher=dispatcher
    )
    return Rollouts.lines(stand_in)


def drawing(place: str = "node-7") -> Worker:
    worker = Worker(state="here", drawn=96, seconds=1.234, place=place)
    worker.holds.append(5)
    return worker


def test_every_worker_has_a_line() -> None:
    away = Worker(state="away", starts_again=130.0, drawn=4, seconds=2.0)
    found = lines_of(drawing(), Worker(state="here"), Worker(), away)
    assert [line.split()[2] for line in found] == ["drawing", "idle", "loading", "away"]
    assert "96 pieces     1.23 s/piece  node-7" in found[0]
    assert "away for 30 s" in found[3]


def test_lines_fit_and_those_in_need_come_first() -> None:
    many = [drawing("a-machine-with-quite-a-long-name") for _ in range(99_999)]
    many[70_000] = Worker(state="away", starts_again=1e4)
    found = lines_of(*many)
    assert len(found) == 8
    assert "worker 70000" in found[0]
    assert found[-1] == "  and 99992 more, 99998 there"
    assert max(map(len, found)) <= 80


def test_lines_stand_below_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(
        flowrl.runtime.progress, "Console", lambda **_: Console(file=out, force_terminal=True, width=80, height=20)
    )
    with flowrl.runtime.progress.progress("training", 3, more=lambda: ["  worker 0 draws"]) as advance:
        advance("reward 0.5")
    shown = out.getvalue()
    assert "1/3" in shown
    assert shown.rindex("worker 0 draws") > shown.rindex("1/3")
