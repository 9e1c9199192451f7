"""Connections of a reward server: how long a request's headers may take, and how many there may be at once.

uvicorn limits neither: whoever reaches the port could hold all of the process's files open without a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
"""Open at once; half of the files that a process usually may open."""
MOST_HEADER_BYTES = 16 * 1024
"""Of a request's line and headers, while they are incomplete."""


def limited_protocol(header_seconds: float, closed: Callable[[], None] | None = None) -> type[H11Protocol]:
    """uvicorn's protocol, closing connections whose headers take longer than `header_seconds`, and surplus ones.

    `closed` is called after each connection.
    """

    class Limited(H11Protocol):
        """One connection."""

        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Begins to wait for headers; a connection too many is closed at once."""
            super().connection_made(transport)
            if len(self.connections) > MOST_CONNECTIONS:
                transport.abort()
            self._watch()

        def data_received(self, data: bytes) -> None:
            """Waits no longer once the headers are whole, and again for those of the next request."""
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            """Waits no longer."""
            self._unwatch()
            super().connection_lost(exc)
            if closed is not None:
                closed()

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE:  # the headers are here
                self._unwatch()
            elif self.deadline is None:
                self.deadline = self.loop.call_later(header_seconds, self.transport.abort)

        def _unwatch(self) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return Limited
