"""What is said where Ray cannot be reached; runs on Ray are tested in `tests/workers/`."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import flowrl.cluster
from flowrl.cluster import check_extra, connect, disconnect


def test_nobody_at_an_address_is_said_at_once() -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match=rf"workers\.address=127\.0\.0\.1:{port}: nobody answers.*ray start --head"):
        connect(f"127.0.0.1:{port}", workers=1)
    disconnect()  # without a connection it does nothing


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_another_server_at_an_address_is_said_at_once(answer: bytes) -> None:
    """Ray would ask it for minutes, with lines of its C++ parts."""
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            with server.accept()[0] as there:
                there.recv(64)
                there.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ValueError, match=rf":{port}: what answers there is no Ray cluster.*6379"):
            connect(f"127.0.0.1:{port}", workers=1)
        thread.join()


def test_a_host_without_a_possible_name_is_said() -> None:
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match=r"workers\.address=head\.\.lan:6379: nobody answers there"):
        connect("head..lan:6379", workers=1)


@pytest.mark.parametrize("error", ["PermissionError", "RaySystemError"])
def test_ray_that_does_not_start_is_said_and_leaves_no_folder(
    error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = pytest.importorskip("ray")
    raised = PermissionError("no room") if error == "PermissionError" else ray.exceptions.RaySystemError("no room")
    found = list[str]()

    def init(**settings: Any) -> None:
        found.append(settings["_temp_dir"])
        raise raised

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match=r"Ray did not start on this machine \(.*no room.*\): start one with"):
        connect(None, workers=1)
    assert not Path(found[0]).exists()
    monkeypatch.setattr(ray, "init", lambda **_: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(flowrl.cluster, "_short_folder", lambda: tmp_path / "ray")
    (tmp_path / "ray").mkdir()
    with pytest.raises(KeyboardInterrupt):
        connect(None, workers=1)
    assert not (tmp_path / "ray").exists()


def test_the_folder_goes_also_where_ray_does_not_end_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "shutdown", lambda: (_ for _ in ()).throw(RuntimeError("stuck")))
    (tmp_path / "ray").mkdir()
    made = flowrl.cluster.Connection(address="here:1", folder=tmp_path / "ray", own=True)
    monkeypatch.setattr(flowrl.cluster, "_connection", [made])
    with pytest.raises(RuntimeError, match="stuck"):
        disconnect()
    assert not (tmp_path / "ray").exists()


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"workers\.rewards=2 needs Ray.*flowrl's folder, pip install -e '\.\[ray\]'"):
        check_extra("workers.rewards=2")


def test_ray_is_not_imported_before_it_is_needed() -> None:
    command = "import sys, flowrl.cluster, flowrl.workers.layout; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
