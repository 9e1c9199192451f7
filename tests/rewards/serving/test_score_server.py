"""The file that serves a function of another project, in a Python where flowrl cannot be imported."""

from __future__ import annotations

import ast
import base64
import importlib.util
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from PIL import Image, ImageOps
from reward_servers import body_of, noise, samples

from flowrl.media.reading import as_rgb
from flowrl.rewards import RewardInputs, build_reward
from flowrl.rewards.serving import score_server

SCORES = """
import time

try:
    import flowrl
except ImportError:
    flowrl = None

def score(images, prompts, metadata):
    assert flowrl is None
    if "slow" in prompts[0]:
        time.sleep(1.0)
    if any("bad" in prompt for prompt in prompts):
        raise RuntimeError("cannot score that")
    return {"level": [image.getpixel((0, 0))[0] for image in images],
            "length": [len(prompt) if prompt != "image 2" else float("nan") for prompt in prompts]}

def arrays(images, prompts, metadata):
    return images.mean((1, 2, 3)), {}

def frames(images, prompts, metadata):
    return [sum(frame.getpixel((0, 0))[0] for frame in video) if len(video) > 1 else None for video in images]

def wrong(images, prompts, metadata):
    return [1.0]
"""


def command(folder: Path, *arguments: str) -> list[str]:
    """The file as it is copied, in a Python without installed packages but Pillow and numpy."""
    (folder / "scores.py").write_text(SCORES)
    copied = folder / "copied.py"
    copied.write_bytes(Path(score_server.__file__).read_bytes())
    site = folder / "site"
    site.mkdir(exist_ok=True)
    for package in ("PIL", "numpy"):
        found = importlib.util.find_spec(package)
        assert found is not None
        assert found.origin is not None
        at = Path(found.origin).parent
        for one in (at, at.parent / f"{package.lower().replace('pil', 'pillow')}.libs"):
            if one.is_dir() and not (site / one.name).exists():
                (site / one.name).symlink_to(one)
    return [sys.executable, "-S", str(copied), *arguments]


def served(folder: Path, *arguments: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        command(folder, *arguments, "--port", "0", "--until-stdin-ends"), text=True, cwd=folder,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder / "site"), **environment},
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://[\d.:]+", line)
    assert found, (line, process.communicate())
    return process, found[0]


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("scorer")
    process, url = served(folder, "scores.py", "--name", "level", "--token-env", "T", T="secret")
    try:
        yield url
    finally:
        assert process.stdin is not None
        process.stdin.close()  # as when the program that started it ends
        assert process.wait(10) == 0
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "secret")


def far(url: str, **options: Any) -> Any:
    return build_reward("remote", options={"url": url, "token_env": "SCORER_TOKEN", **options})


def test_remote_asks_it_as_it_asks_a_server_of_flowrl(scorer: str) -> None:
    reward = far(scorer, batch_size=5)
    assert re.fullmatch(r"remote:flowrl:level:level:[0-9a-f]{12}:png-8bit", reward.version)
    output = reward(samples(12))
    assert output.values.tolist() == [float(i) for i in range(12)]
    assert output.parts["length"][0] == 7
    assert output.parts["length"][2].isnan()
    inputs = samples(3)
    bad = RewardInputs(
        prompts=["a", "bad", "c"], images=inputs.images, metadata=inputs.metadata, group_ids=inputs.group_ids,
        sample_ids=inputs.sample_ids,
    )  # fmt: skip
    output = reward(bad)
    assert output.valid.tolist() == [True, False, True]
    assert output.errors == {"exception": 1}


def test_it_reads_base64_too_and_refuses_in_words(scorer: str) -> None:
    headers = {"Authorization": "Bearer secret"}

    def post(body: Any, **more: Any) -> requests.Response:
        given = {"json": body, "headers": headers, "timeout": 10, **more}
        return requests.post(f"{scorer}/v1/score", **given)

    reply = post(body_of(3))
    assert [item["value"] for item in reply.json()["items"]] == [0.0, 1.0, 2.0]
    twice = body_of(2)
    twice["items"][1]["id"] = 0
    cut = body_of()
    cut["items"][0]["images"] = ["AAAA"]
    for body, status, word in [
        ({}, 422, "bad_request"),
        (twice, 422, "bad_request"),
        (cut, 422, "bad_request"),
        (body_of(reward="hps"), 422, "unknown_reward"),
        ({**body_of(), "reward": ["level"]}, 422, "unknown_reward"),
        ({**body_of(), "items": [{**body_of()["items"][0], "metadata": [1]}]}, 422, "bad_request"),
        (body_of(257), 413, "too_many_items"),
        ({**body_of(), "schema": 2}, 422, "bad_request"),
    ]:
        reply = post(body)
        assert (reply.status_code, reply.json()["error"]) == (status, word)
    assert post({**body_of(), "reward": None}).status_code == 200
    assert post(body_of(), headers={}).status_code == 401
    assert requests.get(f"{scorer}/health", timeout=10).json() == {"status": "ok"}
    assert requests.get(f"{scorer}/metrics", timeout=10).status_code == 404
    huge = post(None, data=b"x" * (64 * 2**20 + 1), headers={**headers, "Content-Type": "application/json"})
    assert (huge.status_code, huge.json()["error"]) == (413, "too_many_bytes")


@pytest.mark.slow
def test_arrays_videos_a_full_queue_and_silent_connections(tmp_path: Path) -> None:
    process, url = served(tmp_path, "scores.py:arrays", "--images", "numpy")
    with process:
        output = build_reward("remote", options={"url": url})(samples(4, first=7))
        assert output.values.tolist() == [7.0, 8.0, 9.0, 10.0]
        process.terminate()
    process, url = served(tmp_path, "scores.py:frames", "--needs", "videos,prompts")
    with process:
        base = samples(2)
        videos = torch.stack([base.images, base.images], dim=1)
        inputs = RewardInputs(
            prompts=base.prompts, images=base.images, metadata=base.metadata, group_ids=base.group_ids,
            sample_ids=base.sample_ids, videos=videos, fps=8.0,
        )  # fmt: skip
        assert build_reward("remote", options={"url": url})(inputs).values.tolist() == [0.0, 2.0]
        process.terminate()
    process, url = served(tmp_path, "scores.py:wrong", "--queue-size", "1", "--name", "scores")
    with process:
        assert build_reward("remote", options={"url": url, "batch_size": 2, "deadline": 20})(samples(6)).valid.all()
        process.terminate()


def test_connections_that_dawdle_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_server, "HEADER_SECONDS", 0.3)
    scorer = score_server.ServedScorer("a", "a:1", len, "bytes", [], 1, 1, 100, 1, 1, None)
    server = score_server.ScoreServer(("127.0.0.1", 0), scorer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        head, body = (socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(2))
        begun = time.monotonic()
        head.sendall(b"POST /v1/score HTTP/1.1\r\n")
        body.sendall(b"POST /v1/score HTTP/1.1\r\nContent-Length: 50\r\n\r\n{")
        for one in (head, body):
            one.settimeout(10)
            while one.recv(1000):
                pass
            one.close()
        assert time.monotonic() - begun < 5
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_bodies_are_kept_for_who_has_the_token_and_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    reply = score_server.Handler.reply

    def spied(handler: score_server.Handler, status: int, body: Any) -> None:
        seen.append(handler.server.active)
        reply(handler, status, body)

    monkeypatch.setattr(score_server.Handler, "reply", spied)
    scorer = score_server.ServedScorer("a", "a:1", len, "bytes", [], 1, 1, 100, 1, 1, "secret")
    server = score_server.ScoreServer(("127.0.0.1", 0), scorer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()

    def begun(token: str) -> socket.socket:
        one = socket.create_connection(("127.0.0.1", server.server_port), timeout=10)
        one.sendall(
            f"POST /v1/score HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: 90\r\n\r\n{{".encode()
        )
        return one

    def until(active: int, held: int) -> None:
        end = time.monotonic() + 10
        while (server.active, server.held) != (active, held):
            assert time.monotonic() < end, (server.active, server.held)
            time.sleep(0.01)

    try:
        strangers = [begun("guess") for _ in range(3)]
        until(3, 0)
        known = [begun("secret") for _ in range(8)]
        until(11, 720)
        known.append(begun("secret"))
        until(12, 720)  # a ninth would be 810 of 800 bytes
        for one, status in [(known[8], b"429"), (strangers[0], b"401"), (known[0], b"422")]:
            one.sendall(b"x" * 89)
            assert one.recv(1000).split()[1] == status
        until(9, 630)
        assert min(seen) >= 10  # a request counts until its reply is written: a server that stops waits for that
        for one in strangers + known:
            one.close()
        until(0, 0)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_images_are_turned_and_laid_on_white_as_flowrl_serve_does() -> None:
    scorer = score_server.ServedScorer("a", "a:1", len, "numpy", [], 1, 1, 100, 1000, 1, None)
    levels = noise(4, 6, 4)
    palette = Image.fromarray(levels[..., 0]).convert("P")
    wide = Image.fromarray((levels[..., 0].astype(np.uint16) << 8) | levels[..., 1])
    exif = Image.Exif()
    exif[0x0112] = 6
    cases: list[tuple[Image.Image, dict[str, Any]]] = [
        (Image.fromarray(levels), {}),
        (Image.fromarray(levels), {"exif": exif}),
        (palette, {"transparency": int(levels[0, 0, 0])}),
        (wide, {}),
    ]
    for image, options in cases:
        file = io.BytesIO()
        image.save(file, "PNG", **options)
        found = score_server.decode_image(file.getvalue(), [1000], scorer)
        with Image.open(io.BytesIO(file.getvalue())) as opened:
            wanted = np.asarray(as_rgb(ImageOps.exif_transpose(opened)))
        assert np.array_equal(found, wanted)
        assert found.shape == ((6, 4, 3) if options.get("exif") else (4, 6, 3))


def test_it_is_written_for_python_3_8_and_its_own_library() -> None:
    tree = ast.parse(Path(score_server.__file__).read_text(), feature_version=(3, 8))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"PIL", "numpy"}


def test_what_it_refuses_to_start_with(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import not_there_at_all\n")
    for arguments, message in [
        (["nothing.py"], "there is no file nothing.py"),
        (["broken.py"], "broken.py cannot be imported: ModuleNotFoundError: No module named 'not_there_at_all'"),
        (["scores.py:level"], "scores.py has no function level"),
        (["scores.py", "--token-env", "NOT_SET"], "the environment variable NOT_SET is not set"),
        (["scores.py", "--needs", "images, masks"], "needs must be of images, prompts, "),
        (["scores.py", "--host", "0.0.0.0"], "name a variable with a token"),
    ]:
        done = subprocess.run(
            command(tmp_path, *arguments), cwd=tmp_path, text=True, capture_output=True, timeout=60, check=False,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "site")},
        )  # fmt: skip
        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1]


def test_counts_of_small_things_are_bounded() -> None:
    scorer = score_server.ServedScorer("a", "a:1", len, "bytes", [], 1, 9, 100, 1, 1, None, max_images=3)
    image = base64.b64encode(b"x").decode()
    item = {"id": 0, "prompt": "p", "images": [image], "source_images": [image] * 2}
    plain, parts = "application/json", "multipart/form-data; boundary=b"
    assert len(score_server.decode(json.dumps({"items": [item]}).encode(), plain, scorer)) == 1
    for body, kind, said in [
        (json.dumps({"items": [{**item, "reference_images": [image]}]}).encode(), plain, "may hold 3 images"),
        (b'{"items": [' + b"[]," * 1_000_001 + b"[]]}", plain, "1000000 values"),
        (b"--b" * 200_000, parts, "no part named request"),
        (b"\r\n--b" * 200_000, parts, "too many parts"),
    ]:
        with pytest.raises(score_server.Refused, match=said):
            score_server.decode(body, kind, scorer)
