"""Signals that ask a command to stop: Ctrl-C, SIGTERM, and SIGHUP, a terminal that was closed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, each of these signals only calls `stop`, except SIGHUP under nohup, which stays ignored; nothing changes
    outside the main thread, which alone can catch signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        for stream in (sys.stdout, sys.stderr) if number == signal.SIGHUP else ():
            try:  # a write to a closed terminal would end the process, so output goes nowhere
                print(file=stream, flush=True)
            except OSError:
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), stream.fileno())
        stop()

    watched = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, handle) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
