"""What a reward server does with one request: who may send it, its body, its place in the queue, its answer."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from flowrl.rewards.base import Reward
from flowrl.rewards.serving.batching import Metrics, RewardQueue
from flowrl.rewards.serving.wire import Limits, decode_request, encode_reply, too_many_bytes
from flowrl.rewards.serving.wire_images import WireError, queue_full, stopping
from flowrl.runtime.process_settings import usable_cores

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
SLOWEST_BODY = 64 * 1024
"""Bytes a second that a body has to come with after its first seconds."""


class Service:
    """What the routes share: queues, limits, counters, and whether the server is stopping.

    Attributes:
        queues: by the name under which a reward is served.
        active: requests for scores that are not answered yet.
        stopping: when the stop began (`time.monotonic`), None while requests are taken.
    """

    def __init__(self, rewards: Mapping[str, Reward], token: str | None, limits: Limits) -> None:
        self.token, self.limits = token, limits
        self.metrics = Metrics()
        self.queues = {
            name: RewardQueue(name, reward, limits=limits, metrics=self.metrics) for name, reward in rewards.items()
        }
        self.decoders = ThreadPoolExecutor(min(8, usable_cores()), thread_name_prefix="decode")
        self.active = 0
        self.bytes_held = 0
        self.stopping: float | None = None

    def stop(self) -> None:
        """Refuses requests from now on; those that were taken are still answered. Any thread may call it."""
        if self.stopping is None:
            self.stopping = time.monotonic()

    def health(self, *, details: bool) -> dict[str, Any]:
        """The body of /health."""
        status: dict[str, Any] = {"status": "ok" if self.stopping is None else "stopping"}
        if not details:
            return status
        rewards = {
            name: {
                "version": queue.reward.version,
                "kind": queue.reward.kind,
                "needs": sorted(queue.reward.needs),
                "queue": len(queue),
            }
            for name, queue in self.queues.items()
        }
        limits = {
            name: getattr(self.limits, name)
            for name in ("max_bytes", "max_pixels", "max_items", "max_images", "max_video_bytes", "max_video_pixels")
        }
        return status | {"rewards": rewards, "limits": limits, "videos": ["ffv1"]}


async def answer(request: Request, content_type: str) -> Response:
    """The reply to a request for scores, or the refusal, counted in any case."""
    from starlette.requests import ClientDisconnect
    from starlette.responses import Response

    service: Service = request.app.state.service
    start, name = time.perf_counter(), ""
    service.active += 1
    try:
        held: list[int] = []
        try:
            files: dict[str, bytes] | None = None
            body = await read_body(service, request, content_type, held)
            if content_type == "multipart/form-data":
                body, files = await _parts(request, body, service.limits)
            loop = asyncio.get_running_loop()  # images take time to decode: in a thread
            decoded = await loop.run_in_executor(service.decoders, decode_request, body, service.limits, files)
            del body, files
        finally:
            service.bytes_held -= sum(held)
        wanted = decoded.reward
        if wanted is None and len(service.queues) == 1:
            wanted = next(iter(service.queues))
        if wanted is None or wanted not in service.queues:
            raise WireError(422, "unknown_reward", f"reward must be one of {', '.join(service.queues)}, got {wanted}.")
        name, queue = wanted, service.queues[wanted]
        queued = queue.submit(decoded)
        del decoded  # the queue alone holds the images
        scores = await unless_gone(request, asyncio.wrap_future(queued))
        request.scope.get("state", {})["served"] = True  # its connection may wait for the next one
        service.metrics.seconds.labels(name).observe(time.perf_counter() - start)
        response = Response(encode_reply(queue.reward.version, scores), media_type="application/json")
    except WireError as error:
        response = refusal(error)
    except ClientDisconnect:
        response = Response(status_code=499)  # goes nowhere; the number is for the count
    except asyncio.CancelledError:
        if service.stopping is None:
            raise
        response = refusal(stopping("the server stopped before it came to this."))
    finally:
        service.active -= 1
    service.metrics.requests.labels(name, response.status_code).inc()
    return response


async def read_body(service: Service, request: Request, content_type: str, held: list[int]) -> bytes:
    """The body of a request that may be answered; `held` gets the bytes that are kept in memory. What is refused is
    still read (and forgotten), as far as is bearable: a client that is cut off while it sends never reads why. What
    would not be bearable by its headers is not begun."""
    # JSON holds videos as text and is read as a whole: it has the room of images.
    most = service.limits.max_bytes if content_type == "application/json" else service.limits.most_bytes
    seen, kept, bearable = 0, bytearray(), max(4 * service.limits.max_bytes, most)
    against = _refused_at_once(service, request, content_type, most)
    if against is not None and (against.status == 400 or _length(request) > bearable):
        raise against
    start = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(service.limits.body_timeout) as clock:
            async for piece in request.stream():
                seen += len(piece)
                clock.reschedule(start + service.limits.body_timeout + seen / SLOWEST_BODY)
                if against is None and seen > most:
                    against = too_many_bytes(service.limits)
                if against is None and service.bytes_held + len(piece) > service.limits.most_held:
                    against = queue_full(1)
                if against is None:
                    held.append(len(piece))
                    service.bytes_held += len(piece)
                    kept += piece
                elif seen > bearable:
                    break
    except TimeoutError as error:
        seconds = service.limits.body_timeout + seen / SLOWEST_BODY
        raise WireError(408, "slow_body", f"{seen} bytes of the body arrived within {seconds:.0f} s.") from error
    if against is not None:
        raise against
    return bytes(kept)


def _refused_at_once(service: Service, request: Request, content_type: str, most: int) -> WireError | None:
    """What the headers alone say against a request."""
    if not has_token(service, request):
        return WireError(401, "unauthorized", "a valid token is needed: Authorization: Bearer TOKEN.")
    if service.stopping is not None:
        return stopping("the server is stopping.")
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != content_type or request.headers.get("content-encoding", "identity") != "identity":
        return WireError(415, "content_type", f"send {content_type} without content encoding, not {given or 'none'}.")
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        return WireError(400, "two_lengths", "give Content-Length or Transfer-Encoding, not both.")
    if _length(request) > most:
        return too_many_bytes(service.limits)
    if len(service.queues) == 1:  # else the body says which
        try:
            next(iter(service.queues.values())).check_room()
        except WireError as full:
            return full
    return None


def _length(request: Request) -> int:
    """The body's length as the headers say it."""
    return int(request.headers.get("content-length", 0))


async def _parts(request: Request, body: bytes, limits: Limits) -> tuple[bytes, dict[str, bytes]]:
    """The JSON and the files of a multipart body."""
    from starlette.datastructures import UploadFile
    from starlette.formparsers import MultiPartException, MultiPartParser

    async def stream() -> AsyncIterator[bytes]:
        yield body

    most = limits.max_images + 8
    limits_of_parts = {"max_files": most, "max_fields": most, "max_part_size": limits.most_bytes}
    parser = MultiPartParser(request.headers, stream(), **limits_of_parts)  # type: ignore[arg-type]
    parser.spool_max_size = limits.most_bytes  # files stay in memory, where the body is already
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise WireError(422, "bad_request", f"the multipart body cannot be read ({error}).") from error
    found = {}
    for name, value in form.multi_items():
        found[name] = await value.read() if isinstance(value, UploadFile) else value.encode(errors="replace")
    await form.close()
    if "request" not in found:
        raise WireError(422, "bad_request", "there is no part named request: it holds the JSON.")
    return found.pop("request"), found


async def unless_gone(request: Request, asked: Awaitable[T]) -> T:
    """What is waited for, which is given up when the client of the request goes away."""
    from starlette.requests import ClientDisconnect

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result, leave = asyncio.ensure_future(asked), asyncio.ensure_future(gone())
    try:
        both: set[asyncio.Future[Any]] = {result, leave}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientDisconnect
        return result.result()
    finally:
        leave.cancel()
        result.cancel()


def has_token(service: Service, request: Request) -> bool:
    """Whether a request carries the server's token, if the server has one."""
    if service.token is None:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(), service.token.encode())
    return scheme.lower() == "bearer" and same


def refusal(error: WireError) -> Response:
    """The answer that says why a request is refused."""
    from starlette.responses import JSONResponse

    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status in (400, 408, 413):  # what follows may be the rest of a body that was not read
        headers["Connection"] = "close"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": error.word, "detail": str(error)}, status_code=error.status, headers=headers)
