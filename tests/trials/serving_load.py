"""A reward server under load and under abuse: what is lost, what is cut off, and what a long clip costs.

    python tests/trials/serving_load.py docs/research/trials/serving_load.json

Three parts: 4,096 items that 64 clients offer at once to two replicas, whose queues hold half of them; 200 connections
that never finish their headers and 100 that never finish their bodies, while a client asks; and a clip of 81 frames of
720 x 1280 through `remote`, compared bit for bit. Clients are threads of one process. Limits of size and of queues are
the defaults; time limits of the client are long, as for a machine that other work keeps busy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import numpy as np
import requests
import torch
from origin import origin
from reward_servers import body_of, reward_of, running, samples
from tiny_runs import start

from flowrl.rewards import RewardInputs, RewardOutput, build_reward, output_of, to_uint8
from flowrl.rewards.remote import items_of
from flowrl.rewards.serving.wire_adapters import Way, pack_request
from flowrl.rewards.serving.wire_images import image_file

REWARD = """
import time

def waits(images, prompts, metadata):
    time.sleep(0.02 * len(images))
    return [float(prompt.split()[1]) for prompt in prompts]
"""
CLIENTS, ITEMS = 64, 64
PATIENT = {"timeout": 600.0, "deadline": 900.0}


def served(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A server and its address."""
    (folder / "waits.py").write_text(REWARD)
    (folder / "list.yaml").write_text("rewards: [{file: waits.py, function: waits}]\n")
    command = ["-m", "flowrl", "serve", "list.yaml", "--port", "0", "--device", "cpu", "--threads", "1", *arguments]
    process = start(command, folder)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    found = re.search(r"http://[\d.:]+", lines[1])
    assert found, lines
    return process, found[0]


def many_clients(folder: Path) -> dict[str, Any]:
    """4,096 items by 64 clients at once."""
    process, url = served(folder, "--replicas", "2")
    try:
        rewards = [build_reward("remote", options={"url": url, **PATIENT}) for _ in range(CLIENTS)]
        together, inputs = threading.Barrier(CLIENTS), samples(ITEMS, size=(32, 32))

        def ask(place: int) -> tuple[int, bool]:
            together.wait()
            output = rewards[place](inputs)
            return int(output.valid.sum()), output.values.tolist() == [float(i) for i in range(ITEMS)]

        begun = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = list(threads.map(ask, range(CLIENTS)))
        seconds = time.monotonic() - begun
        metrics = requests.get(f"{url}/metrics", timeout=30).text
        refused = sum(
            float(line.rpartition(" ")[2])
            for line in metrics.splitlines()
            if line.startswith("flowrl_requests_total") and 'status="429"' in line
        )
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    return {
        "part": "many clients", "clients": CLIENTS, "items": CLIENTS * ITEMS, "replicas": 2, "queue_size": 1024,
        "lost": CLIENTS * ITEMS - sum(good for good, _ in answers), "values_right": all(right for _, right in answers),
        "refused_429": int(refused), "seconds": round(seconds, 1),
    }  # fmt: skip


def half_open(folder: Path) -> dict[str, Any]:
    """Connections that never come to an end, and how long they are borne."""
    process, url = served(folder)
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\n"
    body = head + b"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{"
    try:
        kinds = ["headers"] * 200 + ["body"] * 100
        begun = time.monotonic()
        sockets = []
        for kind in kinds:
            one = socket.create_connection((host, int(port)))
            one.sendall(head if kind == "headers" else body)
            one.setblocking(False)
            sockets.append(one)
        closed: dict[int, float] = {}
        asked: list[float] = []
        while len(closed) < len(sockets) and time.monotonic() - begun < 90:
            time.sleep(1.0)
            before = time.monotonic()
            reply = requests.post(f"{url}/v1/score", json=body_of(1, reward=None), timeout=60)
            asked.append(time.monotonic() - before)
            assert reply.status_code == 200
            for place, one in enumerate(sockets):
                if place in closed:
                    continue
                try:
                    one.sendall(b"X: y\r\n" if kinds[place] == "headers" else b" ")  # a little more, now and then
                    while piece := one.recv(65536):
                        assert piece.startswith(b"HTTP/1.1 408")
                    closed[place] = time.monotonic() - begun
                except BlockingIOError:
                    pass
                except OSError:
                    closed[place] = time.monotonic() - begun
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    row: dict[str, Any] = {"part": "half open"}
    for kind in ("headers", "body"):
        times = [closed.get(place, 999.0) for place in range(len(kinds)) if kinds[place] == kind]
        row[kind] = {"connections": len(times), "first_closed": min(times), "last_closed": max(times)}
        row[kind] = {key: round(number, 1) for key, number in row[kind].items()}
    return row | {"others_answered": len(asked), "slowest_answer": round(max(asked), 2)}


def long_clip() -> dict[str, Any]:
    """81 frames of 720 x 1280: something that moves, with grain."""
    frames, height, width = 81, 720, 1280
    y, x = np.mgrid[:height, :width].astype(np.float32)
    grain = np.random.default_rng(0).normal(0.0, 2.0, (height, width, 3)).astype(np.float32)
    clip = np.empty((frames, 3, height, width), np.uint8)
    for t in range(frames):
        smooth = np.stack([128 + 100 * np.sin((x + 5 * t) / 90 + c) * np.cos(y / 70) for c in range(3)], -1)
        clip[t] = np.clip(smooth + np.roll(grain, 3 * t, 0), 0, 255).astype(np.uint8).transpose(2, 0, 1)
    videos = torch.from_numpy(clip)[None].float() / 255

    def digest(given: RewardInputs) -> RewardOutput:
        assert given.videos is not None
        pixels = to_uint8(given.videos[0])
        return output_of([float(int(hashlib.sha256(pixels.tobytes()).hexdigest()[:6], 16))], given)

    base = samples(1)
    inputs = RewardInputs(
        prompts=base.prompts, images=videos[:, 0], metadata=base.metadata, group_ids=base.group_ids,
        sample_ids=base.sample_ids, videos=videos, fps=16.0,
    )  # fmt: skip
    sent = items_of(inputs, frozenset({"videos", "prompts"}))
    begun = time.process_time()
    body = pack_request(sent, None, 0, Way(videos=True))
    packed = time.process_time() - begun
    begun = time.process_time()
    png = sum(len(image_file(frame, "png")) for frame in sent[0].frames[::27]) * 27
    as_png = (time.process_time() - begun) * 27
    expected = float(int(hashlib.sha256(np.stack(sent[0].frames).tobytes()).hexdigest()[:6], 16))
    with running(reward_of(digest, needs=frozenset({"videos", "prompts"}))) as server:
        begun = time.monotonic()
        output = build_reward("remote", options={"url": server.url, **PATIENT})(inputs)
        seconds = time.monotonic() - begun
    return {
        "part": "long clip", "frames": frames, "size": [height, width], "valid": bool(output.valid.all()),
        "bit_identical": output.values.tolist() == [expected], "mib": round(len(body.data) / 2**20, 1),
        "mib_as_png": round(png / 2**20, 1), "cpu_seconds_to_pack": round(packed, 1),
        "cpu_seconds_to_pack_as_png": round(as_png, 1), "seconds_there_and_back": round(seconds, 1),
    }  # fmt: skip


def main(out: str) -> None:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for part in (long_clip, lambda: half_open(Path(folder)), lambda: many_clients(Path(folder))):
            rows.append({**part(), "load_average": os.getloadavg()[0]})
            print(json.dumps(rows[-1]), flush=True)
    Path(out).write_text(json.dumps({**origin(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
