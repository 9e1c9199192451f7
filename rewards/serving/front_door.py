"""One port in front of several reward servers of this machine: copies of one, or each in an environment of its own.

A request is read, goes by its reward's name to the server that has it, of copies to the one with the fewest in hand,
and the answer comes back as it is: images are decoded where they are scored. /health and /metrics are what all of them
say, joined.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowrl.rewards.serving.retries import RawReply
from flowrl.rewards.serving.server import app_of
from flowrl.rewards.serving.server_requests import Service, read_body, refusal, unless_gone
from flowrl.rewards.serving.wire import Limits, read_json_body
from flowrl.rewards.serving.wire_images import WireError, bad_request, short, too_many_images

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

_HEALTH_SECONDS = 5.0


@dataclass(kw_only=True, slots=True, eq=False)
class ServerBackend:
    """A server behind the door: its port while it answers, its requests in hand and all it got, and what it said last
    of its rewards and limits."""

    port: int | None = None
    active: int = 0
    taken: int = 0
    rewards: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)


def make_door(
    backends: Sequence[ServerBackend], *, inner: str, token: str | None, limits: Limits, hosts: Collection[str] = ()
) -> FastAPI:
    """The door as an ASGI application, for `make_server`.

    Args:
        backends: the servers; whoever watches them writes their ports.
        inner: the token that they ask for.
        token: the token that clients send; None for none.
        hosts: as of `make_app`.
    """
    service = Service({}, token, limits)

    async def about(details: bool) -> dict[str, Any]:
        status = service.health(details=details)
        return await _joined(status, backends, inner) if details else status

    async def counts(accept: str) -> tuple[bytes, str]:
        own, content_type = service.metrics.text("")
        texts = [own.decode()]
        for backend in backends:
            with suppress(OSError, EOFError, ValueError):
                if backend.port and (answer := await _ask(backend, "GET", "/metrics", inner)).status == 200:
                    texts.append(answer.content.decode())
        return join_metrics(texts).encode(), content_type

    app = app_of(service, _forward, about=about, counts=counts, hosts=hosts)
    app.state.backends, app.state.inner = backends, inner
    return app


async def look(backend: ServerBackend, inner: str) -> None:
    """Asks a server what it serves. Raises OSError, ValueError, asyncio.TimeoutError: it does not answer."""
    async with asyncio.timeout(_HEALTH_SECONDS):
        said = json.loads((await _ask(backend, "GET", "/health", inner)).content)
    about: dict[str, Any] = said["rewards"]
    backend.rewards = {name: {**one, "videos": said.get("videos", [])} for name, one in about.items()}
    backend.limits = said["limits"]


async def _forward(request: Request, content_type: str) -> Response:
    from starlette.requests import ClientDisconnect
    from starlette.responses import Response

    service: Service = request.app.state.service
    service.active += 1
    name, held = "", list[int]()
    try:
        body = await read_body(service, request, content_type, held)
        backends: Sequence[ServerBackend] = request.app.state.backends
        names = list(dict.fromkeys(each for backend in backends for each in backend.rewards))
        wanted: Any = names[0]
        if len(names) > 1:
            most, header = service.limits.max_images + 8, request.headers["content-type"]
            wanted = await asyncio.to_thread(_named_reward, body, content_type, header, most)
            if wanted not in names:
                known = ", ".join(names)
                raise WireError(422, "unknown_reward", f"reward must be one of {known}, got {short(wanted)}.")
        open_now = [one for one in backends if one.port is not None and wanted in one.rewards]
        if not open_now:
            raise WireError(503, "scorer_gone", f"the process of {wanted} is being started again.", retry_after=2)
        name, backend = wanted, min(open_now, key=lambda one: (one.active, one.taken))
        backend.active, backend.taken = backend.active + 1, backend.taken + 1
        inner, header = request.app.state.inner, request.headers["content-type"]
        try:
            answer = await unless_gone(request, _ask(backend, "POST", request.url.path, inner, body, header))
        except (OSError, EOFError, ValueError) as error:
            raise WireError(503, "scorer_gone", f"the process of {name} ended, try again.", retry_after=2) from error
        finally:
            backend.active -= 1
        request.scope.get("state", {})["served"] = answer.status == 200
        kept = {key: value for key, value in answer.headers.items() if key in ("retry-after", "content-type")}
        response = Response(answer.content, answer.status, kept)
    except WireError as error:  # what the server behind answered, it has counted itself
        response = refusal(error)
        service.metrics.requests.labels(name, response.status_code).inc()
    except ClientDisconnect:
        response = Response(status_code=499)
        if not name:  # else the server behind sees it too
            service.metrics.requests.labels(name, response.status_code).inc()
    finally:
        service.bytes_held -= sum(held)
        service.active -= 1
    return response


def _named_reward(body: bytes, content_type: str, header: str, most_parts: int) -> Any:
    """The reward that a body names; of a multipart one only the part `request` is read."""
    if content_type == "multipart/form-data":
        from python_multipart.multipart import parse_options_header

        line = b"--" + parse_options_header(header)[1].get(b"boundary", b"")
        at = body.find(line)
        parts = 0
        while at >= 0:
            parts += 1
            if parts > most_parts:
                raise too_many_images(f"a request may hold {most_parts} parts, and this one has more")
            end = body.find(b"\r\n" + line, at + len(line))
            head, _, content = body[at : at + 1000].partition(b"\r\n\r\n")
            if b'name="request"' in head and content:
                start = at + len(head) + 4
                body = body[start : end if end >= 0 else len(body)]
                break
            at = end + 2 if end >= 0 else -1
        else:
            raise bad_request("there is no part named request: it holds the JSON")
    data = read_json_body(body)
    return data.get("reward") if isinstance(data, dict) else None


async def _ask(
    backend: ServerBackend,
    method: str,
    path: str,
    inner: str,
    body: bytes = b"",
    content_type: str = "application/json",
) -> RawReply:
    """One request on a connection of its own. Raises OSError, EOFError, ValueError: there is no whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", backend.port)
    try:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {inner}\r\nConnection: close\r\n"
            f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode("latin-1"))
        writer.write(body)
        with suppress(ConnectionError):  # it may have refused before it read all, and said why
            await writer.drain()
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        content = await reader.readexactly(int(headers["content-length"]))
        return RawReply(int(status.split()[1]), headers, content)
    except (LookupError, asyncio.LimitOverrunError) as error:
        raise ValueError("no answer in HTTP") from error
    finally:
        writer.close()


async def _joined(status: dict[str, Any], backends: Sequence[ServerBackend], inner: str) -> dict[str, Any]:
    """What /health says in detail: of all servers, joined."""
    asked = (look(backend, inner) for backend in backends if backend.port)
    for one in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(one, BaseException) and not isinstance(one, (OSError, EOFError, ValueError, LookupError)):
            raise one
    rewards, limits = dict[str, Any](), dict[str, int](status["limits"])
    for backend in backends:
        for name, about in backend.rewards.items():
            one = rewards.setdefault(name, {**about, "queue": 0, "replicas": 0})
            if backend.port is not None:
                one["queue"] += about["queue"]
                one["replicas"] += about.get("replicas", 1)
            one["running"] = one["replicas"] > 0
        limits |= {name: min(limits[name], backend.limits[name]) for name in limits.keys() & backend.limits.keys()}
    return status | {"rewards": rewards, "limits": limits, "videos": []}  # each reward says it for itself


def join_metrics(texts: Sequence[str]) -> str:
    """Several texts of Prometheus' format 0.0.4 as one: families once, equal series summed."""
    families: dict[str, tuple[list[str], dict[str, float]]] = {}
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split()[2]
                heads, _ = families.setdefault(family, ([], {}))
                if line not in heads:
                    heads.append(line)
            elif line:
                series, _, number = line.rpartition(" ")
                sums = families[family][1]
                sums[series] = sums.get(series, 0.0) + float(number)
    lines = (line for heads, sums in families.values() for line in [*heads, *(f"{key} {sums[key]}" for key in sums)])
    return "\n".join(lines) + "\n"
