"""Connections of a reward server: how long a request's headers may take, and how many there may be at once.

uvicorn limits neither: whoever reaches the port could hold all of the process's files open without a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
"""Open at once; half of the files that a process usually may open."""
MOST_OF_ONE = 256
"""Of them from one address."""
MOST_HEADER_BYTES = 16 * 1024
"""Of a request's line and headers, while they are incomplete."""
IDLE_SECONDS = 5.0
"""Until a connection is closed that has got an answer, but never one to a request for scores."""


def limited_protocol(header_seconds: float, *, most_of_one: int = MOST_OF_ONE) -> type[H11Protocol]:
    """uvicorn's protocol, closing connections whose headers take longer than `header_seconds`, and surplus ones.

    Where an address has `most_of_one` connections, or all together `MOST_CONNECTIONS`, a new one takes the place of the
    one that has waited longest without a request, of the same address or of the one that has most; where every one is
    at work the new one is closed.
    """

    class Limited(H11Protocol):
        """One connection."""

        deadline: asyncio.TimerHandle | None = None
        address = ""
        usual_idle: float | None = None

        def connection_made(self, transport: Any) -> None:
            """Begins to wait for headers; a connection too many is closed at once, or one that does nothing."""
            super().connection_made(transport)
            peer = transport.get_extra_info("peername")
            self.address = str(peer[0]) if isinstance(peer, tuple) else ""
            open_now = [one for one in self.connections if isinstance(one, Limited)]
            by_address: dict[str, list[Limited]] = {}
            for one in open_now:
                by_address.setdefault(one.address, []).append(one)
            if len(by_address.get(self.address, ())) > most_of_one:
                self._make_room(by_address[self.address])
            elif len(open_now) > MOST_CONNECTIONS:
                self._make_room(max(by_address.values(), key=len))
            self.since = self.loop.time()
            self._watch()

        def data_received(self, data: bytes) -> None:
            """Waits no longer once the headers are whole, and again for those of the next request."""
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            """Closes soon what has asked for no scores."""
            if self.usual_idle is None:
                self.usual_idle = float(self.timeout_keep_alive)
            served = self.scope is not None and self.scope.get("state", {}).get("served")
            self.timeout_keep_alive = self.usual_idle if served else min(self.usual_idle, IDLE_SECONDS)  # type: ignore[assignment]
            self.since = self.loop.time()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            """Waits no longer."""
            self._unwatch()
            super().connection_lost(exc)

        since = 0.0

        def _make_room(self, among: Sequence[Limited]) -> None:
            waiting = [one for one in among if one is not self and one.conn.their_state is h11.IDLE]
            chosen = min(waiting, key=lambda one: one.since, default=self)
            chosen.transport.abort()
            self.connections.discard(chosen)  # its end comes later

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
