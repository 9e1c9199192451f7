"""Whatever is raised is told in one paragraph; the traceback goes to a file and never to the terminal."""

from __future__ import annotations

import errno
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from tiny_runs import TinyRuns, metrics
from toy_pipeline import toy_runs

from flowrl.cli import in_flags, main
from flowrl.commands import report as report_command
from flowrl.config.sections import EvalConfig, PipelineConfig
from flowrl.config.train import TrainConfig
from flowrl.runtime import failures
from flowrl.runtime.disk_errors import WORDS
from flowrl.runtime.failures import describe_error, explain, out_of_memory, write_error_log


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def deep() -> None:
    deep()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRuns]:
    yield from toy_runs(tmp_path_factory.mktemp("failures"))


@pytest.mark.parametrize("number", [number for number in errno.errorcode if number != errno.ENOMEM])
@pytest.mark.parametrize("name", [None, "runs/a/x"])
def test_no_number_of_the_system_is_told_without_words_and_a_place(number: int, name: str | None) -> None:
    said = explain(raised(OSError(number, os.strerror(number), *([] if name is None else [name]))))
    assert "Errno" not in said
    assert "runs/a/x" in said or "runtime/test_failures.py:" in said


def test_a_file_that_was_open_when_the_disk_failed_is_named(tmp_path: Path) -> None:
    """What a write to it raises holds no name."""

    def written(path: Path) -> None:
        with path.open("w") as file:
            file.write("x")
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output") as found:
        written(tmp_path / "metrics.jsonl")
    assert f"the disk reports an error ({tmp_path / 'metrics.jsonl'})" in explain(found.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a.yaml: no"), "a.yaml: no"),
        (KeyError("slots"), "an error that flowrl does not know stopped the command"),
        (KeyError("slots"), "KeyError: 'slots'"),
        (RuntimeError("x " * 900), "RuntimeError: x x"),
        (RecursionError("too deep"), "nested too deep"),
        (SystemExit(0), "sys.exit(0) was called"),
        (pickle.UnpicklingError("Weights only load failed"), "take the model as .safetensors"),
        (SafetensorError("Error while deserializing header: incomplete"), "damaged or cut short"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "could not be written: no space is left"),
        (RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/3"), "no space is left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "runs/a/x"), "quota of the disk is used up (runs/a/x)"),
        (OSError(errno.EFBIG, "File too large"), "ulimit -f"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "can only be read (/x)"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a/b.txt"), "there is no a/b.txt (seen from"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/a/b.txt"), "there is no /a/b.txt: check"),
        (PermissionError(errno.EACCES, "Permission denied", "/absent/x"), "/absent/x cannot be written"),
        (FileExistsError(errno.EEXIST, "File exists", "out"), "out is there already, or lies in what is no folder"),
        (OSError(errno.EMFILE, "Too many open files", "x"), "ulimit -n"),
        (OSError(errno.EIO, "Input/output error", "x"), "could not be read or written: the disk reports an error (x)."),
        (OSError(errno.ESTALE, "Stale file handle", "x"), "does not know it any more (stale handle) (x). Mount"),
        (OSError(errno.ENOLCK, "No locks available", "x"), "its disk has no locks (x). Have it mounted with locks"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "y" * 9999), "y). Choose a shorter name"),
        (OSError(errno.ENFILE, "Too many open files in system"), "too many files are open on this machine (at "),
        (OSError(errno.EACCES, "Permission denied"), "the system refused what was asked of it (at "),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "a connection failed (at "),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x"), "x: Is a directory"),
        (OSError("the hub does not answer"), "the hub does not answer"),
        (ModuleNotFoundError("No module named 'hpsv2x'", name="hpsv2x"), "'hpsv2x' is missing"),
        (UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range"), "PYTHONIOENCODING=utf-8"),
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"), "another process of this run ended"),
        (RuntimeError("CUDA error: device-side assert triggered"), "CUDA_LAUNCH_BLOCKING=1"),
    ],
)  # fmt: skip
def test_errors_in_words(error: BaseException, said: str) -> None:
    shown = explain(raised(error))
    assert said in shown
    assert "\n" not in shown
    assert len(shown) < 1200


def test_an_unreadable_file_is_not_told_as_an_unwritable_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("x")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)
    error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "secret"))
    assert "secret cannot be read" in explain(error)


@pytest.mark.parametrize(
    ("error", "whose", "more"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "GPU", "2.00 GiB"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to "
                      "allocate 4294967296 bytes. Error code 12"), "machine", "4.00 GiB"),
        (MemoryError(), "machine", ""),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "machine", ""),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "GPU", ""),
    ],
)  # fmt: skip
def test_out_of_memory_names_what_needs_less(error: Exception, whose: str, more: str) -> None:
    assert out_of_memory(error)
    shown = explain(error)
    assert f"the {whose}'s memory" in shown.replace("this machine", "the machine")
    assert more in shown
    with pytest.raises(OSError, match="cannot be read") as wrapped:
        raise OSError("the model cannot be read") from error
    assert "memory is used up" in explain(wrapped.value)


def test_every_key_named_for_memory_exists() -> None:
    known = {field.name for field in fields(TrainConfig)}
    known |= {f"pipeline.{field.name}" for field in fields(PipelineConfig)}
    known |= {f"eval.{field.name}" for field in fields(EvalConfig)}
    advices = [advice for _, advice in WORDS["less_memory"].values()]
    named = {key for text in advices for key in re.findall(r"(?<![-`])\b(?:pipeline\.|eval\.)?[a-z]+_[a-z_]+", text)}
    assert named - known == set()
    assert {"micro_batch_size", "rollout_batch_size", "eval.batch_size", "pipeline.vae_slice"} <= named
    parameters = [key for text in advices for key in re.findall(r"`\w+`", text)]
    assert [in_flags(key, "sample") for key in parameters] == ["--batch-size", "--batch-size", "--dtype"]


def test_the_log_has_the_traceback(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = temporary / "run"
    run.mkdir()
    error = raised(KeyError("slots"))
    assert write_error_log(run, error) == run / "error.log"
    assert "KeyError: 'slots'" in (run / "error.log").read_text()
    monkeypatch.setenv("RANK", "1")
    assert write_error_log(run, error) == run / "error-1.log"
    elsewhere = write_error_log(temporary / "absent", error)
    assert elsewhere is not None
    assert elsewhere.parent == temporary
    assert "Traceback" in elsewhere.read_text()
    monkeypatch.setattr(tempfile, "mkstemp", lambda **_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert write_error_log(temporary / "absent", error) is None
    assert "KeyError" in describe_error(error, temporary / "absent")


def unknown() -> None:
    raise KeyError("slots")


def exits() -> None:
    sys.exit(0)


def unwritable() -> None:
    "é".encode("ascii")


@pytest.mark.parametrize(
    ("failing", "said"), [(unknown, "KeyError"), (exits, "sys.exit(0)"), (deep, "nested"), (unwritable, "ascii")]
)
def test_no_traceback_reaches_the_terminal(
    failing: Callable[[], None],
    said: str,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(report_command, "run", lambda parsed: failing())
    assert main(["report", "x"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("flowrl: ")
    assert said in shown
    assert "Traceback (" not in shown
    assert shown.count("\n") == 1
    (log,) = temporary.glob("flowrl-error-*.log")
    assert f"The traceback is in {log}" in shown
    monkeypatch.setenv(failures.SHOW, "1")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["report", "x"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback (" in shown
    assert "flowrl (process 2 of 4): " in shown


GONE = """
import sys
from flowrl.commands import report
report.run = lambda parsed: print("x" * 1000000) or 0
from flowrl.cli import main
sys.exit(main(["report", "x"]))
"""


def test_a_reader_that_has_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", GONE], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


# ---- runs ------------------------------------------------------------------------------------------------------------

FAILING = """
calls = 0

def reward(images, prompts, metadata):
    global calls
    calls += 1
    if calls == {call}:
        {body}
    return 100 * images.mean((1, 2, 3))
"""


def train(runs: TinyRuns, out: Path, call: int, body: str, *overrides: str) -> int:
    reward = runs.rewards(FAILING.format(call=call, body=body))
    return main(["train", str(runs.config), f"out={out}", reward, *overrides])


def fail_in(monkeypatch: pytest.MonkeyPatch, iteration: int, error: BaseException) -> None:
    """Makes the log of an iteration raise."""
    from flowrl.training.run import Run

    log = Run.log

    def failing(self: Run, row: Any) -> None:
        if row["iteration"] == iteration:
            raise error
        log(self, row)

    monkeypatch.setattr(Run, "log", failing)


def test_a_run_that_an_error_stops_has_a_log_and_a_report(
    runs: TinyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        fail_in(patch, 1, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB"))
        assert main(["train", str(runs.config), f"out={run}"]) == 1
    shown = capsys.readouterr().err
    assert "1.50 GiB more were asked for" in shown
    assert "micro_batch_size" in shown
    assert f"The traceback is in {run / 'error.log'}" in shown
    assert f"The last good checkpoint is {run / 'checkpoints' / '000001'}" in shown
    assert "OutOfMemoryError" in (run / "error.log").read_text()
    page = (run / "report.html").read_text()
    assert "An error stopped this run" in page
    assert "1.50 GiB" in page
    assert main(["train", f"resume={run}"]) == 0
    assert "An error stopped" not in (run / "report.html").read_text()


def test_a_run_that_had_not_begun_leaves_nothing_and_advises_no_resume(
    runs: TinyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(runs, tmp_path / "run", 1, "raise OSError(28, 'No space left on device')") == 1
    shown = capsys.readouterr().err
    assert "resume=" not in shown
    assert "Nothing was trained yet, so start again" in shown
    assert not (tmp_path / "run").exists()


def test_a_link_to_a_folder_stays_and_the_reason_is_told(
    runs: TinyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert train(runs, tmp_path / "run", 1, "raise KeyError('colour')") == 1
    shown = capsys.readouterr().err
    assert "KeyError: 'colour'" in shown
    assert "symbolic" not in shown
    assert list((tmp_path / "disk").iterdir()) == []
    assert (tmp_path / "run").is_symlink()


def test_what_the_run_did_not_write_is_never_removed(
    runs: TinyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert (
        train(
            runs,
            run,
            1,
            f"import pathlib; pathlib.Path({str(run / 'mine.txt')!r}).write_text('x'); raise KeyError('colour')",
        )
        == 1
    )
    assert (run / "mine.txt").read_text() == "x"
    assert f"No checkpoint was complete yet: 'flowrl train resume={run}'" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_not_told_as_a_full_disk(
    runs: TinyRuns, temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (FileNotFoundError(errno.ENOENT, "No such file", "there.txt"), SafetensorError("header too small")):
        with monkeypatch.context() as patch:
            fail_in(patch, 0, error)
            assert main(["train", str(runs.config), f"out={temporary / 'run'}"]) == 1
        shown = capsys.readouterr().err
        assert "Make room" not in shown
        assert "could not be written" not in shown


# ---- interrupts ------------------------------------------------------------------------------------------------------

INTERRUPTED = f"import signal; [signal.raise_signal({int(signal.SIGINT)}) for _ in range(TIMES)]"


def evaluated(runs: TinyRuns) -> list[str]:
    return [f"prompts.eval={runs.folder / 'prompts.txt'}", "eval_every=1", "eval.batch_size=1"]


@pytest.mark.slow
@pytest.mark.parametrize(("call", "rows"), [(2, 0), (7, 2)])  # the first evaluation, and the one after iteration 1
def test_an_interrupt_ends_an_evaluation_within_a_batch(
    runs: TinyRuns, tmp_path: Path, call: int, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    counted = f"import pathlib; pathlib.Path({str(tmp_path / 'calls')!r}).write_text(str(calls)); return 100"
    source = FAILING.format(call=call, body=INTERRUPTED.replace("TIMES", "1")).replace("return 100", counted)
    reward = runs.rewards(source)
    assert main(["train", str(runs.config), f"out={run}", reward, *evaluated(runs)]) == 130
    assert (tmp_path / "calls").read_text() == str(call)
    assert "Continue with:" in capsys.readouterr().out
    assert len(metrics(run) if rows else []) == rows
    assert main(["train", f"resume={run}"]) == 0
    assert {row["iteration"] for row in metrics(run) if any(key.startswith("eval/") for key in row)} >= {0, 2}


@pytest.mark.parametrize(("call", "said"), [(1, "No checkpoint was complete"), (2, "The last good checkpoint is")])
def test_a_second_interrupt_names_the_folder_and_what_is_in_it(
    runs: TinyRuns, tmp_path: Path, call: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(runs, run, call, INTERRUPTED.replace("TIMES", "2")) == 130
    shown = capsys.readouterr().err
    assert said in shown
    assert f"flowrl train resume={run}" in shown
    assert "RUN" not in shown


def test_an_interrupt_of_another_command_speaks_of_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(parsed: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_command, "run", interrupted)
    assert main(["report", "x"]) == 130
    assert capsys.readouterr().err == "\nStopped.\n"
