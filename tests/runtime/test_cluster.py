"""What is said where Ray cannot be reached; runs on Ray are tested in `tests/workers/`."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flowrl.runtime.cluster
from flowrl.runtime.cluster import RayEnded, check_extra, connect, disconnect, refuse_ended


def test_nobody_at_an_address_is_said_at_once() -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match=rf"workers\.address=127\.0\.0\.1:{port}: nothing answers.*ray start --head"):
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
        with pytest.raises(ValueError, match=rf":{port}: what answers there is not a Ray cluster.*6379"):
            connect(f"127.0.0.1:{port}", workers=1)
        thread.join()


def test_a_host_without_a_possible_name_is_said() -> None:
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match=r"workers\.address=head\.\.lan:6379: nothing answers there"):
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
    monkeypatch.setattr(flowrl.runtime.cluster, "_short_folder", lambda: tmp_path / "ray")
    (tmp_path / "ray").mkdir()
    with pytest.raises(KeyboardInterrupt):
        connect(None, workers=1)
    assert not (tmp_path / "ray").exists()


def test_the_folder_goes_also_where_ray_does_not_end_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "shutdown", lambda: (_ for _ in ()).throw(RuntimeError("stuck")))
    (tmp_path / "ray").mkdir()
    made = flowrl.runtime.cluster.Connection(address="here:1", folder=tmp_path / "ray", own=True)
    monkeypatch.setattr(flowrl.runtime.cluster, "_connection", [made])
    with pytest.raises(RuntimeError, match="stuck"):
        disconnect()
    assert not (tmp_path / "ray").exists()


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"workers\.rewards=2 needs Ray.*flowrl's folder, pip install -e '\.\[ray\]'"):
        check_extra("workers.rewards=2")


@pytest.mark.slow
def test_ray_is_not_imported_before_it_is_needed() -> None:
    command = "import sys, flowrl.runtime.cluster, flowrl.workers.layout; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


# ---- an instance that is gone ----------------------------------------------------------------------------------------


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of an instance whose raylet has been killed, and whose other process is still there."""
    psutil = pytest.importorskip("psutil")
    folder = tmp_path / "ray"
    folder.mkdir()
    raylet = subprocess.Popen(["sleep", "60"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(folder)])
    made = flowrl.runtime.cluster.Connection(
        address="here:1", folder=folder, own=True, raylet=psutil.Process(raylet.pid)
    )
    monkeypatch.setattr(flowrl.runtime.cluster, "_connection", [made])
    refuse_ended()
    raylet.kill()
    wait_for(made.raylet)
    yield folder
    assert not psutil.pid_exists(other.pid)
    raylet.returncode = other.returncode = -9  # psutil has waited for them


def wait_for(process: Any) -> None:
    end = time.monotonic() + 10
    while process.status() != "zombie" and time.monotonic() < end:
        time.sleep(0.01)


def test_a_dead_raylet_is_said_and_ray_is_not_asked_again(dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("Ray would end this process"))
    with pytest.raises(RayEnded, match=r"raylet is gone\), and with it all workers\..*dmesg"):
        refuse_ended()
    disconnect()
    assert not dead.exists()
    refuse_ended()  # there is no connection any more


def test_a_killed_raylet_ends_who_waits_for_workers(dead: Path) -> None:
    from flowrl.workers.rollouts import Rollouts

    closed = list[str]()
    stand_in: Any = SimpleNamespace(
        _ended=False, _failed=None, _lock=threading.Condition(), dispatcher=SimpleNamespace(holds=lambda ticket: False),
        backend=SimpleNamespace(wait=lambda seconds: pytest.fail("asked"), close=lambda: closed.append("asked")),
    )  # fmt: skip
    stand_in._thread = threading.Thread(target=Rollouts._work, args=(stand_in,))
    stand_in._thread.start()
    with pytest.raises(RayEnded):
        next(Rollouts.collect(stand_in, [0]))
    Rollouts.close(stand_in)
    assert not closed
    disconnect()
