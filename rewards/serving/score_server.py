"""Serves one Python function as a reward, beside a scorer of another project and in that project's environment.

    python score_server.py deqa_score.py:score --name deqa --port 8190

This file stands alone: copy it anywhere. It needs Python 3.8 and nothing else; images are decoded where Pillow is
installed. The function gets lists of the same length and gives one number for each image, None where it has none:

    def score(images, prompts, metadata): return [0.5 for _ in images]

Images are PIL images (`--images pil`), one uint8 array [n, H, W, 3] or a list of arrays where sizes differ (`numpy`),
or files as they came (`bytes`); a video is a list of such frames. An array, a tensor, a mapping from names to lists
(the first is the value, all are parts) and a pair whose first is one of them are taken too. See docs/serving.md.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import contextlib
import hashlib
import hmac
import importlib.util
import io
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence  # noqa: UP035 (Python 3.8)

SCHEMA, MOST_VALUES = 1, 1_000_000  # the second: commas and brackets of a request's JSON
HEADER_SECONDS, IDLE_SECONDS, SHORT_SECONDS = 20.0, 30.0, 5.0  # for a request, after scores, after anything else
SLOWEST_BODY = 64 * 1024  # bytes a second that a body has to come with after its first `HEADER_SECONDS`
MOST_CONNECTIONS, MOST_OF_ONE, MOST_HELD = 256, 128, 8  # at once, of one address, largest bodies in memory
OWN_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
PATHS, NO_PATH = ("/v1/score", "/v1/score/multipart"), "there are /health, /v1/score and /v1/score/multipart."
LISTS = ("images", "source_images", "reference_images", "frames")
FIELDS = ("images", "prompts", "metadata", "videos", "source_images", "reference_images")


class Refused(Exception):
    """A request that is refused: status, word, sentence."""


def need(right: bool, message: str, status: int = 422, word: str = "bad_request") -> None:
    """Refuses what is not as the format wants it."""
    if not right:
        raise Refused(status, word, message)


class ServedScorer(NamedTuple):
    """What is served, and what a request may hold."""

    name: str
    version: str
    function: Callable[..., Any]
    images: str
    needs: list[str]
    batch_size: int
    max_items: int
    max_bytes: int
    max_pixels: int
    max_waiting: int
    token: str | None
    max_images: int = 4096


def check_needs(needs: Sequence[str]) -> list[str]:
    """The fields that clients are told to send; ValueError where there is none of that name."""
    names = [name.strip() for name in needs]
    if unknown := [name for name in names if name not in FIELDS]:
        raise ValueError(f"needs must be of {', '.join(FIELDS)}, got {unknown[0]!r}.")
    return names


def load_function(target: str) -> tuple[Callable[..., Any], str]:
    """The function of FILE.py:FUNCTION (`score` where none is named), and a digest of the file."""
    file, colon, name = target.partition(".py:")
    path = Path(file + ".py" if colon else file)
    if not path.is_file():
        raise SystemExit(f"score_server: there is no file {path}: give FILE.py or FILE.py:FUNCTION.")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, str(path))
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(f"score_server: {path} cannot be imported: {type(error).__name__}: {error}") from None
    function = getattr(module, name or "score", None)
    if not callable(function):
        raise SystemExit(f"score_server: {path} has no function {name or 'score'}.")
    return function, hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def split_parts(body: bytes, content_type: str, most: int) -> dict[str, bytes]:
    """The parts of a multipart body by their names."""
    boundary = content_type.partition("boundary=")[2].partition(";")[0].strip().strip('"')
    need(bool(boundary), "the multipart body has no boundary.")
    parts: dict[str, bytes] = {}
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(), most)[1:]
    need(len(pieces) < most, "the multipart body has too many parts: raise --max-images.", 413, "too_many_images")
    for piece in pieces:
        head, blank, content = piece.partition(b"\r\n\r\n")
        name = head.partition(b'name="')[2].partition(b'"')[0].decode("utf-8", "replace")
        if blank and name:
            parts[name] = content
    return parts


def decode(body: bytes, content_type: str, scorer: ServedScorer) -> list[dict[str, Any]]:
    """The items of a request, their images decoded."""
    files: dict[str, bytes] | None = None
    if content_type.startswith("multipart/form-data"):
        files = split_parts(body, content_type, scorer.max_images + 8)
        need("request" in files, "there is no part named request: it holds the JSON.")
        body = files.pop("request")
    values = sum(map(body.count, (b",", b"[", b"{")))
    need(values <= MOST_VALUES, f"a request may hold {MOST_VALUES} values in its JSON.", 413, "too_many_values")
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(422, "bad_request", "the body is not valid JSON.") from None
    items: Any = data.get("items") if isinstance(data, dict) else None
    right = isinstance(items, list) and bool(items) and {*map(type, items)} == {dict}
    need(right, "items must be a list with at least one mapping.")
    need(data.get("schema", SCHEMA) == SCHEMA, f"schema must be {SCHEMA}, got {data.get('schema')!r}.")
    name, most = data.get("reward"), scorer.max_items
    need(name in (None, scorer.name), f"reward must be {scorer.name}, got {str(name)[:80]}.", 422, "unknown_reward")
    need(len(items) <= most, f"a request may hold {most} items, got {len(items)}.", 413, "too_many_items")
    left = [scorer.max_pixels, scorer.max_images]
    for item in items:
        decode_item(item, files, left, scorer)
    need(len({item["id"] for item in items}) == len(items), "two items have the same id.")
    return items


def decode_item(item: dict[str, Any], files: dict[str, bytes] | None, left: list[int], scorer: ServedScorer) -> None:
    """Checks an item and decodes its images in place; `left` are the pixels and images that the request still has."""
    named = isinstance(item.get("id"), int) and isinstance(item.get("prompt"), str)
    need(named, "an item must have a whole number id and a text prompt.")
    need(isinstance(item.get("metadata"), (dict, type(None))), "metadata must be a mapping.")
    need("video" not in item, "this server reads videos as frames, not as one file.")
    for key in LISTS:
        given = item.get(key) or []
        need(isinstance(given, list), f"{key} must be a list of images.")
        left[1] -= len(given)
        need(left[1] >= 0, f"a request may hold {scorer.max_images} images.", 413, "too_many_images")
        item[key] = [decode_image(file_of(one, files), left, scorer) for one in given]
    need(len(item["images"]) + bool(item["frames"]) == 1, "an item must have one image in images, or frames.")


def file_of(value: Any, files: dict[str, bytes] | None) -> bytes:
    """The bytes of an image: a part, or base64."""
    there = isinstance(value, str) and (files is None or value in files)
    need(there, f"an image is missing or is no text: {str(value)[:80]}")
    if files is not None:
        return files[value]
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(422, "bad_request", "an image is not valid base64.") from None


def decode_image(data: bytes, left: list[int], scorer: ServedScorer) -> Any:
    """An image as the function wants it; `left` is what the request may still unpack."""
    if scorer.images == "bytes":
        return data
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as opened:
            left[0] -= opened.size[0] * opened.size[1]
            image = on_white(ImageOps.exif_transpose(opened)) if left[0] >= 0 else None
    except Exception as error:
        raise Refused(422, "bad_request", f"an image cannot be read ({type(error).__name__}).") from None
    need(image is not None, f"a request may hold {scorer.max_pixels} pixels.", 413, "too_many_pixels")
    return image if scorer.images == "pil" else importlib.import_module("numpy").asarray(image)


def on_white(image: Any) -> Any:
    """An image of any kind with 8 bits per channel, on white where it is transparent."""
    Image = importlib.import_module("PIL.Image")
    if image.mode.startswith("I"):  # Pillow's own conversion of 16 bits cuts at 255
        return image.convert("I").point(lambda level: level * (1 / 257) + 0.5).convert("L").convert("RGB")
    if image.mode not in ("LA", "La", "PA", "RGBA", "RGBa") and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


def score_items(items: list[dict[str, Any]], scorer: ServedScorer) -> list[dict[str, Any]]:
    """One entry of the reply for each item; a call that fails is made again item by item."""
    try:
        parts = call_scorer(items, scorer)
    except Exception as error:
        if len(items) > 1:
            return [entry for item in items for entry in score_items([item], scorer)]
        traceback.print_exc()
        detail = f"{type(error).__name__}: {error}"[:500]
        return [{"id": items[0]["id"], "value": None, "parts": {}, "error": "exception", "detail": detail}]
    value, entries = next(iter(parts)), []
    for place, item in enumerate(items):
        numbers = {name: finite(values[place]) for name, values in parts.items()}
        word = None if numbers[value] is not None else "null" if parts[value][place] is None else "not_finite"
        entries.append({"id": item["id"], "value": numbers.pop(value), "parts": numbers, "error": word})
    return entries


def call_scorer(items: list[dict[str, Any]], scorer: ServedScorer) -> dict[str, list[Any]]:
    """What the function gives for some items."""
    images: Any = [item["frames"] or item["images"][0] for item in items]
    if scorer.images == "numpy":  # arrays of one size are one array
        import numpy

        arrays = [numpy.stack(one) if isinstance(one, list) else one for one in images]
        images = numpy.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays
    more = {name: [item[name] for item in items] for name in scorer.needs if name.endswith("_images")}
    texts = {"prompts": [item["prompt"] for item in items], "metadata": [item.get("metadata") or {} for item in items]}
    return read_output(scorer.function(images=images, **texts, **more), len(items))


def read_output(output: Any, count: int) -> dict[str, list[Any]]:
    """What a function gave, as lists by name; the first is the value."""
    output = output[0] if isinstance(output, tuple) and len(output) == 2 else output
    named = output if isinstance(output, dict) else {"value": output}
    parts = {str(name): list(one.tolist() if hasattr(one, "tolist") else one) for name, one in named.items()}
    if not parts or any(len(values) != count for values in parts.values()):
        raise ValueError(f"the function must give {count} numbers, got { ({k: len(v) for k, v in parts.items()}) }.")
    return parts


def finite(value: Any) -> float | None:
    """A number as JSON can hold it, else None."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return float(value) if math.isfinite(float(value)) else None
    return None


class ScoreServer(ThreadingHTTPServer):
    """A thread for each connection, one call of the function at a time; connections that dawdle are closed."""

    daemon_threads, request_queue_size = True, 512

    def __init__(self, address: tuple[str, int], scorer: ServedScorer) -> None:
        super().__init__(address, Handler)
        self.scorer, self.turn, self.lock = scorer, threading.Lock(), threading.Lock()
        self.waiting, self.active, self.held, self.stopping = 0, 0, 0, False
        self.deadlines: dict[socket.socket, float] = {}
        self.came: dict[socket.socket, str] = {}  # from which address
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        """Ends connections whose time is up."""
        while True:
            time.sleep(0.2)
            with self.lock:
                late = [one for one, end in self.deadlines.items() if time.monotonic() > end]
            for one in late:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Takes a connection, if there are not too many."""
        with self.lock:
            full = len(self.came) >= MOST_CONNECTIONS or [*self.came.values()].count(client_address[0]) >= MOST_OF_ONE
            if not full:
                self.came[request], self.deadlines[request] = client_address[0], time.monotonic() + HEADER_SECONDS
        if full:
            return self.shutdown_request(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        with self.lock:
            self.deadlines.pop(request, None)
            self.came.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break off are nothing to tell."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: ScoreServer

    def do_GET(self) -> None:
        """/health."""
        scorer, server = self.server.scorer, self.server
        if why := self.foreign():
            return self.refuse(why)
        if self.path != "/health":
            return self.refuse(Refused(404, "not_found", NO_PATH))
        allowed = self.has_token()
        if not allowed and "Authorization" in self.headers:
            return self.refuse(Refused(401, "unauthorized", "the token is wrong."))
        status: dict[str, Any] = {"status": "stopping" if server.stopping else "ok"}
        if allowed:
            about = {"version": scorer.version, "kind": "pointwise", "needs": scorer.needs, "queue": server.waiting}
            limits = {name: getattr(scorer, name) for name in ("max_bytes", "max_pixels", "max_items")}
            status.update({"rewards": {scorer.name: about}, "limits": limits, "videos": []})
        self.reply(503 if server.stopping else 200, status)

    def do_POST(self) -> None:
        """A request for scores."""
        server, held = self.server, [0]
        try:
            with server.lock:
                server.active += 1
            try:
                items = decode(self.body(held), self.headers.get("Content-Type", ""), server.scorer)
            finally:
                with server.lock:
                    server.held -= held[0]
            self.reply(200, {"schema": SCHEMA, "version": server.scorer.version, "items": self.scored(items)})
        except Refused as refused:
            self.refuse(refused)
        finally:
            with server.lock:
                server.active -= 1

    def body(self, held: list[int]) -> bytes:
        """The body, read whether it is wanted or not, so that a client reads why; `held[0]`: what is kept of it."""
        scorer, server = self.server.scorer, self.server
        given = self.headers.get("Content-Length") or ""
        length = int(given[:20]) if given.isascii() and given.isdigit() else -1
        if not 0 <= length <= 4 * scorer.max_bytes:
            self.close_connection = True
            many = Refused(413, "too_many_bytes", f"a request may hold {scorer.max_bytes} bytes.")
            raise many if length > 0 else Refused(411, "no_length", "give a Content-Length.")
        begun, pieces, seen = time.monotonic(), [], 0
        with server.lock:
            keep = length <= scorer.max_bytes and self.has_token()
            full = keep and server.held + length > MOST_HELD * scorer.max_bytes
            held[0] = length if keep and not full else 0
            server.held += held[0]
        while seen < length:
            with server.lock:
                server.deadlines[self.connection] = begun + HEADER_SECONDS + seen / SLOWEST_BODY
            piece = self.rfile.read1(min(2**16, length - seen))
            if not piece:
                self.close_connection = True
                raise Refused(408, "slow_body", "the body did not arrive.")
            seen += len(piece)
            if held[0]:
                pieces.append(piece)
        with server.lock:
            server.deadlines[self.connection] = math.inf
        need(self.has_token(), "a valid token is needed: Authorization: Bearer TOKEN.", 401, "unauthorized")
        if why := self.foreign():
            raise why
        need(self.path in PATHS, NO_PATH, 404, "not_found")
        need(not server.stopping, "the server is stopping.", 503, "stopping")
        need(length <= scorer.max_bytes, f"a request may hold {scorer.max_bytes} bytes.", 413, "too_many_bytes")
        need(not full, "too many requests are being sent, try again in 1 s.", 429, "queue_full")
        return b"".join(pieces)

    def scored(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The entries of the reply, once it is this request's turn."""
        server, size = self.server, self.server.scorer.batch_size
        with server.lock:
            if server.waiting and server.waiting + len(items) > server.scorer.max_waiting:
                raise Refused(429, "queue_full", "the queue is full, try again in 1 s.")
            server.waiting += len(items)
        try:
            with server.turn:
                batches = [items[i : i + size] for i in range(0, len(items), size)]
                return [entry for batch in batches for entry in score_items(batch, server.scorer)]
        finally:
            with server.lock:
                server.waiting -= len(items)

    def has_token(self) -> bool:
        """Whether the request carries the token, if there is one."""
        token = self.server.scorer.token
        given = self.headers.get("Authorization", "").encode()
        return token is None or hmac.compare_digest(given, f"Bearer {token}".encode())

    def foreign(self) -> Refused | None:
        """Why a server without token refuses: the request names another host, or a page in a browser sent it."""
        hosts, given = self.headers.get_all("Host", ["localhost"]), self.headers.get
        if self.server.scorer.token is not None:
            return None
        if len(hosts) > 1 or not OWN_HOST.fullmatch(hosts[0].strip()):
            return Refused(400, "foreign_host", "ask for localhost or 127.0.0.1, or give the server a token.")
        if given("Origin") or given("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return Refused(403, "foreign_page", "a page in a browser may not ask this server.")
        return None

    def refuse(self, refused: Refused) -> None:
        """Says why."""
        status, word, said = refused.args
        self.reply(status, {"error": word, "detail": said})

    def reply(self, status: int, body: Any) -> None:
        """Sends JSON."""
        data = json.dumps(body, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        with self.server.lock:
            scored = self.command == "POST" and status == 200
            self.server.deadlines[self.connection] = time.monotonic() + (IDLE_SECONDS if scored else SHORT_SECONDS)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Serve a function score(images, prompts, metadata) as a reward.")
    add = parser.add_argument
    add("target", metavar="FILE.py[:FUNCTION]")
    add("--name", help="name of the reward (default: that of the file)")
    add("--version", help="of the scorer, which runs record (default: a digest of the file)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8190, help="0 for a free one")
    add("--token-env", metavar="NAME", help="environment variable with the token that clients must send")
    add("--images", choices=("pil", "numpy", "bytes"), help="what the function gets (default: pil where there is one)")
    add("--needs", default="images,prompts,metadata", help="fields that clients send, also videos, source_images, ...")
    add("--batch-size", type=int, default=16, help="items of one call")
    add("--max-items", type=int, default=256)
    add("--max-mib", type=int, default=64)
    add("--max-mpixels", type=int, default=64)
    add("--max-images", type=int, default=4096, help="images and frames of a request, of any size")
    add("--queue-size", type=int, default=1024, help="items that may wait")
    add("--until-stdin-ends", action="store_true", help="stop with the program that started this one")
    return parser.parse_args(given)


def load_scorer(given: argparse.Namespace) -> ServedScorer:
    """The function that the command line names, with its limits."""
    token = os.environ.get(given.token_env or "", "").strip() or None
    if given.token_env and not token:
        raise SystemExit(f"score_server: the environment variable {given.token_env} is not set: put the token there.")
    if token is None and given.host not in ("127.0.0.1", "localhost", "::1"):
        raise SystemExit("score_server: others can reach that host: name a variable with a token by --token-env.")
    has_pillow = importlib.util.find_spec("PIL") is not None
    if given.images in ("pil", "numpy") and not has_pillow:
        raise SystemExit(f"score_server: --images {given.images} needs Pillow: install it, or take --images bytes.")
    function, digest = load_function(given.target)
    name = given.name or Path(given.target.partition(".py:")[0]).stem
    limits = {limit: getattr(given, limit) for limit in ("batch_size", "max_items", "max_images")}
    return ServedScorer(
        name=name, version=f"{name}:{given.version or digest}", function=function, token=token,
        images=given.images or ("pil" if has_pillow else "bytes"), needs=check_needs(given.needs.split(",")),
        max_bytes=given.max_mib * 2**20, max_pixels=given.max_mpixels * 10**6, max_waiting=given.queue_size, **limits,
    )  # fmt: skip


def main() -> None:
    """Loads the function and serves it until a signal."""
    given = arguments()
    try:
        server = ScoreServer((given.host, given.port), load_scorer(given))
    except ValueError as error:
        raise SystemExit(f"score_server: {error}") from None
    except OSError as error:
        raise SystemExit(f"score_server: cannot serve at {given.host}:{given.port} ({error.strerror}).") from None

    def stop(*_: Any) -> None:
        server.stopping = True
        threading.Thread(target=finish, daemon=True).start()

    def finish() -> None:
        end = time.monotonic() + 30
        while server.active and time.monotonic() < end:  # until the replies too are written
            time.sleep(0.05)
        server.shutdown()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if given.until_stdin_ends:
        threading.Thread(target=lambda: stop(os.read(0, 1)), daemon=True).start()  # sys.stdin's lock is fatal at exit
    print(f"Serving at http://{given.host}:{server.server_address[1]}; Ctrl-C stops.", flush=True)
    server.serve_forever(poll_interval=0.1)


if __name__ == "__main__":
    main()
