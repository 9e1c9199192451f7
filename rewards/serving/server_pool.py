"""Several servers of one reward: which is asked next, which are set aside because they do not answer, when they return.

    pool = ServerPool(servers, is_back)
    result = pool.ask(send)                # send(server) -> a result, or a Failure

A request goes to the server with the fewest requests in flight. One that does not answer is set aside, for 1 s at first
and twice as long each time, and its request goes to another at once. When its time is up it is asked whether it is
back, beside the requests, which do not wait for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from flowrl.rewards.serving.retries import Failure

S = TypeVar("S")
T = TypeVar("T")

FIRST_ASIDE, LONGEST_ASIDE = 1.0, 60.0
VERSION_CHANGED = "version_changed"
"""The failure of a server that answers with another model than at the start."""
_ASIDE = ("connection", "timeout", "status_502", "status_503", "status_504", VERSION_CHANGED)


@dataclass(kw_only=True, slots=True)
class _Desk:
    """What is known of one server; `aside` is when its time is up, None while it is asked."""

    in_flight: int = 0
    taken: int = 0
    failures: int = 0
    aside: float | None = None
    probed: bool = False


class ServerPool(Generic[S]):
    """See the module; any thread may ask. There is at least one server; the only one is asked whatever happened before.
    `is_back` asks one that was set aside whether it takes requests again."""

    def __init__(self, servers: Sequence[S], is_back: Callable[[S], bool]) -> None:
        self.servers, self._is_back = tuple(servers), is_back
        self._desks = [_Desk() for _ in self.servers]
        self._lock = threading.Lock()

    def ask(self, send: Callable[[S], T | Failure]) -> T | Failure:
        """The first good result; where every server that is not set aside failed, the last failure. Only what another
        server may do better is sent to another; what this one refuses for good is refused."""
        tried: set[int] = set()
        while True:
            place = self._take(tried)
            result: T | Failure = Failure(error="exception", again=False)
            try:
                result = send(self.servers[place])
            finally:
                self._give_back(place, result)
            tried.add(place)
            if not self._others(tried, result):
                return result

    async def ask_awaited(self, send: Callable[[S], Awaitable[T | Failure]]) -> T | Failure:
        """`ask` for a `send` that is awaited."""
        tried: set[int] = set()
        while True:
            place = self._take(tried)
            result: T | Failure = Failure(error="exception", again=False)
            try:
                result = await send(self.servers[place])
            finally:
                self._give_back(place, result)
            tried.add(place)
            if not self._others(tried, result):
                return result

    def _take(self, tried: Collection[int]) -> int:
        """The place of the next server: of those not tried, in use and with the fewest in flight; then in turn."""
        with self._lock:
            now = time.monotonic()
            for place, desk in enumerate(self._desks):
                if desk.aside is not None and now >= desk.aside and not desk.probed and len(self._desks) > 1:
                    desk.probed = True
                    threading.Thread(target=self._probe, args=(place,), name="server-back", daemon=True).start()
            open_now = self._open(tried)
            # Where all are set aside, the one whose time is up first is asked all the same, as an only one is.
            place = min(
                open_now or range(len(self._desks)),
                key=lambda i: (
                    (self._desks[i].in_flight, self._desks[i].taken) if open_now else (self._desks[i].aside or now, i)
                ),
            )
            self._desks[place].in_flight += 1
            self._desks[place].taken += 1
            return place

    def _open(self, tried: Collection[int]) -> list[int]:
        return [i for i, desk in enumerate(self._desks) if desk.aside is None and i not in tried]

    def _others(self, tried: Collection[int], result: object) -> bool:
        """Whether another server may do better."""
        if not isinstance(result, Failure) or not (result.again or result.error == VERSION_CHANGED):
            return False
        with self._lock:
            return bool(self._open(tried))

    def _give_back(self, place: int, result: object) -> None:
        with self._lock:
            desk = self._desks[place]
            desk.in_flight -= 1
            if not isinstance(result, Failure):
                desk.aside, desk.failures = None, 0
            elif result.error in _ASIDE and desk.aside is None:  # once for all requests that it lost together
                self._set_aside(desk)

    def _set_aside(self, desk: _Desk) -> None:
        desk.aside = time.monotonic() + min(LONGEST_ASIDE, FIRST_ASIDE * 2.0 ** min(desk.failures, 30))
        desk.failures += 1

    def _probe(self, place: int) -> None:
        back = False
        try:
            back = self._is_back(self.servers[place])
        finally:
            with self._lock:
                desk = self._desks[place]
                desk.probed = False
                if back:
                    desk.aside = None  # its next failure still sets it aside for longer; a good answer forgets them
                elif desk.aside is not None:
                    self._set_aside(desk)
