"""Published prompt sets are fetched from a hub and a server on this machine."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fake_hub import Repository, serve_hub

import flowrl
from flowrl.config.prompt_sets import PROMPT_SETS, PublishedFile
from flowrl.migrating import prompt_sets

LINES = b"a cat\n\na dog\na horse\n"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """Path -> what the server has there."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = files.get(self.path)
            self.send_response(404 if data is None else 200)
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *args: object) -> None:
            del args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(prompt_sets, "RAW", f"http://127.0.0.1:{server.server_port}")
    yield files
    server.shutdown()
    thread.join()
    server.server_close()


def put(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], data: bytes = LINES, **fields: object) -> None:
    """Makes `toy` a set of one file that the server has."""
    published = replace(PublishedFile(path="sets/train.txt"), **fields)  # type: ignore[arg-type]
    found = replace(PROMPT_SETS["pickscore"], publisher="me/toy", revision="abc", files={"toy_train.txt": published})
    monkeypatch.setitem(PROMPT_SETS, "toy", found)
    files["/me/toy/abc/sets/train.txt"] = data


def test_lines_of_a_commit_become_prompts(
    served: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(monkeypatch, served, sha256=hashlib.sha256(LINES).hexdigest(), first=2)
    fetched = flowrl.fetch_prompts("toy", out=tmp_path / "data")
    assert fetched.files == {tmp_path / "data" / "toy_train.txt": 2}
    assert (tmp_path / "data" / "toy_train.txt").read_text() == "a cat\na dog\n"


def test_a_file_that_is_there_stays(served: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(monkeypatch, served)
    (tmp_path / "toy_train.txt").write_text("mine\n")
    fetched = flowrl.fetch_prompts("toy", out=tmp_path)
    assert (fetched.files, fetched.kept) == ({}, (tmp_path / "toy_train.txt",))
    assert (tmp_path / "toy_train.txt").read_text() == "mine\n"


def test_another_file_than_the_published_one_is_refused(
    served: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(monkeypatch, served, sha256="0" * 64)
    with pytest.raises(flowrl.FlowrlError, match="not the published file"):
        flowrl.fetch_prompts("toy", out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_place_without_the_file_is_told(
    served: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(monkeypatch, served)
    served.clear()
    with pytest.raises(flowrl.FlowrlError, match=r"me/toy/sets/train.txt cannot .*404.*flowrl data list toy"):
        flowrl.fetch_prompts("toy", out=tmp_path)


def test_texts_of_a_hub_dataset_come_once_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in ("a cat", "a  dog\n", "a cat", "")]
    files = {"train.json": rows, "test.json": rows[:1]}
    with serve_hub(monkeypatch, tmp_path / "cache", {"datasets/ymhao/HPDv2": Repository(small=files)}) as hub:
        fetched = flowrl.fetch_prompts("hpd", out=tmp_path / "data")
    assert list(fetched.files.values()) == [2, 1]
    assert (tmp_path / "data" / "hpd_train.txt").read_text() == "a cat\na dog\n"
    assert hub.files() == {"datasets/ymhao/HPDv2 train.json", "datasets/ymhao/HPDv2 test.json"}
    with serve_hub(monkeypatch, tmp_path / "other", {}), pytest.raises(flowrl.FlowrlError, match="cannot be fetched"):
        flowrl.fetch_prompts("hpd", out=tmp_path / "more")


def test_a_set_that_nobody_may_fetch_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(flowrl.FlowrlError, match=r"nothing fetches it from X-GenGroup/PaCo-RL\. The files are"):
        flowrl.fetch_prompts("t2is", out=tmp_path / "data")
    with pytest.raises(flowrl.FlowrlError, match="did you mean 'pickscore'"):
        flowrl.fetch_prompts("pickscores")
    assert not list(tmp_path.iterdir())
