"""The reward server, for real: uvicorn in a thread on a free port, asked by several clients at once."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from reward_servers import (
    Gate,
    Running,
    body_of,
    level_of,
    noise,
    reward_of,
    running,
    until,
    values,
)

import flowrl
from flowrl import cli
from flowrl.generation.named_rewards import reward_list
from flowrl.rewards import RewardInputs, RewardOutput, output_of
from flowrl.rewards.serving.server import make_app, open_socket
from flowrl.rewards.serving.wire import Limits
from flowrl.rewards.serving.wire_images import encode_image


def metric(server: Running, name: str) -> float:
    """The sum over all labels of a metric."""
    lines = requests.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"flowrl_{name}"))


def test_scores_come_back_by_id_with_parts_and_version() -> None:
    with running(reward_of()) as server:
        body = body_of(3, first=10)
        body["items"].reverse()
        reply = server.post(body).json()
        assert (reply["schema"], reply["version"]) == (1, "level:1")
        assert [(item["id"], item["value"], item["parts"]) for item in reply["items"]] == [
            (2, 12.0, {"half": 6.0}), (1, 11.0, {"half": 5.5}), (0, 10.0, {"half": 5.0}),
        ]  # fmt: skip
        assert all(item["error"] is None for item in reply["items"])
        assert values(server.post(body_of(1, reward=None))) == [0.0]  # the only reward need not be named


def test_multipart_gives_the_same_as_json() -> None:
    body = body_of(2, first=30)
    files: list[tuple[str, tuple[str, bytes, str]]] = []
    for item in body["items"]:
        name = f"image-{item['id']}"
        files.append((name, (name, base64.b64decode(item["images"][0]), "image/png")))
        item["images"] = [name]
    with running(reward_of()) as server:
        url = f"{server.url}/v1/score/multipart"
        assert values(requests.post(url, data={"request": json.dumps(body)}, files=files, timeout=10)) == [30.0, 31.0]
        as_file = [("request", ("request.json", json.dumps(body).encode(), "application/json")), *files]
        assert values(requests.post(url, files=as_file, timeout=10)) == [30.0, 31.0]
        assert requests.post(url, files=files, timeout=10).json()["detail"] == (
            "there is no part named request: it holds the JSON."
        )
        form = {"Content-Type": "multipart/form-data; boundary=x"}
        assert requests.post(url, data=b"--y\r\n", headers=form, timeout=10).status_code == 422
        assert requests.post(url, json=body, timeout=10).status_code == 415


def test_video_and_editing_fields_reach_the_reward() -> None:
    seen: list[RewardInputs] = []

    def keep(inputs: RewardInputs) -> RewardOutput:
        seen.append(inputs)
        return level_of(inputs)

    frames, source, like = noise(3, 4, 5, 3), noise(2, 2, 3), noise(6, 3, 3)
    item = {
        "id": 5, "prompt": "p", "frames": [encode_image(frame) for frame in frames], "fps": 8.0,
        "source_images": [encode_image(source)], "reference_images": [encode_image(like)], "sample_id": 77,
    }  # fmt: skip
    with running(reward_of(keep)) as server:
        server.post({"items": [item], "group_ids": [3], "iteration": 9}).raise_for_status()
    (inputs,) = seen
    expected = torch.from_numpy(frames).permute(0, 3, 1, 2) / 255.0
    assert inputs.videos is not None
    assert inputs.source_images is not None
    assert inputs.reference_images is not None
    torch.testing.assert_close(inputs.videos, expected[None], rtol=0, atol=0)
    torch.testing.assert_close(inputs.images, expected[:1], rtol=0, atol=0)
    assert [t.shape for t in (inputs.source_images[0][0], inputs.reference_images[0][0])] == [(3, 2, 2), (3, 6, 3)]
    assert (inputs.fps, inputs.iteration, inputs.group_ids.tolist(), inputs.sample_ids.tolist()) == (8.0, 9, [3], [77])


def test_wrong_tokens_are_refused() -> None:
    with running(reward_of(), token="s3cret") as server:
        assert server.post(body_of()).status_code == 401
        wrong = server.post(body_of(), Authorization="Bearer s3cre")
        assert (wrong.status_code, wrong.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert server.post(body_of(), Authorization="Basic s3cret").status_code == 401
        assert values(server.post(body_of(), Authorization="Bearer s3cret")) == [0.0]
        health, metrics, right = f"{server.url}/health", f"{server.url}/metrics", {"Authorization": "Bearer s3cret"}
        assert requests.get(health, timeout=10).json() == {"status": "ok"}  # for whoever keeps it running
        assert "rewards" in requests.get(health, headers=right, timeout=10).json()
        assert requests.get(health, headers={"Authorization": "Bearer x"}, timeout=10).status_code == 401
        assert requests.get(metrics, timeout=10).status_code == 401
        assert requests.get(metrics, headers=right, timeout=10).status_code == 200


def test_what_is_no_good_request_is_refused_with_its_status() -> None:
    cut = body_of()
    cut["items"][0]["images"][0] = cut["items"][0]["images"][0][:-5]
    half = body_of()
    file = base64.b64decode(half["items"][0]["images"][0])
    half["items"][0]["images"][0] = base64.b64encode(file[: len(file) // 2]).decode()
    as_json = {"Content-Type": "application/json"}
    big = json.dumps(body_of()).encode() + b" " * 20_000
    with running(reward_of(), max_bytes=10_000, max_pixels=150, max_items=3) as server:
        url = f"{server.url}/v1/score"
        cases: list[tuple[dict[str, Any], int, str]] = [
            ({"data": b'{"items": [', "headers": as_json}, 422, "bad_request"),
            ({"json": cut}, 422, "bad_request"),
            ({"json": half}, 422, "bad_request"),
            ({"json": body_of(reward="hps")}, 422, "unknown_reward"),
            ({"data": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "content_type"),
            ({"data": b"{}", "headers": {**as_json, "Content-Encoding": "gzip"}}, 415, "content_type"),
            ({"data": big, "headers": as_json}, 413, "too_many_bytes"),
            ({"data": iter([big[:9_000], big[9_000:]]), "headers": as_json}, 413, "too_many_bytes"),  # no length said
            ({"data": bytes(10**6), "headers": as_json}, 413, "too_many_bytes"),
            ({"json": body_of(4)}, 413, "too_many_items"),
            ({"json": body_of(size=(13, 12))}, 413, "too_many_pixels"),
        ]
        for given, status, word in cases:
            reply = requests.post(url, timeout=10, **given)
            assert (reply.status_code, reply.json()["error"]) == (status, word), word
        assert requests.get(url, timeout=10).status_code == 405
        assert values(server.post(body_of(3))) == [0.0, 1.0, 2.0]  # none of this did any harm
        assert server.service.bytes_held == 0


def test_a_body_that_comes_too_slowly_is_refused() -> None:
    def slow() -> Any:
        yield b"{"
        threading.Event().wait(0.5)
        yield b"}"

    with running(reward_of(), body_timeout=0.2) as server:
        reply = requests.post(
            f"{server.url}/v1/score", data=slow(), headers={"Content-Type": "application/json"}, timeout=10
        )
        assert (reply.status_code, reply.json()["error"]) == (408, "slow_body")


def test_items_of_many_clients_are_scored_in_one_batch() -> None:
    gate = Gate()
    with running(reward_of(gate), batch_size=8) as server, ThreadPoolExecutor(6) as clients:
        first = clients.submit(server.post, body_of(1, first=200))
        assert gate.entered.wait(5)
        others = [clients.submit(server.post, body_of(2, first=10 * i)) for i in range(5)]
        until(lambda: len(server.service.queues["level"]) == 10)
        gate.opened.set()
        assert values(first.result()) == [200.0]
        assert [values(other.result()) for other in others] == [[10.0 * i, 10.0 * i + 1] for i in range(5)]
    assert gate.batches == [1, 8, 2]


def test_only_items_of_one_size_are_stacked() -> None:
    gate = Gate()
    with running(reward_of(gate)) as server, ThreadPoolExecutor(5) as clients:
        jobs = [clients.submit(server.post, body_of(1, first=9))]
        assert gate.entered.wait(5)
        for i, side in enumerate((4, 5, 4, 5)):
            jobs.append(clients.submit(server.post, body_of(1, first=i, size=(side, 4))))
            until(lambda n=i: len(server.service.queues["level"]) == n + 1)  # type: ignore[misc]
        gate.opened.set()
        assert [values(job.result()) for job in jobs] == [[9.0], [0.0], [1.0], [2.0], [3.0]]
    assert gate.batches == [1, 2, 2]
    assert gate.levels == [9, 0, 2, 1, 3]


def test_groupwise_requests_stay_whole_and_alone() -> None:
    gate = Gate()
    with running(reward_of(gate, kind="groupwise"), batch_size=2) as server, ThreadPoolExecutor(3) as clients:
        jobs = [clients.submit(server.post, body_of(1))]
        assert gate.entered.wait(5)
        jobs += [clients.submit(server.post, body_of(size, first=50)) for size in (5, 3)]
        until(lambda: len(server.service.queues["level"]) == 8)
        gate.opened.set()
        assert [len(values(job.result())) for job in jobs] == [1, 5, 3]
    assert sorted(gate.batches) == [1, 3, 5]


def picky(inputs: RewardInputs) -> RewardOutput:
    """Raises for a batch with an odd number in it, and fails item 40 by itself."""
    if any(item["number"] % 2 for item in inputs.metadata):
        raise ValueError("an odd number in the metadata")
    dark = [level == 40 for level in level_of(inputs).values.tolist()]
    values = [None if is_dark else level for is_dark, level in zip(dark, level_of(inputs).values.tolist(), strict=True)]
    return output_of(values, inputs, errors=["too_dark" if is_dark else None for is_dark in dark])


def test_a_bad_item_harms_itself_alone() -> None:
    with running(reward_of(picky)) as server:
        items = server.post(body_of(5, first=38)).json()["items"]
        assert [item["value"] for item in items] == [38.0, None, None, None, 42.0]
        assert [item["error"] for item in items] == [None, "refused", "too_dark", "refused", None]
        assert items[1]["detail"] == "ValueError: an odd number in the metadata"
        assert metric(server, "item_failures_total") == 3


@pytest.mark.parametrize(
    ("score", "word"),
    [(lambda inputs: 1 / 0, "exception"), (lambda inputs: sys.exit(3), "exception"), (lambda inputs: 0.5, "refused")],
)
def test_an_error_in_a_reward_does_not_end_the_server(score: Callable[[RewardInputs], Any], word: str) -> None:
    with running({"bad": reward_of(score), "good": reward_of()}) as server:
        item = server.post(body_of(reward="bad")).json()["items"][0]
        assert (item["value"], item["error"]) == (None, word)
        assert values(server.post(body_of(reward="good"))) == [0.0]
        assert server.post(body_of(reward=None)).json()["detail"] == "reward must be one of bad, good, got None."


def test_a_full_queue_refuses_and_recovers() -> None:
    gate = Gate()
    with running(reward_of(gate), queue_size=3) as server, ThreadPoolExecutor(2) as clients:
        jobs = [clients.submit(server.post, body_of())]
        assert gate.entered.wait(5)
        jobs.append(clients.submit(server.post, body_of(4)))  # let in whole: there was room for its first item
        until(lambda: len(server.service.queues["level"]) == 4)
        refused = server.post(body_of())
        assert (refused.status_code, refused.json()["error"]) == (429, "queue_full")
        assert int(refused.headers["Retry-After"]) >= 1
        gate.opened.set()
        assert [len(values(job.result())) for job in jobs] == [1, 4]
        assert values(server.post(body_of())) == [0.0]


CLIENT = """
import socket, sys, time
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
body = open(sys.argv[2], "rb").read()
lines = ["POST /v1/score HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
lines += [f"Content-Length: {len(body)}", "", ""]
connection.sendall("\\r\\n".join(lines).encode() + body[: int(float(sys.argv[3]) * len(body))])
print("sent", flush=True)
time.sleep(60)
"""


def test_killed_clients_do_not_disturb_the_others(tmp_path: Path) -> None:
    """kill -9 in the middle of a body, and while waiting for scores that are then not computed at all."""
    gate = Gate()
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body_of(1, first=66)))
    with running(reward_of(gate)) as server, ThreadPoolExecutor(2) as clients:
        first = clients.submit(server.post, body_of(1, first=1))
        assert gate.entered.wait(5)
        second = clients.submit(server.post, body_of(2, first=20))
        port = server.url.rpartition(":")[2]
        victims = [
            subprocess.Popen([sys.executable, "-c", CLIENT, port, str(file), share], stdout=subprocess.PIPE)
            for share in ("0.5", "1.0")
        ]
        for victim in victims:
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"sent\n"
        until(lambda: len(server.service.queues["level"]) == 3 and server.service.active == 4)
        for victim in victims:
            victim.kill()
            victim.communicate()
        waiting = server.service.queues["level"]._entries  # a request ends a moment before its entry is given up
        until(lambda: server.service.active == 2 and [job.future.cancelled() for job, _ in waiting].count(True) == 1)
        gate.opened.set()
        assert values(first.result()) == [1.0]
        assert values(second.result()) == [20.0, 21.0]
        assert values(server.post(body_of(1, first=5))) == [5.0]
        assert metric(server, 'requests_total{reward="",status="499"}') == 1
        assert metric(server, 'requests_total{reward="level",status="499"}') == 1
    assert 66 not in gate.levels


def test_a_graceful_stop_finishes_what_is_queued_and_refuses_new() -> None:
    gate = Gate()
    with running(reward_of(gate), batch_size=1) as server, ThreadPoolExecutor(1) as clients:
        taken = clients.submit(server.post, body_of(3))
        assert gate.entered.wait(5)
        server.service.stop()
        refused = server.post(body_of())
        assert (refused.status_code, refused.json()["error"]) == (503, "stopping")
        assert int(refused.headers["Retry-After"]) >= 1
        health = requests.get(f"{server.url}/health", timeout=10)
        assert (health.status_code, health.json()["status"]) == (503, "stopping")
        gate.opened.set()
        assert values(taken.result()) == [0.0, 1.0, 2.0]
        server.thread.join(5)
        assert not server.thread.is_alive()
        with pytest.raises(requests.ConnectionError):
            server.post(body_of())


@pytest.mark.slow
def test_what_takes_longer_than_the_grace_is_answered_503() -> None:
    gate = Gate()
    with running(reward_of(gate), grace=0.2) as server, ThreadPoolExecutor(1) as clients:
        taken = clients.submit(server.post, body_of())
        assert gate.entered.wait(5)
        server.service.stop()
        assert taken.result().status_code == 503
        gate.opened.set()


def test_health_and_metrics_say_what_goes_on() -> None:
    with running({"a": reward_of(), "b": reward_of(kind="groupwise")}, max_items=9) as server:
        health = requests.get(f"{server.url}/health", timeout=10).json()
        about = {"version": "level:1", "needs": ["images", "metadata", "prompts"], "queue": 0}
        assert health["rewards"] == {"a": {**about, "kind": "pointwise"}, "b": {**about, "kind": "groupwise"}}
        assert health["limits"]["max_items"] == 9
        for size in (1, 3):
            server.post(body_of(size, reward="a"))
        server.post(body_of(reward="nobody"))
        reply = requests.get(f"{server.url}/metrics", timeout=10)
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = reply.text.splitlines()
    for line in (
        'flowrl_requests_total{reward="a",status="200"} 2.0', 'flowrl_requests_total{reward="",status="422"} 1.0',
        'flowrl_items_total{reward="a"} 4.0', 'flowrl_batches_total{reward="a"} 2.0',
        'flowrl_queue_items{reward="b"} 0.0', 'flowrl_request_seconds_count{reward="a"} 2.0',
        'flowrl_request_seconds_bucket{le="+Inf",reward="a"} 2.0',
        "# TYPE flowrl_request_seconds histogram",
    ):  # fmt: skip
        assert line in lines
    buckets = [float(line.split()[-1]) for line in lines if line.startswith('flowrl_request_seconds_bucket{le="')]
    assert buckets == sorted(buckets)


def test_addresses_that_others_reach_are_refused_without_a_token() -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="can be reached from other machines, and the server has no token"):
            open_socket(host, 0, has_token=False)
    open_socket("0.0.0.0", 0, has_token=True).close()
    with open_socket("localhost", 0, has_token=False) as taken:
        taken.listen()
        with pytest.raises(ValueError, match=r"cannot serve at localhost:\d+ \(Address already in use\): give another"):
            open_socket("localhost", taken.getsockname()[1], has_token=False)
    with pytest.raises(ValueError, match=r"cannot serve at no\.such\.host\.invalid:1"):
        open_socket("no.such.host.invalid", 1, has_token=False)
    with pytest.raises(ValueError, match=r"a port lies in 0 \.\. 65535, got 70000"):
        open_socket("127.0.0.1", 70_000, has_token=False)


def test_what_cannot_be_served_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {}, "at least one reward"),
        ({"a": reward_of(kind="adversarial")}, {}, "trained jointly with the policy"),
        ({"a": reward_of()}, {"token": " "}, "the token is empty"),
    ]
    for rewards, options, message in cases:
        with pytest.raises(ValueError, match=message):
            make_app(rewards, **options)
    for limits, message in (
        ({"queue_size": 0}, "queue_size must be at least 1"),
        ({"max_pixels": 0}, "max_pixels must be at least 1"),
        ({"body_timeout": 0.0}, "body_timeout must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Limits(**limits)
    monkeypatch.setitem(sys.modules, "python_multipart", None)
    with pytest.raises(ValueError, match=r"needs python_multipart .* pip install -e '\.\[serve\]'"):
        make_app({"a": reward_of()})


def test_the_command_serves_a_configuration_until_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "rewards: [{name: jpeg_incompressibility, weight: 0}, {name: jpeg_incompressibility, clip: [0, 1]}]"
    )
    monkeypatch.setenv("REWARD_TOKEN", "abc")
    with open_socket(port=0, has_token=False) as free:
        port = free.getsockname()[1]
    seen: list[Any] = []

    def client() -> None:
        right = {"Authorization": "Bearer abc"}
        try:
            until(lambda: _answers(f"http://127.0.0.1:{port}/health"), 60)
            seen.append(requests.get(f"http://127.0.0.1:{port}/health", headers=right, timeout=10).json())
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=client)
    thread.start()
    flags = ["--port", str(port), "--token-env", "REWARD_TOKEN", "--device", "cpu", "--threads", "1"]
    assert cli.main(["serve", str(file), *flags]) == 0
    thread.join()
    assert list(seen[0]["rewards"]) == ["jpeg_incompressibility", "jpeg_incompressibility_2"]
    printed = capsys.readouterr().out
    assert f"Serving at http://127.0.0.1:{port} after" in printed
    assert "jpeg_incompressibility (pointwise; needs images): jpeg_incompressibility:ddpo" in printed
    assert "reward: jpeg_incompressibility, token_env: REWARD_TOKEN" in printed
    assert printed.endswith("Stopped.\n")


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=1).ok
    except requests.ConnectionError:
        return False


def test_the_command_refuses_what_it_cannot_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none.yaml").write_text("seed: 3")
    cases = [
        (["jpeg_compresibility"], r"unknown reward 'jpeg_compresibility' \(did you mean 'jpeg_compressibility'\?\)"),
        (["ocr", "my.yaml"], "unknown reward 'my.yaml'.*must stand alone"),
        (["no/such.yaml"], "there is no configuration 'no/such.yaml'"),
        ([str(tmp_path / "none.yaml")], "rewards must be a list with entries"),
    ]
    for names, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_list(names)
    assert reward_list(["tiny_grpo_geneval"])[0]["name"] == "geneval"
    monkeypatch.delenv("NOT_THERE", raising=False)
    with pytest.raises(ValueError, match="environment variable NOT_THERE is not set"):
        flowrl.serve("ocr", token_env="NOT_THERE")
    with open_socket(port=0, has_token=False) as taken:
        taken.listen()
        with pytest.raises(ValueError, match="Address already in use"):
            flowrl.serve("jpeg_compressibility", threads=1, port=taken.getsockname()[1])
