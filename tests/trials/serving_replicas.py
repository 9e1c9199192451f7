"""Requests per second of `flowrl serve --replicas 1` and `2`, and what is lost when a replica is killed meanwhile.

    python tests/trials/serving_replicas.py docs/research/trials/serving_replicas.json

Two rewards: one that waits 20 ms for each image, as for a device of its own, so that the count says what replicas share
out; and one that computes on one core, so that it says what two cores give. One request holds one image; twelve
connections ask at once, through the reward `remote`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from origin import origin
from reward_servers import samples
from tiny_runs import start

from flowrl.rewards import build_reward

REWARDS = """
import os, time

import torch

def process(images, prompts, metadata):
    return [float(os.getpid())] * len(images)

def waits(images, prompts, metadata):
    time.sleep(0.02 * len(images))
    return [round(float(image.mean()) * 255) for image in images]

def computes(images, prompts, metadata):
    work = torch.ones(256, 256)
    for _ in range(16 * len(images)):
        work = work @ work / 256
    return [round(float(image.mean()) * 255) for image in images]
"""
ITEMS = 240


def served(folder: Path, function: str, replicas: int) -> tuple[subprocess.Popen[str], str]:
    """A server and its address."""
    (folder / "two.py").write_text(REWARDS)
    (folder / "list.yaml").write_text(
        f"rewards: [{{file: two.py, function: {function}}}, {{file: two.py, function: process}}]\n"
    )
    command = ["-m", "flowrl", "serve", "list.yaml", "--replicas", str(replicas), "--port", "0", "--device", "cpu"]
    process = start([*command, "--threads", "1", "--batch-size", "1"], folder)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    found = re.search(r"http://[\d.:]+", lines[1])
    assert found, lines
    return process, found[0]


def measured(folder: Path, function: str, replicas: int, *, kill: bool = False) -> dict[str, Any]:
    """Requests per second, and what was lost."""
    process, url = served(folder, function, replicas)
    try:
        reward = build_reward("remote", options={"url": url, "reward": function, "batch_size": 1, "concurrency": 12})
        reward(samples(24))
        if kill:
            ended = int(float(build_reward("remote", options={"url": url, "reward": "process"})(samples(1)).values[0]))
            threading.Timer(0.5, os.kill, (ended, signal.SIGKILL)).start()
        begun = time.monotonic()
        output = reward(samples(ITEMS))
        seconds = time.monotonic() - begun
        right = output.values.tolist() == [min(i, 255) for i in range(ITEMS)]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    return {
        "reward": function, "replicas": replicas, "one_killed": kill, "requests": ITEMS,
        "lost": int((~output.valid).sum()), "values_right": right, "requests_per_second": round(ITEMS / seconds, 1),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


def main(out: str) -> None:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for function in ("waits", "computes"):
            for replicas, kill in ((1, False), (2, False), (1, False), (2, False), (2, True)):
                rows.append(measured(Path(folder), function, replicas, kill=kill))
                print(json.dumps(rows[-1]), flush=True)
    Path(out).write_text(json.dumps({**origin(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
