"""Cases: requests to the servers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from PIL import Image
from reward_servers import Running, reward_of, running
from unlisted_case import Case, Outcome, Silent, same
from unlisted_folders import runs

from flowrl.pages.live.followed_runs import Watched
from flowrl.pages.live.watch import make_app
from flowrl.rewards.serving.own_page import guarded
from flowrl.rewards.serving.wire import Limits
from flowrl.rewards.serving.wire_images import encode_video

# ---- requests --------------------------------------------------------------------------------------------------------

LIMITED = ("max_bytes", "max_pixels", "max_images", "max_items", "max_video_bytes")
SMALL = Limits(max_bytes=2**20, max_pixels=10_000, max_images=16, max_items=64, max_video_bytes=2**20)


def png(width: int = 2, height: int = 2, **more: Any) -> bytes:
    """A grey PNG."""
    return saved(Image.new("RGB", (width, height), (51, 51, 51)), "PNG", **more)


def saved(image: Image.Image, form: str, **more: Any) -> bytes:
    """An image as a file."""
    stream = io.BytesIO()
    image.save(stream, form, **more)
    return stream.getvalue()


def body(*images: bytes | str, **more: Any) -> bytes:
    """A request with one item, as JSON."""
    given = [one if isinstance(one, str) else base64.b64encode(one).decode() for one in images or (png(),)]
    return json.dumps({"schema": 1, "items": [{"id": 0, "prompt": "p", "images": given, **more}]}).encode()


def post(data: bytes, *headers: str, path: str = "/v1/score", kind: str = "application/json", host: str | None = "HOST",
         method: str = "POST") -> bytes:  # fmt: skip
    """The bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1", *([] if host is None else [f"Host: {host}"]), *headers]
    lines += [f"Content-Type: {kind}"] if kind else []
    if data and not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"Content-Length: {len(data)}")
    return ("\r\n".join([*lines, "Connection: close", "", ""])).encode("latin-1") + data


def sent(port: int, data: bytes) -> tuple[int, bytes]:
    """The status and the body of an answer; status 0 for a connection that is closed without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        got = b""
        try:
            link.sendall(data.replace(b"HOST", f"127.0.0.1:{port}".encode()))
            while piece := link.recv(2**16):
                got += piece
        except (ConnectionError, TimeoutError):
            pass
    head, _, rest = got.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), rest


def alive(server: Running) -> None:
    """That a good request is still answered."""
    status, answer = sent(int(server.url.rpartition(":")[2]), post(body()))
    if status != 200 or b'"value":51' not in answer.replace(b" ", b""):
        raise Silent(f"afterwards a good request gets {status}: {answer[:200]!r}")


def request(
    name: str, data: bytes | Callable[[], bytes], *statuses: int, word: str = "", value: float | None = None
) -> Case:  # fmt: skip
    """A request to a server without a token, and the statuses that are right; 0 is a closed connection."""

    def run(folder: Path) -> Outcome:
        with running(reward_of(), **{key: getattr(SMALL, key) for key in LIMITED}) as server:
            port = int(server.url.rpartition(":")[2])
            status, answer = sent(port, data() if callable(data) else data)
            if status not in statuses:
                raise Silent(f"{status} where {statuses} are right: {answer[:300]!r}")
            if word and word.encode() not in answer:
                raise Silent(f"without the word {word}: {answer[:300]!r}")
            if value is not None and json.loads(answer)["items"][0]["value"] != value:
                raise Silent(f"not {value}: {answer[:300]!r}")
            alive(server)
        return ("right" if status in (200, 204) else "refused"), f"{status} {answer[:200]!r}"

    return Case(f"servers: {name}", run)


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def forged(width: int, height: int, pixels: bytes = b"") -> bytes:
    """A PNG whose header says a size, whatever its pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def animated(form: str, count: int) -> bytes:
    """An animation of grey images that become lighter."""
    frames = [Image.new("RGB", (2, 2), (51 + 20 * number,) * 3) for number in range(count)]
    more = {"lossless": True} if form == "WEBP" else {}
    return saved(frames[0], form, save_all=True, append_images=frames[1:], **more)


def multipart(data: bytes, boundary: str = "b", **files: bytes) -> bytes:
    """A multipart body."""
    text = [("request", data), *files.items()]
    head = '--{}\r\nContent-Disposition: form-data; name="{}"; filename="f"\r\n\r\n'
    parts = [head.format(boundary, name).encode() + one + b"\r\n" for name, one in text]
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


def video(count: int) -> bytes:
    """A request with a video of grey frames."""
    told = json.dumps({"items": [{"id": 0, "prompt": "p", "video": "v"}]}).encode()
    frames = [np.full((2, 2, 3), 51, np.uint8)] * max(count, 1)
    data = encode_video(frames) if count else encode_video(frames)[:200]
    return post(multipart(told, v=data), path="/v1/score/multipart", kind="multipart/form-data; boundary=b")


def items(count: int, **more: Any) -> bytes:
    """A request of many items."""
    one = base64.b64encode(png()).decode()
    return json.dumps({"items": [{"id": n, "prompt": "p", "images": [one], **more} for n in range(count)]}).encode()


HOSTS: dict[str, tuple[str | None, int]] = {
    "evil.example": ("evil.example", 400), "a port that is not the server's": ("127.0.0.1:1", 200),
    "capitals": ("LocalHost", 200), "a dot at the end": ("localhost.", 200), "IPv6": ("[::1]:80", 200),
    "127.0.0.2": ("127.0.0.2", 200), "a user": ("user@localhost", 400),
    "localhost as a user": ("localhost@evil.example", 400), "localhost as a part": ("localhost.evil.example", 400),
    "localhost at the end": ("evil.localhost", 400), "127.0.0.1 as a part": ("127.0.0.1.nip.io", 400),
    "a number": ("2130706433", 400), "octal": ("0177.0.0.1", 400),
    "an address of IPv6 for IPv4": ("[::ffff:127.0.0.1]", 0), "a scope": ("[::1%25lo]", 400),
    "0.0.0.0": ("0.0.0.0", 400), "nothing": ("", 400), "a blank within": ("localhost evil", 400),
    "a tab": ("localhost\tevil", 400), "a port of letters": ("localhost:x", 400),
    "another script": ("l\xf6calhost", 400), "none": (None, 400),
}  # fmt: skip
_PLAIN = "text/plain"
REQUESTS: list[Case] = [
    *(
        request(f"the host {name}", post(body(), host=host), *({200: (200,), 400: (400,), 0: (200, 400)}[status]))
        for name, (host, status) in HOSTS.items()
    ),
    request("two hosts", post(body(), "Host: evil.example"), 400),
    request("a host within the address", post(body(), path="http://evil.example/v1/score"), 400, 404),
    *(
        request(f"origin {origin}", post(body(), f"Origin: {origin}"), 403)
        for origin in (
            "null",
            "file://",
            "http://evil.example",
            "http://localhost.evil.example",
            "http://127.0.0.1:1",
            "moz-extension://a",
            "",
        )
    ),
    request("an origin of its own", post(body(), "Origin: http://HOST"), 200),
    *(
        request(f"fetched {site}", post(body(), f"Sec-Fetch-Site: {site}"), 403)
        for site in ("cross-site", "same-site", "Cross-Site")
    ),
    request("a page that a form sends to", post(body(), "Referer: http://evil.example/a"), 403),
    request(
        "a question before a request",
        post(b"", "Origin: http://evil.example", "Access-Control-Request-Method: POST", method="OPTIONS"),
        403,
    ),
    request("a question without an origin", post(b"", method="OPTIONS"), 405),
    request("HEAD of health", post(b"", path="/health", kind="", method="HEAD"), 200),
    request("TRACE", post(b"", method="TRACE"), 405),
    request("CONNECT", post(b"", path="evil.example:443", method="CONNECT"), 400, 404, 405),
    request("text that is JSON", post(body(), kind=_PLAIN), 415), request("no type", post(body(), kind=""), 415),
    request("a type in capitals with letters", post(body(), kind="Application/JSON; charset=utf-8"), 200, value=51.0),
    request("gzip", post(body(), "Content-Encoding: gzip"), 415),
    request("a thousand headers", post(body(), *(f"X-{n}: {n}" for n in range(1000))), 200, 400, 431, 0),
    request("a header of 1 MiB", post(body(), "X-A: " + "a" * 2**20), 400, 431, 0),
    request(
        "chunks", post(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body()), body()), "Transfer-Encoding: chunked"), 200, value=51.0
    ),
    request("chunks and a length", post(body(), "Transfer-Encoding: chunked", "Content-Length: 5"), 400, 0),
    request("two lengths", post(body(), "Content-Length: 5", "Content-Length: 6"), 400, 0),
    request("a negative length", post(body(), "Content-Length: -1"), 400, 0),
    request("a length of thousands of digits", post(body(), "Content-Length: " + "9" * 5000), 400, 413, 0),
    request("chunks whose size is no number", post(b"zz\r\nabc\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), 400, 0),
    request("chunked twice", post(body(), "Transfer-Encoding: chunked, chunked"), 400, 415, 501, 0),
    request("a header with a line in it", post(body(), "X-A: a\r\n Host: evil.example"), 200, 400),
    request("HTTP/0.9", b"GET /health\r\n\r\n", 400, 0),
    request("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, 404, 0),
    request("a TLS greeting", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 400, 400, 0),
    *(
        request(f"the path {path}", post(body(), path=path), 404, 400)
        for path in (
            "/v1/../v1/score/x",
            "/v1/%2e%2e/health",
            "/v1/score%00",
            "/../../etc/passwd",
            "/%2e%2e/%2e%2e/etc/passwd",
            "//v1/score",
            "/v1/score;a",
        )
    ),
    request("a path of percent signs", post(body(), path="/v1/%73core"), 200, 404),
    request("a path with a query", post(body(), path="/v1/score?reward=x"), 200, value=51.0),
    request(
        "multipart without boundary",
        post(multipart(body()), path="/v1/score/multipart", kind="multipart/form-data"),
        422,
    ),
    request(
        "multipart with another boundary",
        post(multipart(body()), path="/v1/score/multipart", kind="multipart/form-data; boundary=c"),
        422,
    ),
    request(
        "multipart without an end",
        post(multipart(body())[:-8], path="/v1/score/multipart", kind="multipart/form-data; boundary=b"),
        422,
    ),
    request(
        "multipart whose image is a path",
        post(multipart(body("/etc/hostname")), path="/v1/score/multipart", kind="multipart/form-data; boundary=b"),
        422,
    ),
    request(
        "multipart with two parts of one name",
        post(
            multipart(body("f")).replace(b"--b--\r\n", b"")
            + multipart(b"", f=png()).partition(b"--b\r\n\r\n")[2]
            + multipart(body("f"), f=png()),
            path="/v1/score/multipart",
            kind="multipart/form-data; boundary=b",
        ),
        422,
        200,
    ),
    request(
        "17 images",
        post(body(png(), reference_images=[base64.b64encode(png()).decode()] * 16)),
        413,
        word="too_many_images",
    ),
    request("65 items", post(items(65)), 413), request("no items", post(items(0)), 422),
    request("20 items", post(items(20)), 413),
    request(
        "100,000 items without images", post(json.dumps({"items": [{"id": n} for n in range(50_000)]}).encode()), 413
    ),
    request("a prompt of a megabyte", post(body(prompt="a" * 2**20)), 413),
    request("brackets 100,000 deep", post(b'{"items": ' + b"[" * 100_000), 422),
    request(
        "metadata 2,000 deep", post(body(metadata="X").replace(b'"X"', b'{"a":' * 2000 + b"1" + b"}" * 2000)), 422, 200
    ),
    request("a key twice", post(body().replace(b'"prompt": "p"', b'"prompt": "p", "prompt": "q"')), 422),
    request("items twice", post(b'{"items": [], ' + body()[1:]), 422),
    request("NaN for fps", post(body(fps=1).replace(b'"fps": 1', b'"fps": NaN')), 422),
    request("fps of 1e999", post(body(fps=1).replace(b'"fps": 1', b'"fps": 1e999')), 422),
    request("an id of 400 digits", post(body().replace(b'"id": 0', b'"id": ' + b"9" * 400)), 422),
    request("an id of 5,000 digits", post(body().replace(b'"id": 0', b'"id": ' + b"9" * 5000)), 422),
    request("half a character", post(body().replace(b'"p"', b'"\\ud800"')), 422),
    request("not UTF-8", post(body().replace(b'"p"', b'"\xff"')), 422),
    request("JSON in UTF-16", post(body().decode().encode("utf-16")), 422, 200),
    request("a byte order mark", post(b"\xef\xbb\xbf" + body()), 422, 200), request("a list", post(b"[1, 2]"), 422),
    request("nothing", post(b"", "Content-Length: 0"), 422),
    request("an image of 0 x 0", post(body(forged(0, 0))), 422),
    request("an image of 0 x 5", post(body(forged(0, 5))), 422),
    request("an image of 2^31", post(body(forged(2**31 - 1, 2**31 - 1))), 413, 422),
    request("a bomb", lambda: post(body(forged(99, 99, b"\0" * 30_000_000))), 200, 413, 422),
    request("10,001 pixels", post(body(png(73, 137))), 413),
    request("10,000 pixels", post(body(png(100, 100))), 200, value=51.0),
    request("GIF", post(body(animated("GIF", 3))), 422),
    request("TIFF", post(body(saved(Image.new("RGB", (2, 2)), "TIFF"))), 422),
    request("SVG", post(body(b"<svg xmlns='http://www.w3.org/2000/svg'/>")), 422),
    request("EPS", post(body(b"%!PS-Adobe-3.0 EPSF-3.0\n")), 422),
    request("a PNG of 300 frames", post(body(animated("PNG", 9))), 200, 422, value=51.0),
    request("a WebP of 9 frames", post(body(animated("WEBP", 9))), 200, 422, value=51.0),
    request("an image as a path", post(body("/etc/hostname")), 422),
    request("an image as an address", post(body("http://127.0.0.1:1/x.png")), 422),
    request("an image as data:", post(body("data:image/png;base64," + base64.b64encode(png()).decode())), 422, 200),
    request(
        "base64 of other letters",
        post(body(base64.urlsafe_b64encode(png(16, 16)).decode().replace("+", "-") + "-_")),
        422,
    ),
    request("a video without a frame", lambda: video(0), 422),
    request("a video of one frame", lambda: video(1), 200, value=51.0),
    request("a video of 16 frames", lambda: video(16), 200, value=51.0),
    request("a video of 17 frames", lambda: video(17), 413),
    request(
        "frames of two sizes",
        post(body(images=[], frames=[base64.b64encode(one).decode() for one in (png(), png(3, 2))])),
        422,
    ),
    request("metrics by a foreign name", post(b"", path="/metrics", host="evil.example", kind="", method="GET"), 400),
    request("a reward of another name", post(json.dumps({"reward": "\x1b[31m" + "x" * 5000}).encode()), 422),
]  # fmt: skip


def tokens(folder: Path) -> Outcome:
    """A server with a token: who has none learns nothing, whatever the form of the header."""
    with running(reward_of(), token="correct horse") as server:
        port, found = int(server.url.rpartition(":")[2]), list[int]()
        for line in (
            "Authorization: Bearer", "Authorization: Bearer correct", "Authorization: Basic correct horse",
            "Authorization: Bearer correct horse\xe9", "Authorization: Bearer " + "a" * 5000,
            "X-Authorization: Bearer correct horse", "Cookie: token=correct horse",
        ):  # fmt: skip
            found += [
                sent(port, post(body(), line))[0],
                sent(port, post(b"", line, path="/metrics", kind="", method="GET"))[0],
            ]
            _, answer = sent(port, post(b"", line, path="/health", kind="", method="GET"))
            if b"version" in answer:
                raise Silent(f"{line!r} is told the version: {answer[:200]!r}")
        if set(found) != {401}:
            raise Silent(f"statuses {found}")
        return same(sent(port, post(body(), "authorization: bearer correct horse"))[0], 200)


def connections(folder: Path) -> Outcome:
    """An address that opens many connections and asks for nothing: others, and it too, are still answered."""
    with running(reward_of(), max_connections=8) as server:
        port = int(server.url.rpartition(":")[2])
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        for link in idle[::2]:
            link.sendall(b"POST /v1/score HTTP/1.1\r\nHost: x\r\nX: ")
        try:
            alive(server)
        finally:
            for link in idle:
                link.close()
    return "right", "answered"


def watched(name: str, path: str, *statuses: int, host: str = "127.0.0.1:1", method: str = "GET") -> Case:
    """A request to the page of `flowrl watch`; nothing outside a run is shown, and nothing falls."""

    def run(folder: Path) -> Outcome:
        (folder / "file").write_bytes(b"theirs")
        shutil.copytree(runs() / "run", folder / "run")
        (folder / "run/samples/iteration_000009").mkdir(parents=True)
        (folder / "run/samples/iteration_000009/0000.png").symlink_to(folder / "file")
        app, told = guarded(make_app(Watched(given=[folder / "run"])), "secret-token", "watch"), list[Any]()

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            told.append(message)

        raw = path.replace("TOKEN", "secret-token")
        scope = {
            "type": "http", "method": method, "path": unquote(raw), "raw_path": raw.encode(), "query_string": b"",
            "headers": [(b"host", host.encode("latin-1"))], "http_version": "1.1", "server": ("127.0.0.1", 1),
            "root_path": "", "scheme": "http",
        }  # fmt: skip

        async def asked() -> None:
            await app(scope, receive, send)

        asyncio.run(asked())
        status, shown = told[0]["status"], b"".join(message.get("body", b"") for message in told)
        if b"theirs" in shown or status not in statuses:
            raise Silent(f"{status} where {statuses} are right: {shown[:200]!r}")
        return ("right" if status < 300 else "refused"), f"{status} {shown[:100]!r}"

    return Case(f"servers: watch, {name}", run)


WATCHED = [
    watched("the page", "/TOKEN/", 200), watched("the list", "/TOKEN/list", 200),
    watched("no token", "/", 404), watched("a part of the token", "/secret/list", 404),
    watched("a token of other letters", "/secret-tok\u00e9n/", 404),
    watched("a token encoded", "/%73ecret-token/list", 200),
    watched("a run that links out", "/TOKEN/run/0", 200, 409),
    watched("a sample that links out", "/TOKEN/sample/0/9/0000.png", 404, 409),
    watched("samples of that run", "/TOKEN/samples/0", 200, 409),
    watched("a sample of dots", "/TOKEN/sample/0/0/..%2f..%2f..%2ffile", 404),
    watched("a sample with a null", "/TOKEN/sample/0/0/0000.png%00", 404),
    watched("a negative run", "/TOKEN/run/-1", 404), watched("a run of 15 digits", "/TOKEN/run/999999999999999", 409),
    watched("a run of other digits", "/TOKEN/run/\u0663", 404, 409),
    watched("an iteration of 12 digits", "/TOKEN/sample/0/123456789012/0000.png", 404),
    watched("a write", "/TOKEN/list", 405, method="POST"), watched("a question", "/TOKEN/list", 405, method="OPTIONS"),
    watched("another host", "/TOKEN/list", 400, host="evil.example"), watched("no host", "/TOKEN/list", 400, host=""),
    watched("half an address", "/TOKEN/list", 400, host="[::1"),
    watched("a path of a megabyte", "/TOKEN/" + "a" * 10**6, 400),
]  # fmt: skip


def cases() -> Iterator[Case]:
    """Every case of this file."""
    yield from REQUESTS
    yield from WATCHED
    yield Case("servers: tokens in other forms", tokens)
    yield Case("servers: connections that ask for nothing", connections)
