"""Reward servers for tests: the real one in a thread, and one that answers from a script."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import requests
import torch
from tiny_runs import start

from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, output_of
from flowrl.rewards.remote import items_of
from flowrl.rewards.serving.server import make_app, make_server, open_socket
from flowrl.rewards.serving.server_requests import Service
from flowrl.rewards.serving.wire import Limits, encode_request
from flowrl.runtime.randomness import counter_seed

NEEDS = frozenset({"images", "prompts", "metadata"})
SERVE = """
import os, runpy
os.environ["DOOR"] = str(os.getpid())
runpy.run_module("flowrl", run_name="__main__", alter_sys=True)
"""


def samples(batch: int, *, size: tuple[int, int] = (6, 8), first: int = 0) -> RewardInputs:
    """Images of one 8-bit grey each, `first + 0, first + 1, ...` of 255, so that a mean tells which is which."""
    grey = torch.arange(first, first + batch, dtype=torch.float32) / 255.0
    return RewardInputs(
        prompts=[f"image {first + i}" for i in range(batch)],
        images=grey[:, None, None, None].expand(batch, 3, *size).contiguous(),
        metadata=[{"number": first + i} for i in range(batch)],
        group_ids=torch.arange(batch) // 2,
        sample_ids=torch.arange(batch) + 100,
    )


def noise(*shape: int) -> np.ndarray:
    """Random 8-bit pixels."""
    generator = torch.Generator().manual_seed(counter_seed("noise", *shape))
    array: np.ndarray = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).numpy()
    return array


def level_of(inputs: RewardInputs) -> RewardOutput:
    """The grey level of each image, 0 to 255, and half of it as a part."""
    levels = [round(float(image.mean()) * 255) for image in inputs.images]
    return output_of(levels, inputs, {"half": [level / 2 for level in levels]})


def reward_of(score: Callable[[RewardInputs], RewardOutput] = level_of, **about: Any) -> Reward:
    given = {"name": "level", "needs": frozenset({"images", "prompts", "metadata"}), "version": "level:1", **about}
    return FunctionReward(score=score, **given)


class Gate:
    """A reward that waits until it is opened, and remembers the sizes of its batches."""

    def __init__(self) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()
        self.batches: list[int] = []
        self.levels: list[int] = []

    def __call__(self, inputs: RewardInputs) -> RewardOutput:
        self.batches.append(len(inputs))
        self.entered.set()
        assert self.opened.wait(10), "the test never opened the gate"
        output = level_of(inputs)
        self.levels += [int(value) for value in output.values]
        return output


@dataclass
class Running:
    url: str
    service: Service
    thread: threading.Thread

    def post(self, body: Any, **headers: str) -> requests.Response:
        return requests.post(f"{self.url}/v1/score", json=body, headers=headers, timeout=10)


def serve(words: list[str], folder: Path, python: str, **environment: str) -> subprocess.Popen[str]:
    """`flowrl serve` on this machine, where it and the processes behind its port are started by `python`."""
    here = ("--port", "0", "--device", "cpu")
    return start(["-c", SERVE, "serve", *words, *here], folder, PYTHON_EXEC=python, CHILDREN_EXEC=python, **environment)


def body_of(batch: int = 1, *, first: int = 0, reward: str | None = "level", **size: Any) -> dict[str, Any]:
    """A request for the scores of some samples."""
    return encode_request(items_of(samples(batch, first=first, **size), NEEDS), reward=reward)


def values(reply: requests.Response) -> list[float | None]:
    """The scores in an answer."""
    assert reply.status_code == 200, reply.text
    return [item["value"] for item in reply.json()["items"]]


@contextmanager
def running(
    rewards: Mapping[str, Reward] | Reward, *, grace: float = 5.0, token: str | None = None, **limits: Any
) -> Iterator[Running]:
    """The real server on a free port of this machine."""
    served = rewards if isinstance(rewards, Mapping) else {"level": rewards}
    app = make_app(served, token=token, limits=Limits(**limits))
    sock = open_socket(port=0, has_token=False)
    server = make_server(app, grace=grace)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        end = time.monotonic() + 10
        while not server.started and time.monotonic() < end:
            time.sleep(0.005)
        yield Running(f"http://127.0.0.1:{sock.getsockname()[1]}", app.state.service, thread)
    finally:
        app.state.service.stop()
        thread.join(10)
        sock.close()
        assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Waits for something that another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


@dataclass
class Answer:
    """One answer of a scripted server; `body` is sent as JSON unless it is bytes."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0


@dataclass
class Scripted:
    """A server whose `script(path, body, number)` decides the answers; `requests` is what came, in order."""

    script: Callable[[str, Any, int], Answer]
    requests: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def bodies(self) -> list[Any]:
        return [body for _, body, _ in self.requests if body is not None]


def health(kind: str = "pointwise", max_items: int = 256, version: str = "level:1") -> Answer:
    """What a server of one reward says at /health."""
    about = {"version": version, "kind": kind, "needs": ["images", "prompts"], "queue": 0}
    limits = {"max_bytes": 10**8, "max_pixels": 10**8, "max_items": max_items}
    return Answer({"status": "ok", "rewards": {"level": about}, "limits": limits})


def scores(body: Any, *, values: Callable[[int], Any] = float, version: str = "level:1") -> dict[str, Any]:
    """A good reply to a request: `values(id)` for every item."""
    items = [{"id": i["id"], "value": values(i["id"]), "parts": {}, "error": None} for i in body["items"]]
    return {"schema": 1, "version": version, "items": items}


@contextmanager
def scripted(script: Callable[[str, Any, int], Answer]) -> Iterator[Scripted]:
    state, lock = Scripted(script), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if boundary := re.search("boundary=(.*)", self.headers["Content-Type"]):
                # The JSON is the part `request`, which stands first.
                body = body.split(f"--{boundary[1]}".encode())[1].partition(b"\r\n\r\n")[2]
            self._reply(json.loads(body))

        def _reply(self, body: Any) -> None:
            with lock:
                number = len(state.bodies())
                state.requests.append((self.path, body, dict(self.headers)))
            answer = state.script(self.path, body, number)
            if answer.delay:
                closing.wait(answer.delay)
            data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            try:
                self.send_response(answer.status)
                for name, value in {"Content-Length": str(len(data)), **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # the client did not wait
                pass

        def log_message(self, format: str, *args: Any) -> None:
            pass

    closing = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
