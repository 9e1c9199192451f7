"""Rewards in environments of their own behind one port: the door, processes that die or never start."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import requests
from reward_servers import body_of, samples, serve
from starlette.testclient import TestClient

import flowrl
from flowrl.generation.named_rewards import reward_list
from flowrl.rewards import build_reward
from flowrl.rewards.serving import front_door
from flowrl.rewards.serving.front_door import join_metrics
from flowrl.rewards.serving.retries import RawReply
from flowrl.rewards.serving.wire import Limits
from flowrl.serving.environments import Environments, has_places
from flowrl.serving.served import ServerSettings

SCORER = """
import os
try:
    import flowrl
except ImportError:
    flowrl = None

def score(images, prompts, metadata):
    if flowrl is not None or os.environ["PLACE"] != "here":
        raise RuntimeError("the wrong environment")
    return [len(image) for image in images]

def process(images, prompts, metadata):
    return [float(os.getpid()) for _ in images]
"""


def own_python(folder: Path) -> Path:
    """A Python without any package that is not its own."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    file.chmod(0o755)
    return file


def settings(**given: Any) -> ServerSettings:
    return ServerSettings(port=0, device="cpu", **given)


@pytest.mark.slow
def test_scorers_of_two_environments_answer_at_one_port(tmp_path: Path, warm_python: str) -> None:
    (tmp_path / "lengths.py").write_text(SCORER)
    python = own_python(tmp_path)
    (tmp_path / "list.yaml").write_text(
        textwrap.dedent(f"""
        rewards:
        - {{name: jpeg_compressibility}}
        - {{scorer: lengths.py, python: {python}, environment: {{PLACE: here}}, options: {{images: bytes}}}}
        - {{scorer: "lengths.py:process", label: process, python: {python}, options: {{images: bytes}}}}
        """)
    )
    server = serve(["list.yaml", "--token-env", "T"], tmp_path, warm_python, T="abc", PLACE="there")
    assert server.stdout is not None
    lines: list[str] = []
    while not (lines and lines[-1].startswith("In a configuration")):
        lines.append(server.stdout.readline())
        assert lines[-1], server.communicate()
    try:
        assert lines[1] == f"Starting lengths with {python} ...\n"
        assert "  lengths (pointwise; needs images, metadata, prompts): lengths:" in "".join(lines)
        found = re.search(r"http://[\d.:]+", "".join(lines))
        assert found
        url, headers = found[0], {"Authorization": "Bearer abc"}

        def asked(reward: str | None, **more: Any) -> requests.Response:
            given = {"headers": headers, "timeout": 20, **more}
            return requests.post(f"{url}/v1/score", json=body_of(2, reward=reward), **given)

        os.environ["T"] = "abc"
        far = {name: build_reward("remote", options={"url": url, "reward": name, "token_env": "T"})
               for name in ("jpeg_compressibility", "lengths")}  # fmt: skip
        batch = samples(5)
        here = build_reward("jpeg_compressibility")(batch)
        assert far["jpeg_compressibility"](batch).values.tolist() == here.values.tolist()
        output = far["lengths"](batch)
        assert output.valid.all(), output.errors
        assert output.values.min() > 50  # bytes of a PNG

        assert asked("lengths").status_code == 200  # JSON too
        assert (asked("hps").status_code, asked(None).json()["error"]) == (422, "unknown_reward")
        assert asked("lengths", headers={}).status_code == 401
        assert requests.post(f"{url}/v1/score", json={}, headers=headers, timeout=20).status_code == 422
        health = requests.get(f"{url}/health", headers=headers, timeout=10).json()
        assert {name: about["running"] for name, about in health["rewards"].items()} == {
            "jpeg_compressibility": True, "lengths": True, "process": True,
        }  # fmt: skip
        assert (health["rewards"]["lengths"]["videos"], health["videos"]) == ([], [])
        assert health["rewards"]["jpeg_compressibility"]["videos"] == ["ffv1"]
        assert requests.get(f"{url}/health", timeout=10).json() == {"status": "ok"}
        metrics = requests.get(f"{url}/metrics", headers=headers, timeout=10).text
        assert 'flowrl_items_total{reward="jpeg_compressibility"} 5.0' in metrics
        assert metrics.count("# TYPE flowrl_items_total counter") == 1

        pid = int(asked("process").json()["items"][0]["value"])
        os.kill(pid, signal.SIGKILL)
        assert asked("lengths").status_code == 200  # the others go on
        reward = build_reward("remote", options={"url": url, "reward": "process", "token_env": "T"})
        output = reward(samples(2))  # the time until it is back is waited for
        assert output.valid.all(), output.errors
        assert float(output.values[0]) != pid
    finally:
        os.environ.pop("T", None)
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=120)
    assert server.returncode == 0
    assert out.endswith("Stopped.\n")
    assert "The process of process ended (code -9); it is started again in 1 s." in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(output.values[0]), 0)


def started(file: Path) -> str:
    """What is said of environments that do not start."""
    with (
        pytest.raises(ValueError, match=r".") as caught,
        Environments(settings(), reward_list([str(file)])) as all_,
    ):
        all_.start()
    return str(caught.value)


def test_what_a_process_says_when_it_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # not where flowrl lies
    python = own_python(tmp_path)
    (tmp_path / "broken.py").write_text("import not_there_at_all\n")
    (tmp_path / "short.py").write_text(SCORER)
    file = tmp_path / "list.yaml"

    def said(entry: str, options: str = ", options: {images: bytes}") -> str:
        file.write_text(f"rewards: [{{{entry}, python: {python}{options}}}]")
        return started(file)

    assert said(f"scorer: {tmp_path}/broken.py") == (
        f"broken does not start with {python} (code 1). It said: {tmp_path}/broken.py cannot be imported: "
        f"ModuleNotFoundError: No module named 'not_there_at_all'."
    )
    assert "has no function level" in said(f"scorer: '{tmp_path}/short.py:level'")
    told = said("name: hps", "")
    assert "hps does not start" in told
    assert "It said: No module named 'flowrl'" in told
    assert "serve a function of it by scorer: FILE.py" in told
    file.write_text(
        f"rewards: [{{scorer: {tmp_path}/short.py, python: {python}, options: {{images: bytes}}}}, "
        f"{{scorer: {tmp_path}/short.py, python: {python}, options: {{images: bytes}}}}]"
    )
    assert started(file) == "two rewards are called short: give one of them a label."


def test_entries_that_are_refused_before_anything_starts(tmp_path: Path) -> None:
    python = own_python(tmp_path)
    (tmp_path / "a.py").write_text(SCORER)
    for entry, message in [
        ("name: hps, python: envs/none/bin/python", r"python must be a program, got 'envs/none/bin/python'"),
        (f"name: hps, python: {tmp_path}", "python must be a program"),
        (f"scorer: {tmp_path}/a.py", "python is missing: the Python of the scorer's environment"),
        ("name: hps, environment: {A: b}", "python is missing"),
        (f"scorer: {tmp_path}/b.py, python: {python}", "scorer must be a Python file or FILE.py:FUNCTION"),
        (f"scorer: {tmp_path}/a.py, python: {python}, name: hps", "a scorer takes label, options, .* got name"),
        (f"scorer: {tmp_path}/a.py, python: {python}, options: {{images: gif}}", "images must be pil, numpy or bytes"),
        (f"scorer: {tmp_path}/a.py, python: {python}, options: {{needs: [masks]}}", "needs must be of images, .*masks"),
        (f"scorer: {tmp_path}/a.py, python: {python}, options: {{size: 3}}", "size"),
    ]:
        file = tmp_path / "list.yaml"
        file.write_text(f"rewards: [{{{entry}}}]")
        assert has_places(reward_list([str(file)]))
        with pytest.raises(ValueError, match=message):
            flowrl.serve(str(file), port=0, device="cpu")
    assert not has_places([{"name": "hps"}])


def test_the_door_counts_what_it_refuses_itself_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked(*_: Any) -> Any:
        return RawReply(status=413, headers={"content-type": "application/json"}, content=b"{}")

    monkeypatch.setattr(front_door, "_ask", asked)
    backends = [front_door.ServerBackend(rewards={"a": {}}), front_door.ServerBackend(rewards={"b": {}}, port=1)]
    door = front_door.make_door(backends, inner="x", token=None, limits=Limits())
    client = TestClient(door, base_url="http://127.0.0.1")
    for body, status in [({}, 422), ({"reward": ["a"]}, 422), ({"reward": "a"}, 503), ({"reward": "b"}, 413)]:
        assert client.post("/v1/score", json=body).status_code == status
    said = client.post("/v1/score", json={"reward": "n" * 1000}).json()
    assert said["error"] == "unknown_reward"
    assert len(said["detail"]) < 150
    text = client.app.state.service.metrics.text("")[0].decode()  # type: ignore[attr-defined]
    counted = re.findall(r"flowrl_requests_total\{(.*)\} (.*)", text)
    assert sorted(counted) == [('reward="",status="422"', "3.0"), ('reward="",status="503"', "1.0")]


def test_a_scorer_gets_its_threads_and_ends_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SCORER)
    entry: dict[str, Any] = {"scorer": f"{tmp_path}/a.py", "python": str(own_python(tmp_path))}
    specs = [entry, {**entry, "label": "b", "environment": {"OMP_NUM_THREADS": "7"}}]
    with Environments(settings(threads=3), specs) as all_:
        assert [child.environment["OMP_NUM_THREADS"] for child in all_.children] == ["3", "7"]
        all_.children[0].command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        all_.stopping.set()  # as when all are ended before this one is known
        assert all_._run(all_.children[0]) == -signal.SIGTERM


def test_metrics_are_joined() -> None:
    head = "# HELP a_total x\n# TYPE a_total counter\n"
    one = head + 'a_total{r="1"} 2.0\n'
    two = head + 'a_total{r="1"} 3.0\na_total{r="a b"} 1.0\n# TYPE q gauge\nq 4.0\n'
    assert join_metrics([one, two]) == head + 'a_total{r="1"} 5.0\na_total{r="a b"} 1.0\n# TYPE q gauge\nq 4.0\n'


def test_the_time_to_finish_is_one_that_ends() -> None:
    for wrong in (-1.0, 1e9):
        with pytest.raises(ValueError, match="`grace` must lie between 0 and 86400"):
            ServerSettings(grace=wrong)
