"""The server of a page for the browser of this machine: below a path that is a token, and for nobody else."""

from __future__ import annotations

import hmac
import re
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from flowrl.rewards.serving.own_names import host_name, why_foreign
from flowrl.rewards.serving.server import check_extra, open_socket

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ADDRESS = "127.0.0.1"
"""A page is for this machine; others come through ssh -L, which asks who they are."""
HOSTS = (ADDRESS, "localhost")
"""Names under which a page is asked for, so that no other name can be made to lead here (DNS rebinding)."""
HEADER_SECONDS = 10.0
LONGEST_PATH = 1000
"""Letters of a path; numbers in it have 15 digits at most."""
POLICY = (
    "default-src 'none'; img-src 'self' data:; media-src 'self'; style-src 'unsafe-inline'; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)
"""What a page may load: itself."""
_HEADERS = {
    b"cache-control": b"no-store",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"cross-origin-resource-policy": b"same-origin",
}


def page_server(
    make_app: Callable[[], ASGIApp], port: int, owner: str, *, posts: bool = False
) -> tuple[uvicorn.Server, str, socket.socket]:
    """The server of a page, its address with a token that was just made, and the socket that listens already.
    `make_app` makes what answers below the token, and `owner` has printed the address; port 0 is a free one. A page
    that `posts` takes POST, answered for its own page alone. Raises ValueError: port taken, or package missing."""
    check_extra(owner, ("starlette", "uvicorn"))
    import uvicorn

    from flowrl.rewards.serving.connections import MOST_HEADER_BYTES, limited_protocol

    token = secrets.token_urlsafe(18)
    bound = open_socket(ADDRESS, port, has_token=True)
    bound.listen(128)
    server = uvicorn.Server(
        uvicorn.Config(
            guarded(make_app(), token, owner, posts=posts), log_level="warning", access_log=False,
            lifespan="off", ws="none", timeout_keep_alive=30,
            timeout_graceful_shutdown=1, server_header=False,
            http=limited_protocol(HEADER_SECONDS), h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        )
    )  # fmt: skip
    return server, f"http://{ADDRESS}:{bound.getsockname()[1]}/{token}/", bound


def elsewhere(address: str) -> str:
    """How the page is opened from another machine."""
    port = address.split(":")[2].partition("/")[0]
    return f"From another machine: ssh -L {port}:{ADDRESS}:{port} {socket.gethostname()}, then the same address."


def guarded(inner: ASGIApp, token: str, owner: str, *, posts: bool = False) -> ASGIApp:
    """`inner` below the token's path, for requests that name this machine; `owner` and `posts` as in `page_server`."""
    from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

    methods = ("GET", "HEAD", *["POST"] * posts)

    def instead(scope: Scope, first: str) -> ASGIApp | None:
        hosts = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
        if len(hosts) != 1 or host_name(hosts[0]) not in HOSTS:
            return PlainTextResponse("Ask for 127.0.0.1 or localhost.\n", 400)
        if scope["path"] == "/favicon.ico":  # browsers ask for it by themselves
            return Response(status_code=204)
        if not hmac.compare_digest(first.encode(), token.encode()):
            return PlainTextResponse(f"Open the address that {owner} has printed, with its token.\n", 404)
        if scope["method"] not in methods:
            return PlainTextResponse(f"This page takes {', '.join(methods)}.\n", 405)
        if scope["method"] == "POST" and (why := why_foreign(scope["headers"])):
            return JSONResponse({"error": "foreign_page", "detail": f"{why}."}, 403)
        if len(scope["path"]) > LONGEST_PATH or re.search(r"[0-9]{16}", scope["path"]):
            return PlainTextResponse("This page has no such address.\n", 400)
        return RedirectResponse(f"/{token}/") if scope["path"] == f"/{token}" else None

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = dict(message.get("headers", []))
                message = {**message, "headers": [*({**_HEADERS, **kept}.items())]}
            await send(message)

        if scope["type"] != "http":
            await inner(scope, receive, send)
            return
        _, first, *rest = [*scope["path"].split("/", 2), ""][:3]
        answer = instead(scope, first)
        if answer is None:
            answer, scope = inner, {**scope, "path": f"/{rest[0]}", "raw_path": b""}
        await answer(scope, receive, sending)

    return app
