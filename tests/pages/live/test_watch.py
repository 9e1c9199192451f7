"""The page of `flowrl watch`: who is answered, what is read while it is written, what is never followed."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from flowrl.cli import main
from flowrl.media.images import save_png
from flowrl.pages.live.followed_runs import Followed, Watched
from flowrl.pages.live.run_view import commands, log_lines, state
from flowrl.pages.live.watch import SCRIPT, make_server, watch
from flowrl.runs.run_data import read_run
from flowrl.runtime.files import LOCK, at_work

PROMPT = '<script>alert("x")</script> & a red circle'


def row(iteration: int, **more: Any) -> str:
    values = {"iteration": iteration, "reward": 0.1 * iteration, "ratio_mean": 1.0, "kl": 1e-4, "clip_fraction": 0.05}
    values |= {"zero_std_ratio": 0.2, "seconds": 2.0, "memory/peak_gib": 17.5, "reward_error": 0.01}
    return json.dumps(values | more) + "\n"


def write_run(folder: Path, iterations: int = 12) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("recipe: grpo\nnum_iterations: 40\nprompts_per_step: 4\n")
    (folder / "manifest.json").write_text("{}")
    evaluation = {"iteration": 0, "eval/reward/sharp": 0.4, "eval/reward/sharp_low": 0.3, "eval/reward/sharp_high": 0.5}
    warned = {"warnings": {"collapse": "images <b>differ</b> by nothing"}}
    lines = [json.dumps(evaluation) + "\n", *(row(k, **(warned if k == 5 else {})) for k in range(iterations))]
    (folder / "metrics.jsonl").write_text("".join(lines))
    for iteration in (0, 10):
        for number in range(2):
            save_png(
                torch.full((3, 8, 8), 0.1), folder / "samples" / f"iteration_{iteration:06d}" / f"{number:04d}.png"
            )
    prompts = [{"prompt": PROMPT, "seed": 7}, {"prompt": "a cube", "seed": 8}]
    (folder / "samples" / "prompts.json").write_text(json.dumps(prompts))
    return folder


def followed(folder: Path) -> Followed:
    return Followed(folder=folder, name=folder.name, number=0)


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_what_is_read_in_pieces_is_what_a_report_reads_at_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    whole = (folder / "metrics.jsonl").read_bytes() + b"no json\n" + row(12, name="gr\u00fcn").encode()
    one = followed(folder)
    for end in range(0, len(whole) + 1, 37):  # also in the middle of lines and of characters
        with (folder / "metrics.jsonl").open("r+b") as file:
            file.write(whole[:end])
            file.truncate()
        one.refresh()
        assert len(one.rows) + one.broken == whole[:end].count(b"\n")
    (folder / "metrics.jsonl").write_bytes(whole)
    one = followed(folder)
    one.refresh()
    assert one.run() == read_run(folder)
    assert one.broken == 1


def test_a_torn_row_is_not_shown_until_it_is_whole(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", iterations=2)
    one, line = followed(folder), row(2)
    one.refresh()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line[:30])
        file.flush()
        one.refresh()
        assert (len(one.run().train), one.broken) == (2, 0)
        file.write(line[30:])
    one.refresh()
    assert [row["iteration"] for row in one.run().train] == [0, 1, 2]


def test_a_run_that_was_continued_is_read_again_from_its_start(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", iterations=9)
    one = followed(folder)
    one.refresh()
    before = one.generation
    replaced = tmp_path / "new"
    replaced.write_text(row(0) + row(1))
    os.replace(replaced, folder / "metrics.jsonl")
    one.refresh()
    assert one.generation == before + 1
    assert len(one.rows) == 2
    (folder / "metrics.jsonl").write_text(row(0))  # shorter, in place
    one.refresh()
    assert len(one.rows) == 1


def test_runs_are_found_below_a_folder_and_keep_their_numbers(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "b" / "arm-1")
    write_run(tmp_path / "outside" / "z")
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "outside")
    watched = Watched(given=[tmp_path / "runs"])
    assert [run.name for run in watched.look()] == ["b/arm-1"]
    write_run(tmp_path / "runs" / "a")
    assert [(run.name, run.number) for run in watched.look()] == [("b/arm-1", 0), ("a", 1)]


def test_state_says_who_is_at_work_and_what_to_type(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a run")
    one = followed(folder)
    one.refresh()
    assert state(one, one.run()) == ("stopped", "")
    assert commands(one)[0][1] == f"flowrl train resume='{folder}'"
    lock = {"pid": os.getpid(), "host": socket.gethostname(), "command": "flowrl train"}
    (folder / LOCK).write_text(json.dumps(lock))
    assert state(one, one.run()) == ("running", "good")
    assert commands(one)[0][1] == f"kill -INT {os.getpid()}"
    (folder / LOCK).write_text(json.dumps(lock | {"host": "node-7"}))
    assert state(one, one.run())[0] == "running on node-7"
    assert commands(one)[0][1] == f"ssh node-7 kill -INT {os.getpid()}"
    os.utime(folder / "metrics.jsonl", (1, 1))
    assert "silent" in state(one, one.run())[0]
    ended = subprocess.Popen(["true"])
    ended.wait()
    (folder / LOCK).write_text(json.dumps(lock | {"pid": ended.pid}))
    assert at_work(folder) is None
    (folder / LOCK).write_text("")
    (folder / "manifest.json").write_text(json.dumps({"error": "out of memory", "failed": "now"}))
    one.refresh()
    assert state(one, one.run()) == ("! stopped by an error", "bad")
    (folder / "summary.json").write_text("{}")
    one.refresh()
    assert state(one, one.run()) == ("✓ finished", "")


def test_log_lines_say_warnings_below_their_row() -> None:
    lines = log_lines(
        [{"iteration": 3, "reward": 0.5, "kl": None, "seconds": 61, "warnings": {"collapse": "all alike"}}]
    )
    assert lines == ["iteration 3  reward 0.5000  kl None  1 min 1 s", "  ! collapse: all alike"]


# ---- serving ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a page over two runs, and their folder."""
    runs = tmp_path_factory.mktemp("watched")
    write_run(runs / "a")
    write_run(runs / "b", iterations=20)
    server, address, bound = make_server(Watched(given=[runs]), 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    yield address, runs
    server.should_exit = True
    thread.join(10)
    bound.close()


def test_the_page_lists_runs_and_says_what_is_new(served: tuple[str, Path]) -> None:
    address, runs = served
    page = requests.get(address, timeout=10)
    assert "script-src 'self'" in page.text
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["referrer-policy"] == "no-referrer"
    found = requests.get(f"{address}list", timeout=10).json()
    assert found["names"] == {"0": "a", "1": "b"}
    assert found["html"].count("! collapse") == 2
    assert requests.get(f"{address}list?since={found['mark']}", timeout=10).status_code == 204
    seen = requests.get(f"{address}run/1", timeout=10).json()
    for text in ("Training reward", "Importance ratio", "Clip fraction", "Groups without contrast", "17.500 GiB"):
        assert text in seen["view"]
    assert "<b>differ</b>" not in seen["view"]
    log = requests.get(f"{address}log/1", timeout=10).json()
    with (runs / "b" / "metrics.jsonl").open("a") as file:
        file.write(row(20))
    assert requests.get(f"{address}run/1?since={seen['mark']}", timeout=10).status_code == 200
    more = requests.get(f"{address}log/1?mark={log['mark']}", timeout=10).json()
    assert (len(more["lines"]), more["again"]) == (1, False)
    assert more["lines"][0].startswith("iteration 20 ")


def test_two_runs_share_charts_and_samples_come_by_iteration(served: tuple[str, Path]) -> None:
    address, runs = served
    pair = requests.get(f"{address}pair/0/1", timeout=10).json()
    assert "Last values" in pair["view"]
    assert "Evaluation: sharp" in pair["view"]
    assert "a: Continue" in pair["commands"]
    samples = requests.get(f"{address}samples/0", timeout=10).json()
    assert samples["prompts"][0] == {"prompt": PROMPT, "seed": "7"}
    assert samples["iterations"] == {"0": ["0000.png", "0001.png"], "10": ["0000.png", "0001.png"]}
    image = requests.get(f"{address}sample/0/10/0001.png", timeout=10)
    assert image.content == (runs / "a" / "samples" / "iteration_000010" / "0001.png").read_bytes()


def test_nobody_else_is_answered_and_nothing_is_written(served: tuple[str, Path]) -> None:
    address, runs = served
    root = address.rsplit("/", 2)[0]
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    for wrong in (f"{root}/", f"{root}/list", f"{root}/wrong/list", f"{address[:-2]}/list", f"{root}/\u00e9/list"):
        assert requests.get(wrong, timeout=10).status_code == 404, wrong
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert requests.request(method, f"{address}list", timeout=10).status_code == 405
    assert requests.get(address, headers={"Host": "evil.example"}, timeout=10).status_code == 400
    assert requests.get(f"{address}run/9", timeout=10).status_code == 409
    for path in ("run/0", "pair/0/1", "log/0", "samples/0", "list"):
        requests.get(f"{address}{path}", timeout=10).raise_for_status()
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_malformed_requests_are_refused_in_words(served: tuple[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    address, _ = served
    port = int(address.split(":")[2].partition("/")[0])
    token = address.rsplit("/", 2)[1]

    def status(target: str, host: str = "127.0.0.1") -> int:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("latin-1"))
            return int(connection.recv(65536).split()[1])

    for host in ("[::1", "a]b", "[", "127.0.0.1:999999999", "localhost@evil.example", "::1", "evil.example", ""):
        assert status(f"/{token}/", host) == 400, host
    digits = "9" * 5000
    for path in (
        f"run/{digits}",
        f"pair/0/{digits}",
        f"log/{digits}",
        f"samples/{digits}",
        f"sample/0/{digits}/0000.png",
    ):
        assert status(f"/{token}/{path}") == 400
    for path in (
        "run/0?since=" + digits,
        f"log/0?mark={digits}-{digits}",
        "sample/0/10/%00",
        "run/%ff",
        "run/-1",
        "run/1e9",
    ):
        assert 200 <= status(f"/{token}/{path}") < 500, path
    assert status("/favicon.ico") == 204
    assert "Traceback" not in "".join(capfd.readouterr())


def test_the_page_opens_on_the_run_that_was_written_last(served: tuple[str, Path]) -> None:
    address, runs = served
    shown = requests.get(f"{address}list", timeout=10).json()
    newest = max(shown["names"].items(), key=lambda item: (runs / item[1] / "metrics.jsonl").stat().st_mtime_ns)
    assert shown["newest"] == newest[0]


@pytest.mark.parametrize(
    "name", ["..%2f..%2fprompts.json", "%2e%2e/prompts.json", "prompts.json", "0009.png", "0000.pt"]
)
def test_only_samples_are_handed_out(served: tuple[str, Path], name: str) -> None:
    assert requests.get(f"{served[0]}sample/0/10/{name}", timeout=10).status_code == 404


@pytest.mark.parametrize(
    "part", ["metrics.jsonl", "samples", "samples/prompts.json", "error.log", "samples/iteration_000000"]
)
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, part: str) -> None:
    folder, outside = write_run(tmp_path / "run"), write_run(tmp_path / "outside")
    (outside / "error.log").write_text("secret")
    target = folder / part
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    target.symlink_to(outside / part)
    with pytest.raises(ValueError, match=f"{part} is a link out of the run folder"):
        followed(folder).refresh()


def test_a_linked_sample_is_not_handed_out(served: tuple[str, Path], tmp_path: Path) -> None:
    address, runs = served
    (tmp_path / "0000.png").write_bytes(b"secret")
    link = runs / "b" / "samples" / "iteration_000010" / "0005.png"
    link.symlink_to(tmp_path / "0000.png")
    assert requests.get(f"{address}sample/1/10/0005.png", timeout=10).status_code == 404
    link.unlink()


def test_the_address_stands_alone_to_be_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terminals take a sign that touches an address for a part of it, and the page of that is a 404."""
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: None)
    watch([write_run(tmp_path / "run")], port=0)
    (address,) = (line for line in capsys.readouterr().out.splitlines() if "http://" in line)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]+/", address)


def test_refusals_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "none")]) == 1
    assert "is not a folder: give run folders" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["watch", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 1
    assert "give another --port" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to read the script")
def test_the_script_is_javascript(tmp_path: Path) -> None:
    (tmp_path / "page.js").write_text(SCRIPT.read_text())
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True)
