"""Commands of flowrl in forks of this process, which has imported everything: a trial costs what the command costs."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEMORY = 8 * 2**30
"""Bytes that a fork may ask for beyond what this process has: less than the machine, so that nothing else dies."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command did: exit code (negative: the signal that ended it; None: it did not end), output, seconds."""

    code: int | None
    said: str
    seconds: float


def warm_up() -> None:
    """Imports what commands need, on one thread, so that forks start with it."""
    import torch

    torch.set_num_threads(1)
    for name in (
        "diffusers", "peft", "transformers", "tensorboard", "flowrl.training.loop", "flowrl.recipes.backprop",
        "flowrl.recipes.forward", "flowrl.recipes.grpo", "flowrl.recipes.preference", "flowrl.commands.report.run",
        "flowrl.commands.train.run", "flowrl.pipelines.sd3",
    ):  # fmt: skip
        importlib.import_module(name)


def start(words: Sequence[str], folder: Path, log: Path) -> int:
    """Starts `flowrl WORDS` in a folder, in a session of its own, with its output in a file; returns its process id."""
    if child := os.fork():
        return child
    try:
        os.setsid()
        os.chdir(folder)
        nothing, written = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(nothing, 0)
        os.dup2(written, 1)
        os.dup2(written, 2)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
        from flowrl.cli import main

        code = 70  # what a command that raises ends with
        try:
            code = main(list(words))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        import sys

        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    finally:
        os._exit(71)


def wait(child: int, log: Path, *, limit: float, begun: float) -> Answer | None:
    """The answer of a fork that has ended, or was ended after `limit` seconds; None while it runs."""
    ended, status = os.waitpid(child, os.WNOHANG)
    seconds = time.monotonic() - begun
    if not ended and seconds < limit:
        return None
    if not ended:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if ended else None
    return Answer(code=code, said=log.read_text(errors="replace"), seconds=seconds)
