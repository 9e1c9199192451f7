"""What is said where Ray cannot be reached; runs on Ray are tested in `tests/workers/`."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from flowrl.cluster import check_extra, connect, disconnect


def test_nobody_at_an_address_is_said_at_once() -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match=rf"workers\.address=127\.0\.0\.1:{port}: nobody answers.*ray start --head"):
        connect(f"127.0.0.1:{port}", workers=1)
    disconnect()  # without a connection it does nothing


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"workers\.rewards=2 needs Ray.*pip install 'flowrl-toolkit\[ray\]'"):
        check_extra("workers.rewards=2")


def test_ray_is_not_imported_before_it_is_needed() -> None:
    command = "import sys, flowrl.cluster, flowrl.workers.layout; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
