"""The HTTP client of reward servers and judges: one event loop in a thread, and connections that stay open.

    lines = Lines(["http://127.0.0.1:8190"], api_key=None)
    reply = lines.wait_for(lines.lines[0].post("/compute", Body(data=b"{}"), timeout=60.0))     # from any thread

With `down_after`, a server that has been silent for a while though it has requests is asked `GET /models`. One that
does not answer that either is taken for dead: its requests end at once, and it gets none until it answers again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx2

from flowrl.rewards.serving.retries import MAX_REPLY_BYTES, Failure, RawReply, ServerPool, is_loopback, read_json_reply
from flowrl.runtime.process_settings import usable_cores
from flowrl.runtime.scrubbing import remember_secret

T = TypeVar("T")

ENCODERS = min(4, usable_cores())
"""Threads that encode images; encoders leave Python's lock alone."""
IDLE_SECONDS = 4.0
"""How long a connection stays open unused: servers (uvicorn) close theirs after 5 s, which loses a request."""
DOWN = "server_down"
"""Why a question was not sent: no server lives."""
_PIECE = 0.5  # seconds of a pause between two looks at whether it still makes sense
_GATEWAY = (502, 503, 504)  # said by what stands before a server that is gone
_FINAL = (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)  # wrong with the request itself

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """A request's body and its content type."""

    data: bytes
    content_type: str = "application/json"


class ServerLine:
    """One server, all in the loop of its `Lines`. Each request has a client of one connection: one client for all looks
    at each idle connection before every request, which at 64 takes half of a request's time."""

    def __init__(self, url: str, connect: Callable[[], httpx2.AsyncClient], down_after: float | None) -> None:
        self.url, self.dead = url, False
        self._connect, self._down_after = connect, down_after
        self._idle: list[httpx2.AsyncClient] = []  # the last one used is taken first, so that it is still connected
        # Since when it gives no sign of life though it was asked for one; None where nothing is owed. A request that
        # was refused or timed out leaves it, so that it counts from the first of them.
        self._silent: float | None = None
        self._limits: set[asyncio.Timeout] = set()  # of requests on their way
        self._watch: asyncio.Task[None] | None = None

    async def post(self, path: str, body: Body, *, timeout: float) -> Any | Failure:
        """The JSON of the reply to a POST, or why there is none; see `ask`. NaN and infinity are let through."""
        reply = await self.ask(path, body, timeout=timeout)
        return reply if isinstance(reply, Failure) else read_json_reply(*reply)

    async def ask(self, path: str, body: Body | None = None, *, timeout: float) -> RawReply | Failure:
        """The reply to a POST, or to a GET where there is no body, or why there is none. `timeout` holds for all of it,
        so that a byte now and then cannot stretch it. Redirects are not followed: they would drop the body."""
        if self.dead:
            return Failure(error="connection", message=f"{self.url} does not answer")
        if self._silent is None:
            self._silent = time.monotonic()
        limit = asyncio.timeout(timeout)
        self._limits.add(limit)
        if self._down_after is not None and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._look_after(self._down_after))
        try:
            async with limit:
                return await self._ask(path, body)
        except TimeoutError:
            if self.dead:
                return Failure(error="connection", message=f"{self.url} does not answer")
            return Failure(error="timeout")
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            message = f"{type(error).__name__}: {error}"[:200]
            return Failure(error="connection", again=not isinstance(error, _FINAL), message=message)
        finally:
            self._limits.discard(limit)

    async def _ask(self, path: str, body: Body | None) -> RawReply | Failure:
        headers = {} if body is None else {"Content-Type": body.content_type}
        method, data = ("GET", None) if body is None else ("POST", body.data)
        with self._client() as client:
            async with client.stream(method, self.url + path, content=data, headers=headers) as reply:
                content = bytearray()
                async for piece in reply.aiter_bytes():
                    content += piece
                    if len(content) > MAX_REPLY_BYTES:
                        return Failure(error="garbage", message=f"a reply of more than {MAX_REPLY_BYTES} bytes")
        if reply.status_code not in _GATEWAY:
            # A sign of life. The request that it answers is still counted among those on their way.
            self.dead, self._silent = False, time.monotonic() if len(self._limits) > 1 else None
        return RawReply(reply.status_code, reply.headers, bytes(content))

    async def answers(self, within: float) -> bool:
        """Whether the server answers anything at all."""
        try:
            async with asyncio.timeout(within):
                with self._client() as client:
                    return (await client.get(f"{self.url}/models")).status_code not in _GATEWAY
        except (TimeoutError, httpx2.HTTPError, httpx2.InvalidURL, OSError):
            return False

    @contextmanager
    def _client(self) -> Iterator[httpx2.AsyncClient]:
        client = self._idle.pop() if self._idle else self._connect()
        try:
            yield client
        finally:
            self._idle.append(client)

    async def close(self) -> None:
        """Closes the connections; no request is on its way."""
        for client in self._idle:
            await client.aclose()

    async def _look_after(self, down_after: float) -> None:
        """Looks, while a sign of life is owed, whether the server lives.

        Its questions come every seventh of `down_after` and wait a sixth of it; when two or more of them were lost, and
        the silence is longer than 0.55 of it, the server is dead. docs/serving.md has what that took. A server
        that is slow, and answers no `/models` in that sixth meanwhile, is dead here too.
        """
        pause, lost = down_after / 7, 0
        while self._silent is not None:
            begun = time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            if self._silent is not None and not self.dead and now - begun > 2 * pause:
                self._silent = now  # this process was held up, and answers may lie unread
            if self._silent is None or (not self.dead and now - self._silent < 0.9 * pause):
                lost = 0
                continue
            if await self.answers(down_after / 6):
                lost = 0
                if self.dead:
                    _log.warning("judge %s answers again after %.0f s", self.url, time.monotonic() - self._silent)
                self.dead, self._silent = False, time.monotonic() if self._limits else None
                continue
            lost += 1
            silent = time.monotonic() - self._silent
            if not self.dead and lost >= 2 and silent >= 0.55 * down_after:
                self._end(silent)

    def _end(self, silent: float) -> None:
        self.dead = True
        _log.warning(
            "judge %s has not answered for %.1f s (down_after): its questions fail at once until it answers again",
            self.url,
            silent,
        )
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())


class Lines:
    """Some servers, and the loop that talks to them; it ends with the last reference to this."""

    def __init__(self, urls: Sequence[str], *, api_key: str | None, down_after: float | None = None) -> None:
        remember_secret(api_key or "")
        if any(url.startswith("https") or not is_loopback(url) for url in urls):
            context = httpx2.create_ssl_context()
            # A file of certificates besides those of the machine, named as other programs read it.
            if given := os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE"):
                try:
                    context.load_verify_locations(**{"capath" if os.path.isdir(given) else "cafile": given})
                except OSError as error:
                    raise ValueError(
                        f"REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE names {given!r}, which cannot be read: {error}."
                    ) from error
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        connect = partial(
            httpx2.AsyncClient,
            timeout=None,
            headers={b"Authorization": f"Bearer {api_key}".encode()} if api_key else {},
            # One for all: the certificates of a machine take 25 ms to read.
            verify=context,
            limits=httpx2.Limits(max_connections=1, keepalive_expiry=IDLE_SECONDS),
        )
        # Proxies of the environment are left out for an address on this machine: they would take the request elsewhere.
        self.lines = tuple(
            ServerLine(url.rstrip("/"), partial(connect, trust_env=not is_loopback(url)), down_after) for url in urls
        )
        self.pool = ServerPool(self.lines, self._is_back)
        self.encoders = ThreadPoolExecutor(max_workers=ENCODERS, thread_name_prefix="judge-images")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_talk, args=(self._loop, self.lines), name="servers", daemon=True)
        self._thread.start()
        self.close = weakref.finalize(self, _close, self._loop, self._thread, self.encoders)

    @property
    def dead(self) -> bool:
        """Whether no server lives."""
        return all(line.dead for line in self.lines)

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of some work in the loop, from any other thread."""
        assert self._thread.is_alive(), "servers are asked in the process that opened the lines to them"
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # whoever waited was interrupted: the requests are not to go on
            raise

    async def pause(self, seconds: float) -> None:
        """Waits before another try; not to its end where no server is left to try."""
        end = time.monotonic() + seconds
        while not self.dead and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _PIECE))

    def _is_back(self, line: ServerLine) -> bool:
        return not line.dead and self.wait_for(line.answers(IDLE_SECONDS))


def _talk(loop: asyncio.AbstractEventLoop, lines: Sequence[ServerLine]) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    for line in lines:
        _end_tasks(loop)  # work handed over while the last of it was ending begins only now
        loop.run_until_complete(line.close())
    _end_tasks(loop)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels all there is, and what begins meanwhile, until nothing is left."""
    while left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread, encoders: ThreadPoolExecutor) -> None:
    encoders.shutdown(wait=False, cancel_futures=True)
    loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join(5)
