"""Ray, which runs the workers of a run (extra `ray`): one connection per process, private if no cluster is named.

    connect(None, workers=4)      # the run's own instance on this machine, or address="10.0.0.1:6379"
    ...                           # actors
    disconnect()                  # also on errors

Ray sends nothing to anybody: usage statistics and dashboard are off. The first connection imports it.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil  # comes with accelerate

from flowrl.runtime.temporary import claim, without_abandoned

EXTRA = "in flowrl's folder, pip install -e '.[ray]'"
_PATIENCE = 10.0  # seconds that a cluster has to accept a connection
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What speakers of HTTP/2, as Ray is one, begin with; they answer a frame of the kind 4, their settings."""
_PREFIX = "ray-"  # of the folder of an instance
_LONGEST_FOLDER = 40
"""Characters of a folder for Ray's files: names of its sockets, in folders of their own, end at 107."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """This process's connection to Ray."""

    address: str
    """Other processes reach the same instance by."""
    folder: Path | None
    """Folder with the files of an instance that this process started; None if it existed before."""
    own: bool
    """Whether this process made the connection, and so closes it."""
    raylet: Any = None
    """Ray's own process of such an instance (`psutil.Process`). If it dies, a later call of Ray ends this process."""
    lock: IO[bytes] | None = None
    """Stays open while this process lives, so that no other process takes the folder for an abandoned one."""


class RayEnded(ValueError):
    """Ray's own processes on this machine are gone, so nothing may call Ray any more."""


_connection: list[Connection] = []  # at most one: Ray allows no more in a process


def check_extra(key: str) -> None:
    """Refuses a setting that needs Ray if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f"{key} needs Ray, which is not installed: {EXTRA}, or set it to 0")


def connect(address: str | None, *, workers: int, gpus: Sequence[str] | None = None) -> Connection:
    """Connects this process to Ray once; later calls return the same connection.

    Args:
        address: of a cluster ("auto" finds the one of this machine, "HOST:PORT" any); None starts an instance here,
            which ends with `disconnect`, and with this process however that ends.
        workers: how many an instance started here has room for, at one CPU each; they share the cores of the machine.
        gpus: numbers of the GPUs that an instance started here lends to workers; None takes all it finds.

    Raises ValueError: no cluster answers, or it runs another version of Ray or Python.
    """
    check_extra("workers")
    if _connection:
        return _connection[0]
    # Read by Ray when it is imported or started; a worker without a GPU then sees those of the machine as before.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    atexit.register(_remove_folders)  # before Ray registers its own exit handler, so that this one runs after it
    import ray

    if ray.is_initialized():  # by the program that this run is part of
        made = Connection(address=ray.get_runtime_context().gcs_address, folder=None, own=False)
        _connection.append(made)
        return made
    if address is not None:
        _refuse_silent(address)
    folder, lock = None, None
    settings: dict[str, Any] = {"address": address, "logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        folder = _short_folder()
        lock = claim(folder)
        settings |= {"address": "local", "num_cpus": max(workers, os.cpu_count() or 1)}
        settings |= {"include_dashboard": False, "_temp_dir": str(folder)}
    try:
        with _own_signals(), _visible_gpus(gpus if folder is not None else None):
            ray.init(**settings)
    except BaseException as error:
        if folder is not None:
            with lock or nullcontext(), suppress(Exception):  # tells the first cause
                _end_instance(folder)
        if not isinstance(error, (OSError, RuntimeError, ValueError, ray.exceptions.RayError)):
            raise
        where = "Ray did not start on this machine" if address is None else f"no Ray cluster at {address}"
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{where} ({first}): start one with 'ray start --head' and name its address in workers.address, or leave "
            "that out for an instance of the run's own"
        ) from error
    children = [] if folder is None else psutil.Process().children()
    raylet = next((child for child in children if child.name() == "raylet"), None)
    address = ray.get_runtime_context().gcs_address
    made = Connection(address=address, folder=folder, own=True, lock=lock, raylet=raylet)
    _connection.append(made)
    return made


def refuse_ended() -> None:
    """Checks that this process's instance still runs; call it before each call of Ray. Raises RayEnded: it does not."""
    if _connection and _is_over(_connection[0]):
        raise RayEnded(
            "Ray ended on this machine (its process raylet is gone), and with it all workers. Something killed "
            "it, usually because memory ran out (dmesg names it), or Ray failed"
        )


def _is_over(made: Connection) -> bool:
    try:
        return made.raylet is not None and made.raylet.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def disconnect() -> None:
    """Ends the connection, if any, and an instance that `connect` started; call it when a run ends or fails."""
    if not _connection:
        return
    made = _connection.pop()
    with made.lock or nullcontext():
        if made.folder is not None and _is_over(made):  # Ray's own exit would end this process too
            rest = []
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if str(made.folder) in " ".join(child.cmdline()):
                        rest.append(child)
                        child.kill()
            psutil.wait_procs(rest, timeout=_PATIENCE)
            shutil.rmtree(made.folder, ignore_errors=True)
            _removed.append(made.folder)
        elif made.folder is not None:
            _end_instance(made.folder)
        elif made.own:
            import ray

            with _own_signals():
                ray.shutdown()


def _end_instance(folder: Path) -> None:
    """Ends the processes of this process's instance and removes its folder, whatever Ray answers."""
    import ray

    try:
        with _own_signals():
            ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_removed: list[Path] = []  # of instances that ended by themselves: Ray writes there again when this process ends


def _remove_folders() -> None:
    for folder in _removed:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_silent(address: str) -> None:
    """Refuses an address without a Ray server at once; Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", or a word that Ray knows
    try:
        host = host.removeprefix("ray://").strip("[]")
        with socket.create_connection((host, int(port)), timeout=_PATIENCE) as there:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            there.sendall(_HELLO)
            answer = there.recv(9, socket.MSG_WAITALL)
    except (OSError, UnicodeError) as error:  # the latter if the text cannot be a host's name
        raise ValueError(
            f"workers.address={address}: nothing answers there ({error}): start a cluster with 'ray start --head', "
            "which prints its address, or leave workers.address out for an instance of the run's own"
        ) from error
    if len(answer) < 9 or answer[3] != _HELLO[-6]:
        raise ValueError(
            f"workers.address={address}: what answers there is not a Ray cluster: give the address that 'ray start "
            "--head' prints, whose port is 6379 unless another was set (8265 is its dashboard)"
        )


def _short_folder() -> Path:
    """A new folder for Ray's files; its name is short, because sockets' paths are limited."""
    parent = tempfile.gettempdir()
    parent = parent if len(parent) + 13 <= _LONGEST_FOLDER else "/tmp"
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=without_abandoned(parent, _PREFIX)))


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restores the signal handlers that Ray replaces: a run handles Ctrl-C and SIGTERM itself."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _visible_gpus(gpus: Sequence[str] | None) -> Iterator[None]:
    """Inside, new processes see only these GPUs; this process has already chosen its own."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    if gpus is not None:
        os.environ[name] = ",".join(gpus)
    try:
        yield
    finally:
        if gpus is not None and before is None:
            del os.environ[name]
        elif before is not None:
            os.environ[name] = before
