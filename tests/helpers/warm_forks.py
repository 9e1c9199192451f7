"""Commands of flowrl in processes of their own that start at once: forks of this one, which has imported everything."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from flowrl.cli import main

RAISED = 70
"""The exit code of a command that raised something."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command did: exit code (negative: the signal that ended it; None: it did not end), output, seconds."""

    code: int | None
    said: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The processes of one command, process 0 first, the files that hold what they print, and when they began."""

    pids: tuple[int, ...]
    logs: tuple[Path, ...]
    begun: float = field(default_factory=time.monotonic)

    def signal(self, number: int) -> None:
        """Sends a signal to those that still live."""
        for pid in self.pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def wait(self, seconds: float = 300, grace: float = 10) -> tuple[int, ...]:
        """Exit codes, negative for a signal; after the time, or some time after one has ended badly, all are killed."""
        codes: dict[int, int] = {}
        end = time.monotonic() + seconds
        while len(codes) < len(self.pids):
            for pid in set(self.pids) - codes.keys():
                if (found := _poll(pid)) is not None:
                    codes[pid] = found
                    if found != 0:
                        end = min(end, time.monotonic() + grace)  # for the others to say the same
            if time.monotonic() > end:
                for pid in set(self.pids) - codes.keys():
                    os.kill(pid, signal.SIGKILL)
                end = float("inf")
            time.sleep(0.005)
        return tuple(codes[pid] for pid in self.pids)

    def answer(self, limit: float) -> Answer | None:
        """What a command of one process did, or had done when it was killed after `limit` seconds; None meanwhile."""
        (pid,), seconds = self.pids, time.monotonic() - self.begun
        code = _poll(pid)
        if code is None:
            if seconds < limit:
                return None
            os.killpg(pid, signal.SIGKILL)  # and what it has started
            os.waitpid(pid, 0)
        return Answer(code, self.said(), seconds)

    def said(self) -> str:
        """All that was printed."""
        return "\n".join(log.read_text(errors="replace") for log in self.logs if log.exists())


def _poll(pid: int) -> int | None:
    """The exit code of a child; None while it lives."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def start_forks(
    arguments: Sequence[str], folders: Sequence[Path], log: Path, prepare: Callable[[], None] = lambda: None
) -> Started:
    """Starts `flowrl <arguments>` on as many processes as there are working folders, together over gloo.

    Args:
        arguments: of the command.
        folders: one for each process.
        log: what process 0 prints goes there, that of the others beside it.
        prepare: is called in every process before the command; limits of memory go there.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = tuple(log.with_name(f"{log.name}.{rank}") if rank else log for rank in range(len(folders)))
    count = len(folders)
    pids = []
    for rank, folder in enumerate(folders):
        together = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        pid = os.fork()
        if pid == 0:
            _be_the_command(arguments, folder, logs[rank], together if count > 1 else {}, prepare)
        pids.append(pid)
    return Started(pids=tuple(pids), logs=logs)


def _be_the_command(
    arguments: Sequence[str], folder: Path, log: Path, environment: dict[str, object], prepare: Callable[[], None]
) -> None:
    code = RAISED
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.update({key: str(value) for key, value in environment.items()})
        with log.open("wb", buffering=0) as output, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        sys.argv = ["flowrl", *arguments]
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        prepare()
        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # KeyboardInterrupt too: nobody above prints it, and tests read that a command let it through
        traceback.print_exc()
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(code)
