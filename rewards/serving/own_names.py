"""Whose requests a server of this machine answers without a token: those that name it, and come from no foreign page.

Any page in a browser can have it send requests to this machine. Those that read answers are kept out by the browser
unless the page's own name was made to lead here (DNS rebinding): so the Host has to be a name of this machine. Those
that only send, forms and multipart posts, come with the page's Origin or with Sec-Fetch-Site. Programs send neither.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,253}))(?::(\d{1,5}))?")
_OWN_SITES = ("same-origin", "none")
"""Sec-Fetch-Site of a page of the server's own, and of an address that was typed in."""


def host_name(value: str) -> str | None:
    """The name or address in a Host header, in small letters; None where it is no host."""
    found = _HOST.fullmatch(value.strip())
    return None if found is None else (found[1] or found[2]).lower().rstrip(".")


def is_own(name: str, others: Collection[str] = ()) -> bool:
    """Whether a name is this machine's own: localhost, an address of the loopback, or one of `others`."""
    if name == "localhost" or name in others:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def why_foreign(headers: Sequence[tuple[bytes, bytes]], others: Collection[str] = ()) -> str:
    """Why a request is refused, in words; "" where it is answered."""
    given: dict[str, list[str]] = {}
    for key, value in headers:
        given.setdefault(key.decode("latin-1"), []).append(value.decode("latin-1").strip())
    hosts, sites = given.get("host", ["localhost"]), given.get("sec-fetch-site", [])  # no browser leaves it out
    name = host_name(hosts[0]) if len(hosts) == 1 else None
    if name is None or not is_own(name, others):
        return "ask for localhost or 127.0.0.1, or name this host by --allow-host, or give the server a token"
    if any(site not in _OWN_SITES for site in sites):
        return "a page of another site may not ask this server"
    for origin in (*given.get("origin", []), *given.get("referer", [])):
        try:
            own = urlsplit(origin).netloc.lower() == hosts[0].lower()
        except ValueError:
            own = False
        if not own:
            return "a page of another site may not ask this server"
    return ""


def own_requests_only(inner: ASGIApp, others: Collection[str] = ()) -> ASGIApp:
    """`inner` for requests that `why_foreign` lets pass; others get 403, those without a host of this machine 400."""
    from starlette.responses import JSONResponse

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        why = why_foreign(scope["headers"], others) if scope["type"] == "http" else ""
        if not why:
            await inner(scope, receive, send)
            return
        status = 400 if why.startswith("ask") else 403
        body = {"error": "foreign_host" if status == 400 else "foreign_page", "detail": f"{why}."}
        await JSONResponse(body, status_code=status, headers={"Connection": "close"})(scope, receive, send)

    return app
