"""One policy for calls that may fail: what is tried again, how long in between, and when to stop.

result = call_with_retries(send, deadline=120.0, retries=4, seed=counter_seed(seed, item))
if isinstance(result, Failure): ...        # result.error is a short word such as "status_503"

    pool = ServerPool(servers, is_back)
    result = pool.ask(send)                # send(server) -> a result, or a Failure

A request goes to the server with the fewest requests in flight. One that does not answer is set aside, for 1 s at first
and twice as long each time, and its request goes to another at once. When its time is up it is asked whether it is
back, beside the requests, which do not wait for that.
"""

from __future__ import annotations

import email.utils
import ipaddress
import json
import math
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from flowrl.config.sections import at_least, positive
from flowrl.runtime.randomness import counter_seed

T = TypeVar("T")

RETRIED_STATUSES = (408, 425, 429)
"""Besides all of 5xx; what else a server refuses it will refuse again."""
FIRST_DELAY, LONGEST_DELAY = 0.5, 8.0
MAX_REPLY_BYTES = 2**26


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One failed try, or a call that was given up."""

    error: str
    """A short word: "timeout", "connection", "status_500", "garbage" ..."""
    again: bool = True
    """Whether another try may succeed."""
    retry_after: float | None = None
    """Seconds that the server asked to wait, None where it did not say."""
    message: str = ""
    """For a person, such as the beginning of the reply; may be empty."""


class RawReply(NamedTuple):
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    content: bytes


def call_with_retries(
    send: Callable[[int, float], T | Failure],
    *,
    deadline: float = 120.0,
    retries: int = 4,
    seed: int = 0,
) -> T | Failure:
    """Calls `send` until it succeeds, fails for good, has been retried `retries` times, or the time is up.

    Before retry k = 0, 1, ... it waits `retry_delay(k, seed)`, or as long as the server asked for where that is longer.
    A wait that would pass the deadline is not begun, so the last failure comes back at once.

    Args:
        send: given the number of the try (0, 1, ...) and the seconds left, which it must keep to; returns its result,
            or a `Failure`. A try that samples should take a new seed from the number.
        deadline: seconds for all tries and waits together.
        seed: of the waits; give every item its own, lest all that failed together come back together.
    """
    end = time.monotonic() + deadline
    for attempt in range(retries + 1):
        result = send(attempt, max(end - time.monotonic(), 0.001))
        delay = _delay_before_next(result, attempt, retries, end, seed)
        if delay is None:
            return result
        time.sleep(delay)
    raise ValueError(f"retries must be 0 or more, got {retries}.")


async def await_with_retries(
    send: Callable[[int, float], Awaitable[T | Failure]],
    pause: Callable[[float], Awaitable[None]],
    *,
    deadline: float = 120.0,
    retries: int = 4,
    seed: int = 0,
) -> T | Failure:
    """`call_with_retries` for a `send` that is awaited; `pause` waits so many seconds, and holds no thread."""
    end = time.monotonic() + deadline
    for attempt in range(retries + 1):
        result = await send(attempt, max(end - time.monotonic(), 0.001))
        delay = _delay_before_next(result, attempt, retries, end, seed)
        if delay is None:
            return result
        await pause(delay)
    raise ValueError(f"retries must be 0 or more, got {retries}.")


def _delay_before_next(result: object, attempt: int, retries: int, end: float, seed: int) -> float | None:
    """Seconds before the next try; None where there is none."""
    if not isinstance(result, Failure) or not result.again or attempt == retries:
        return None
    delay = max(retry_delay(attempt, seed), result.retry_after or 0.0)
    return None if time.monotonic() + delay >= end else delay


def retry_delay(retry: int, seed: int) -> float:
    """Seconds before a retry k = 0, 1, ...: min(8, 0.5 * 2^k) * U(0.5, 1.5), with U drawn from the counters."""
    uniform = counter_seed("retry", seed, retry) / 2**63
    return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(retry, 30)) * (0.5 + uniform)


def addresses(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """The addresses of an option that takes one or several."""
    return tuple(url.rstrip("/") for url in ((given,) if isinstance(given, str) else given))


def check_servers(option: str, given: str | tuple[str, ...], *, secret: str, example: str) -> None:
    """Refuses addresses of no server, none, one twice, and one that holds a password: it would end up in logs."""
    urls = addresses(given)
    if not urls:
        raise ValueError(f"{option} is an empty list: give the address of a server such as {example}.")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{option} must be the address of a server such as {example}, got {url!r}.")
        if parts.username or parts.password:
            raise ValueError(
                f"{option} must not hold a user name or a password: put it into an environment variable and give "
                f"{secret}."
            )
    if len(set(urls)) < len(urls):
        raise ValueError(f"{option} names an address twice: {', '.join(urls)}; list each once.")


def check_calls(options: object) -> None:
    """Refuses options with numbers of requests, tries and seconds that make no sense."""
    at_least(1, options, "concurrency")
    at_least(0, options, "retries")
    positive(options, "timeout deadline")


def is_loopback(url: str) -> bool:
    """Whether the address is this machine's own: localhost, 127.x.x.x, ::1 or 0.0.0.0."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def read_json_reply(status: int, headers: Mapping[str, str], content: bytes) -> Any | Failure:
    """The JSON of a reply, or what is wrong with it."""
    text = content.decode(errors="replace")
    if not 200 <= status < 300:
        return failed_status(status, headers, text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return Failure(error="garbage", message=text[:200])


def failed_status(status: int, headers: Mapping[str, str], text: str = "") -> Failure:
    """The failure "status_NNN" of a reply with that status; 408, 425, 429 and 5xx are worth another try."""
    again = status in RETRIED_STATUSES or 500 <= status < 600
    header, seconds = headers.get("Retry-After") or "", math.nan  # a number of seconds, or a date
    try:
        seconds = float(header)
    except ValueError:
        with suppress(ValueError):
            date = email.utils.parsedate_to_datetime(header)
            seconds = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    after = max(seconds, 0.0) if math.isfinite(seconds) else None
    return Failure(error=f"status_{status}", again=again, retry_after=after, message=text[:200])


# ---- several servers -------------------------------------------------------------------------------------------------


S = TypeVar("S")
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
