"""Programs on two processes of this machine, joined by gloo."""

from __future__ import annotations

import socket
from pathlib import Path

from tiny_runs import start


def on_two_processes(folder: Path, *arguments: str) -> str:
    """Runs a Python program (`-m`, a module and its arguments, or a script) that must succeed; what it printed."""
    ports = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", *ports]
    process = start([*launcher, *arguments], folder, GLOO_SOCKET_IFNAME="lo")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
