"""A judge behind a server that behaves like vLLM's, in a process of its own, for tests and trials.

    with served_judge(latency=0.05, status_500=0.05, answer="yes") as judge:
        chat = build_chat({"server": judge.url, "model": "stub"}, device=CPU)
        ...
        judge.stats()["peak"]          # most requests that it had at once
        judge.behave(hang=True)        # from now on

Standard library only, so that it starts at once and its CPU is its own. It speaks HTTP/1.1 with connections kept alive,
`POST /v1/chat/completions` and `GET /v1/models`. Which requests go wrong follows from their number alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

TOP = {"Yes": -0.4, " yes": -2.0, "No": -1.6, "4": -2.5, "3": -3.0}


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How the server behaves; shares are of all requests, and exclude each other."""

    latency: float = 0.0
    """Seconds of an answer."""
    answer: str = "yes"
    """What it says, or `FILE.py:FUNCTION`, called with the texts of the user's turn as one and the number of images."""
    read: bool = True
    """Whether bodies are parsed; if not, every answer is the same, and the server needs hardly any CPU."""
    status_500: float = 0.0
    garbage: float = 0.0
    """An HTML page with status 200."""
    busy: float = 0.0
    """Status 429, with Retry-After."""
    retry_after: float = 0.0
    hang: bool = False
    """Takes connections and answers nothing."""
    refuses: str = ""
    """A key of the request that it does not know, such as response_format: status 400."""
    tokens: int = 100
    """What it counts for an answer."""
    port: int = 0


@dataclass
class Judge:
    """The server side."""

    manner: Manner
    seen: Counter[str] = field(default_factory=Counter)
    now: int = 0
    bodies: list[Any] = field(default_factory=list)
    function: Callable[[str, int], str] | None = None

    async def serve(self) -> None:
        """Listens, says at which port, and serves for ever."""
        server = await asyncio.start_server(self.connection, "127.0.0.1", self.manner.port, limit=2**20)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        self.seen["connections"] += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                method, path, _ = head[0].split(" ")
                status, reply, more = await self.reply(method, path, body)
                writer.write(
                    f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(reply)}\r\n"
                    f"{more}\r\n".encode()
                    + reply
                )
                await writer.drain()
        writer.close()

    async def reply(self, method: str, path: str, body: bytes) -> tuple[int, bytes, str]:
        """Status, body and further header lines."""
        if path == "/stats":
            return 200, json.dumps({**self.seen, "cpu": time.process_time()}).encode(), ""
        if path == "/bodies":
            return 200, json.dumps(self.bodies).encode(), ""
        if path == "/behave":
            self.manner = replace(self.manner, **json.loads(body))
            self.seen["peak"] = self.now
            return 200, b"{}", ""
        if self.manner.hang:
            self.seen["unanswered"] += 1
            await asyncio.sleep(3600)
        if path == "/v1/models":
            self.seen["probes"] += 1
            return 200, b'{"object": "list", "data": [{"id": "stub", "object": "model"}]}', ""
        if (method, path) != ("POST", "/v1/chat/completions"):
            return 404, b'{"detail": "Not Found"}', ""
        number = self.seen["requests"]
        self.seen["requests"] += 1
        self.now += 1
        self.seen["peak"] = max(self.seen["peak"], self.now)
        try:
            await asyncio.sleep(self.manner.latency)
            status, reply, more = self.judged(number, body)
        finally:
            self.now -= 1
        self.seen[f"status_{status}"] += 1
        return status, reply, more

    def judged(self, number: int, body: bytes) -> tuple[int, bytes, str]:
        """What a question is answered."""
        manner = self.manner
        drawn = int.from_bytes(hashlib.sha256(str(number).encode()).digest()[:6], "big") / 2**48
        if drawn < manner.status_500:
            return 500, b'{"error": {"message": "CUDA out of memory", "code": 500}}', ""
        if (drawn := drawn - manner.status_500) < manner.garbage:
            self.seen["garbage"] += 1
            return 200, b"<html>Bad gateway</html>", ""
        if drawn - manner.garbage < manner.busy:
            return 429, b'{"error": {"message": "too many requests"}}', f"Retry-After: {manner.retry_after:g}\r\n"
        asked = json.loads(body) if manner.read else {"logprobs": True}
        if manner.read:
            self.keep(asked)
        if manner.refuses and manner.refuses in asked:
            words = f"extra fields not permitted: {manner.refuses}"
            return 400, json.dumps({"error": {"message": words, "type": "BadRequestError"}}).encode(), ""
        text = self.said(asked) if manner.read else manner.answer
        choice: dict[str, Any] = {
            "index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", "logprobs": None,
        }  # fmt: skip
        if asked.get("logprobs"):
            top = [{"token": token, "logprob": value, "bytes": list(token.encode())} for token, value in TOP.items()]
            choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
        usage = {"prompt_tokens": manner.tokens - 1, "completion_tokens": 1, "total_tokens": manner.tokens}
        reply = {"id": f"chatcmpl-{number}", "object": "chat.completion", "choices": [choice], "usage": usage}
        return 200, json.dumps(reply).encode(), ""

    def keep(self, asked: dict[str, Any]) -> None:
        """Remembers the last requests, images by their kind and size alone."""
        shown = [
            {**message, "content": [_short(part) for part in message["content"]]}
            if isinstance(message["content"], list)
            else message
            for message in asked["messages"]
        ]
        self.bodies = [*self.bodies[-99:], {**asked, "messages": shown}]

    def said(self, asked: dict[str, Any]) -> str:
        """The answer's text."""
        parts = asked["messages"][-1]["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        file, colon, name = self.manner.answer.rpartition(":")
        if not colon or not file.endswith(".py"):
            return self.manner.answer
        if self.function is None:
            spec = importlib.util.spec_from_file_location("judge_answers", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            self.function = getattr(module, name)
        texts = [part["text"] for part in parts if part["type"] == "text"]
        return self.function("\n".join(texts), len(parts) - len(texts))


def _short(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image_url":
        return part
    url = part["image_url"]["url"]
    return {"type": "image_url", "kind": url.partition(";")[0], "length": len(url)}


@dataclass(frozen=True)
class Served:
    """The client's side of the server."""

    url: str
    """What the option `server` takes."""
    process: subprocess.Popen[str]

    def stats(self) -> dict[str, Any]:
        """Counts since the start: requests, peak, connections, probes, garbage, status_200 ..., and its CPU seconds."""
        return dict(self._get("/stats"))

    def bodies(self) -> list[Any]:
        """The last hundred requests that were parsed; of an image, kind and length of its address."""
        return list(self._get("/bodies"))

    def behave(self, **manner: Any) -> None:
        """Changes how it behaves, see `Manner`; `peak` counts from here."""
        self._get("/behave", json.dumps(manner).encode())

    def _get(self, path: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(self.url.removesuffix("/v1") + path, data=data)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=20) as reply:
            return json.loads(reply.read())


@contextlib.contextmanager
def served_judge(**manner: Any) -> Iterator[Served]:
    """Such a server on a free port, or on `port`, of this machine; see `Manner`."""
    given = json.dumps(asdict(Manner(**manner)))
    process = subprocess.Popen([sys.executable, __file__, given], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Served(f"http://127.0.0.1:{int(process.stdout.readline())}/v1", process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Judge(Manner(**json.loads(sys.argv[1]))).serve())
