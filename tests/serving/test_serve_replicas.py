"""Several processes behind one port: who gets which request, one that dies, and the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from reward_servers import body_of, samples, serve, until

from flowrl.rewards import build_reward
from flowrl.serving.serve import devices_of
from flowrl.serving.served import ServerSettings

REWARDS = """
import os, pathlib, time

while pathlib.Path(__file__).with_name("held").exists():  # a process that starts again stays away as long
    time.sleep(0.01)

def process(images, prompts, metadata):
    assert os.environ["DOOR"] != str(os.getpid()), "the door scores by itself"
    return [float(os.getpid())] * len(images)

def level(images, prompts, metadata):
    time.sleep(0.02)
    return [round(float(image.mean()) * 255) for image in images]
"""


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, warm_python: str
) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "two.py").write_text(REWARDS)
    (folder / "two.yaml").write_text(
        "rewards:\n- {file: two.py, function: process}\n- {file: two.py, function: level}\n"
    )
    process = serve(["two.yaml", "--replicas", "2"], folder, warm_python)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    try:
        assert lines[0] == "Loading process, level on cpu, 2 times ...\n", lines
        found = re.search(r"http://[\d.:]+", lines[1])
        assert found, lines
        yield process, found[0], folder / "held"
    finally:
        process.kill()
        process.communicate()


def pids(url: str, count: int) -> list[int]:
    """Which process answers some requests, one after the other."""
    answers = [requests.post(f"{url}/v1/score", json=body_of(reward="process"), timeout=10) for _ in range(count)]
    return [int(answer.json()["items"][0]["value"]) for answer in answers]


@pytest.mark.slow
def test_requests_are_shared_out_and_a_dead_replica_costs_no_item(
    served: tuple[subprocess.Popen[str], str, Path],
) -> None:
    process, url, held = served
    before = pids(url, 6)
    assert len(set(before)) == 2
    assert {before.count(pid) for pid in before} == {3}

    text = requests.get(f"{url}/metrics", timeout=10).text  # of both
    assert 'flowrl_items_total{reward="process"} 6.0' in text
    assert 'flowrl_queue_items{reward="level"} 0.0' in text
    health = requests.get(f"{url}/health", timeout=10).json()
    assert {name: about["replicas"] for name, about in health["rewards"].items()} == {"process": 2, "level": 2}

    reward = build_reward("remote", options={"url": url, "reward": "level", "batch_size": 1})
    held.touch()
    killing = threading.Timer(0.3, os.kill, (before[0], signal.SIGKILL))
    killing.start()
    output = reward(samples(96))
    killing.join()
    assert not output.errors
    assert output.values.tolist() == [float(i) for i in range(96)]
    assert set(pids(url, 2)) == {before[1]}  # the other one answers meanwhile
    held.unlink()

    def back() -> bool:
        time.sleep(0.2)
        return len(set(pids(url, 2))) == 2

    until(back, 180)
    assert before[0] not in pids(url, 2)

    left = pids(url, 2)
    text = requests.get(f"{url}/metrics", timeout=10).text  # of the one that died too
    assert float(re.findall(r'flowrl_items_total{reward="level"} (.*)', text)[0]) >= 96
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.endswith("Stopped.\n")
    assert re.search(
        r"^The process of replica [01] ended \(code -9\); it is started again in 1 s\.$", err, re.MULTILINE
    ), err
    for pid in left:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_devices_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(**settings: Any) -> list[str]:
        return [str(device) for device in devices_of(ServerSettings(**settings))]

    assert names(replicas=2, device="cpu") == ["cpu", "cpu"]
    assert names(replicas=2, devices="cpu") == ["cpu", "cpu"]
    with pytest.raises(ValueError, match="not both"):
        names(replicas=2, devices="cpu", device="cpu")
    with pytest.raises(ValueError, match="names 2 devices and there is 1 replica: give `replicas` 2"):
        names(devices="cpu,cpu")
    with pytest.raises(ValueError, match="is a list such as"):
        names(devices="cpu,")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"^`devices` cuda:0 is not available on this machine"):
        names(replicas=2, devices="cuda:0,cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert names(replicas=3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert names() == ["cuda"]
