"""Work that goes on beside the caller's: one thread, which takes what it is given in order, and on CUDA a stream."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class Beside:
    """A thread and a stream for one batch of work, without gradient; ends with `finish`, or when nobody holds it.

    The stream waits for what the caller's stream was asked for before, and `finish` makes the caller's wait for it.
    Nothing of the work's is handed back but by then, so that its memory is its own until the caller's next work.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")
        self._asked: list[Future[None]] = []

    def start(self, work: Callable[[], None], *read: Tensor) -> None:
        """Asks for work; `read` are the tensors of the caller's stream that it reads, whose memory waits for it."""
        stream = self._stream
        if stream is None:
            self._asked.append(self._executor.submit(_without_gradient, work))
            return
        ready = torch.cuda.current_stream(stream.device).record_event()
        for tensor in read:
            tensor.record_stream(stream)
        self._asked.append(self._executor.submit(_on_stream, work, stream, ready))

    def finish(self) -> None:
        """Waits for all work, and ends the thread.

        Raises:
            Exception: what the first of the work that failed has raised; what was asked for after it is not begun.
        """
        try:
            for asked in self._asked:
                asked.result()
        finally:
            self._executor.shutdown(cancel_futures=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def _without_gradient(work: Callable[[], None]) -> None:
    with torch.no_grad():  # of this thread
        work()


def _on_stream(work: Callable[[], None], stream: torch.cuda.Stream, ready: torch.cuda.Event) -> None:
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        _without_gradient(work)
