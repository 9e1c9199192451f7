"""A reward server: rewards behind HTTP, for trainings on other machines or in other environments.

    POST /v1/score              JSON, images as base64; see `flowrl.rewards.serving.wire`
    POST /v1/score/multipart    the same JSON in a part named `request`, images as parts of their own
    GET  /health                200 while requests are taken, 503 while the server stops; versions, queues, limits
    GET  /metrics               Prometheus text

Refusals are JSON `{"error": word, "detail": sentence}`: 400 two lengths of one body, 401 wrong token, 408 body came too
slowly, 413 too much in one request, 415 another content type, 422 not as the format wants it, 429 queue full and 503
stopping, both with Retry-After. An item that fails does not fail its request. Headers that come too slowly, and more
connections than are bearable, get no answer: they are closed.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from flowrl.rewards.base import Reward
from flowrl.rewards.serving.own_names import own_requests_only
from flowrl.rewards.serving.retries import is_loopback
from flowrl.rewards.serving.server_requests import Service, answer, has_token, refusal
from flowrl.rewards.serving.wire import Limits
from flowrl.rewards.serving.wire_images import WireError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

DEFAULT_PORT = 8190


def make_app(
    rewards: Mapping[str, Reward],
    *,
    token: str | None = None,
    limits: Limits | None = None,
    hosts: Collection[str] = (),
) -> FastAPI:
    """The server as an ASGI application; `app.state.service` is its `Service`.

    Args:
        rewards: what is served, loaded, by name.
        token: that every request must carry (`Authorization: Bearer ...`), /health without details aside; None for
            none.
        limits: of requests and queues; None takes the defaults.
        hosts: names besides those of this machine under which it is asked; without a token others are refused, and so
            are requests of foreign pages in a browser.

    Raises ValueError: FastAPI is not installed, nothing is to be served, or a reward cannot be served.
    """
    check_extra()
    if not rewards:
        raise ValueError("a reward server needs at least one reward, got none.")
    if trained := [name for name, reward in rewards.items() if reward.kind == "adversarial"]:
        raise ValueError(
            f"reward {trained[0]!r} is trained jointly with the policy and cannot be served: use another one."
        )
    if token is not None and not token.strip():
        raise ValueError("the token is empty: give one of a few letters at least, or none.")
    service = Service(rewards, token, limits or Limits())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for queue in service.queues.values():
            queue.start()
        yield
        service.stop()
        for queue in service.queues.values():
            await asyncio.to_thread(queue.close, 5.0)
        service.decoders.shutdown(wait=False)

    async def about(details: bool) -> dict[str, Any]:
        return service.health(details=details)

    async def counts(accept: str) -> tuple[bytes, str]:
        return service.metrics.text(accept)

    return app_of(service, answer, about=about, counts=counts, hosts=hosts, lifespan=lifespan)


def app_of(
    service: Service,
    score: Callable[..., Awaitable[Response]],
    *,
    about: Callable[[bool], Awaitable[dict[str, Any]]],
    counts: Callable[[str], Awaitable[tuple[bytes, str]]],
    hosts: Collection[str],
    lifespan: Any = None,
) -> FastAPI:
    """An application with the routes of a reward server: `score` answers requests of a `content_type`, `about` tells
    what /health says with or without details, `counts` the metrics and their type for the header Accept."""
    from fastapi import FastAPI
    from starlette.responses import JSONResponse, Response

    async def health(request: Request) -> Response:
        allowed = has_token(service, request)
        if not allowed and "authorization" in request.headers:
            return refusal(WireError(401, "unauthorized", "the token is wrong."))
        return JSONResponse(await about(allowed), status_code=200 if service.stopping is None else 503)

    async def metrics(request: Request) -> Response:
        if not has_token(service, request):
            return refusal(WireError(401, "unauthorized", "a valid token is needed."))
        text, content_type = await counts(request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    app = FastAPI(title="flowrl reward server", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.service = service
    if service.token is None:
        app.add_middleware(own_requests_only, others=hosts)
    app.add_route("/v1/score", partial(score, content_type="application/json"), methods=["POST"])
    app.add_route("/v1/score/multipart", partial(score, content_type="multipart/form-data"), methods=["POST"])
    app.add_route("/health", health, methods=["GET"])
    app.add_route("/metrics", metrics, methods=["GET"])
    return app


def check_extra(
    what: str = "a reward server",
    packages: Sequence[str] = ("fastapi", "uvicorn", "python_multipart", "prometheus_client"),
) -> None:
    """Refuses to go on where a package of the extra `serve` that `what` needs is not installed."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ValueError(
                f"{what} needs {package} ({error}): in flowrl's folder, pip install -e '.[serve]'."
            ) from error


def open_socket(host: str = "127.0.0.1", port: int = DEFAULT_PORT, *, has_token: bool) -> socket.socket:
    """A bound socket for the server, so that a taken port is known before any weights load. Port 0 takes a free one.
    Raises ValueError: the port is taken, there is no such host, or others reach the server and it has no token."""
    if not 0 <= port < 2**16:  # getaddrinfo would silently take another one
        raise ValueError(f"a port lies in 0 .. 65535, got {port}: give another `port`.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"cannot serve at {host}:{port} ({error}): give `host` an address of this machine.") from error
    reached = str(address[0])
    loopback = is_loopback(f"http://[{reached}]" if ":" in reached else f"http://{reached}")
    if not has_token and not (loopback and reached not in ("0.0.0.0", "::")):
        raise ValueError(
            f"{host} can be reached from other machines, and the server has no token: put one into an environment "
            f"variable and name it with `token_env`, or serve on 127.0.0.1."
        )
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot serve at {host}:{port} ({error.strerror}): give another `port`.") from error
    return bound


def make_server(app: FastAPI, *, grace: float = 30.0) -> uvicorn.Server:
    """A uvicorn server that stops gracefully: on the first signal, or `app.state.service.stop()`, new requests get 503
    and those taken are answered, for `grace` seconds at most. A second signal stops at once."""
    check_extra()
    import uvicorn

    from flowrl.rewards.serving.connections import MOST_HEADER_BYTES, limited_protocol

    service: Service = app.state.service

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            if service.stopping is not None:
                self.force_exit = self.should_exit = True
            service.stop()

        async def on_tick(self, counter: int) -> bool:
            if service.stopping is not None:
                overdue = time.monotonic() - service.stopping > grace
                self.should_exit = self.should_exit or overdue or service.active == 0
            return await super().on_tick(counter)

    return Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="on",
            ws="none",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, math.ceil(min(grace, 5.0))),
            server_header=False,
            http=limited_protocol(service.limits.header_timeout, most_of_one=service.limits.max_connections),
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        )
    )
