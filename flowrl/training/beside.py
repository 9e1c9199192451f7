"""Work beside the caller's: one thread, which works in order, and a stream on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from threading import Event

import torch
from torch import Tensor


class Beside:
    """A thread and a stream for one batch of work, without gradient; ends with `finish` or `stop`. The stream waits for
    the caller's, which waits for it from `finish` on. Nothing is handed back before, so the work's memory is its own
    until the next work."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream_of(device) if device.type == "cuda" else None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")
        self._asked: list[Future[None]] = []
        self._over = Event()  # something has failed, or the rest is not needed

    def start(self, work: Callable[[], None], *read: Tensor) -> None:
        """Asks for work; `read` are the tensors of the caller's stream that it reads; their memory waits for it. Raises
        Exception: the error of earlier work."""
        for earlier in self._asked:
            if earlier.done():
                earlier.result()
        stream, ready = self._stream, None
        if stream is not None:
            ready = torch.cuda.current_stream(stream.device).record_event()
            for tensor in read:
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        asked = self._executor.submit(copy_context().run, self._do, work, ready)  # silent where the caller is
        asked.add_done_callback(self._look)  # in the thread, before it takes the next
        self._asked.append(asked)

    def finish(self) -> None:
        """Waits for all work, and ends the thread. Raises the first error; later work is not begun."""
        try:
            for asked in self._asked:
                asked.result()
        finally:
            self.stop()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def stop(self) -> None:
        """Ends the thread after its current work; does not begin the rest."""
        self._over.set()
        self._executor.shutdown(cancel_futures=True)

    def _do(self, work: Callable[[], None], ready: torch.cuda.Event | None) -> None:
        if self._over.is_set():
            return
        with torch.no_grad():  # of this thread
            if self._stream is None or ready is None:
                work()
            else:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(ready)
                    work()

    def _look(self, asked: Future[None]) -> None:
        if not asked.cancelled() and asked.exception() is not None:
            self._over.set()


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for the whole run: a stream's memory goes only to its own later work."""
    return torch.cuda.Stream(device)
