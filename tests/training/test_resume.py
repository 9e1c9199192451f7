"""A run that is stopped, however that happens, and continued is the run that was never stopped."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TinyRuns, differences, lasting, lora, metrics
from toy_pipeline import toy_runs
from warm_forks import start_forks

from flowrl.cli import main
from flowrl.runtime.files import LOCK
from flowrl.training import checkpoints as saving
from flowrl.training import run as run_module
from flowrl.training.checkpoints import checkpoints

STOPPING = """
import pathlib, signal

calls = 0

def reward(images, prompts, metadata):
    global calls
    calls += 1
    if calls == CALL:
        for _ in range(TIMES):
            signal.raise_signal(signal.SIGINT)
    return 100 * images.mean((1, 2, 3))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRuns]:
    yield from toy_runs(tmp_path_factory.mktemp("resume"), policy={"lora_rank": 2, "ema_decay": 0.5})


@pytest.fixture(scope="module")
def whole(runs: TinyRuns) -> Path:
    """Four iterations in one go."""
    return runs.train("whole", "num_iterations=4")


def _same(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    assert lora(a) == lora(b)
    assert differences(lasting(a), lasting(b)) == 0


def _files(run: Path) -> dict[Path, tuple[bytes, int]]:
    """Every file of a run with its time, but for the lock, which each command takes."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*")
            if path.is_file() and path.name != LOCK}  # fmt: skip


def _stopping(runs: TinyRuns, call: int, times: int) -> str:
    return runs.rewards(STOPPING.replace("CALL", str(call)).replace("TIMES", str(times)))


def _resume(run: Path, *overrides: str) -> int:
    return main(["train", f"resume={run}", *overrides])


def test_more_iterations_continue_the_same_run(runs: TinyRuns, whole: Path) -> None:
    run = runs.train("longer", "num_iterations=2")
    assert _resume(run, "num_iterations=4") == 0
    _same(run, whole)
    assert _resume(run) == 0  # the raised number was kept
    assert metrics(run) == metrics(whole)


def test_an_interrupt_finishes_the_iteration_and_saves(
    runs: TinyRuns, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.folder / "interrupted"
    handler = signal.getsignal(signal.SIGINT)
    arguments = ("num_iterations=4", "checkpoint_every=100", f"out={run}", _stopping(runs, 2, 1))
    assert main(["train", str(runs.config), *arguments]) == 130
    shown = capsys.readouterr().out
    assert "Stopping after this iteration" in shown
    assert f"flowrl train resume={run}" in shown
    assert signal.getsignal(signal.SIGINT) is handler
    assert len(metrics(run)) == 2
    assert "not finished" in (run / "report.html").read_text()
    assert not (run / "summary.json").exists()
    assert _resume(run) == 0
    assert [row["loss"] for row in metrics(run)] == [row["loss"] for row in metrics(whole)]
    assert lora(run) == lora(whole)
    assert json.loads((run / "summary.json").read_text())["iterations"] == 4


def test_an_interrupt_during_the_first_evaluation_trains_nothing(runs: TinyRuns, whole: Path) -> None:
    run = runs.folder / "before"
    held_out = f"prompts.eval={runs.folder / 'prompts.txt'}"
    arguments = ("num_iterations=4", held_out, "eval.initial=true", "eval_every=4", _stopping(runs, 1, 1), f"out={run}")
    assert main(["train", str(runs.config), *arguments]) == 130
    assert [row["iteration"] for row in metrics(run) if "loss" in row] == []
    assert _resume(run) == 0
    assert lora(run) == lora(whole)


def test_a_second_interrupt_stops_at_once(runs: TinyRuns, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.folder / "twice"
    assert main(["train", str(runs.config), "num_iterations=4", f"out={run}", _stopping(runs, 3, 2)]) == 130
    assert "resume=" in capsys.readouterr().err
    assert len(metrics(run)) == 2
    assert _resume(run) == 0
    assert lora(run) == lora(whole)


def test_a_finished_run_says_so(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _files(whole)
    assert _resume(whole) == 0
    assert "is finished (4 of 4 iterations)" in capsys.readouterr().out
    assert _files(whole) == before


def test_without_a_complete_checkpoint_it_starts_again(runs: TinyRuns, whole: Path) -> None:
    run = runs.folder / "begun"
    assert main(["train", str(runs.config), "num_iterations=4", f"out={run}", _stopping(runs, 1, 2)]) == 130
    assert checkpoints(run) == []
    half = run / "checkpoints" / ".000002"
    half.mkdir(parents=True)
    (half / "state.pt").write_bytes(b"half")
    (run / "metrics.jsonl").write_text('{"iteration": 0}\n{"iter')
    assert _resume(run) == 0
    assert lora(run) == lora(whole)
    assert len(metrics(run)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("where", ["state.pt", "state.pt, in its midst", ".lora.writing", "metrics.jsonl"])
def test_a_full_disk_leaves_the_last_good_checkpoint(
    runs: TinyRuns, whole: Path, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = tmp_path / "run"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        if where == "state.pt":
            fsync = os.fsync

            def failing(number: int) -> None:
                if checkpoints(run):
                    raise full
                fsync(number)

            patch.setattr(os, "fsync", failing)
        elif where == "state.pt, in its midst":  # torch.save then fails once more at the archive's end
            write = saving._Digested.write

            def failing_write(self: Any, data: Any) -> int:
                if checkpoints(run) and self.file.tell():
                    raise full
                return write(self, data)

            patch.setattr(saving._Digested, "write", failing_write)
        elif where == "metrics.jsonl":
            log = run_module.Run.log

            def failing_log(self: Any, row: dict[str, Any]) -> None:
                if row["iteration"] == 1:
                    raise full
                log(self, row)

            patch.setattr(run_module.Run, "log", failing_log)
        else:
            from safetensors import SafetensorError

            from flowrl.training import loop

            save_lora = saving.save_lora

            def failing_lora(folder: Path, *arguments: Any) -> None:
                if checkpoints(run):
                    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
                save_lora(folder, *arguments)

            patch.setattr(loop, "save_lora", failing_lora)
        assert main(["train", str(runs.config), "num_iterations=4", f"out={run}"]) == 1
    shown = capsys.readouterr().err
    assert "could not be written" in shown
    assert re.search(r"no space|No space", shown)
    assert f"flowrl train resume={run}" in shown
    assert [path.name for path in checkpoints(run)] == ["000001"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["000001"]
    assert _resume(run) == 0
    _same(run, whole)


@pytest.mark.slow
def test_killed_at_a_random_moment_it_ends_the_same(runs: TinyRuns) -> None:
    """kill -9 at a seeded moment, after some progress; `tests/trials/kills.py` tries many."""
    iterations = ("num_iterations=20", "checkpoint_every=2")
    whole, run = runs.train("unkilled", *iterations), runs.folder / "killed"
    said, errors = runs.folder / "said.log", runs.folder / "errors.log"

    def tell_errors_apart() -> None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)

    arguments = ["train", str(runs.config), *iterations, f"out={run}"]
    process = start_forks(arguments, [runs.folder], said, tell_errors_apart)
    deadline = time.monotonic() + 60
    while _lines(run) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(random.Random(5).random() * 0.2)
    process.signal(signal.SIGKILL)
    assert process.wait() == (-signal.SIGKILL,), said.read_text()
    assert errors.read_text() == ""
    assert _resume(run) == 0
    _same(run, whole)


def _lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
