"""Ray, on which workers of a run live (extra `ray`): one connection per process, and an instance of its own where no
cluster is named.

    connect(None, workers=4)      # the run's own instance on this machine, or address="10.0.0.1:6379"
    ...                           # actors
    disconnect()                  # also on errors

Nothing is sent to anybody: Ray's usage statistics are switched off, and there is no dashboard. Ray is imported on the
first connection only.
"""

from __future__ import annotations

import atexit
import fcntl
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

EXTRA = "in flowrl's folder, pip install -e '.[ray]'"
_PATIENCE = 10.0  # seconds that a cluster has to accept a connection
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What speakers of HTTP/2, as Ray is one, begin with; they answer a frame of the kind 4, their settings."""
_PREFIX, _OWNER = "ray-", "flowrl.lock"
"""Of the folder of an instance, and the file in it that says whose it is: held as long as that process lives."""
_LONGEST_FOLDER = 40
"""Characters of a folder for Ray's files: names of its sockets, in folders of their own, end at 107."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """This process's connection to Ray."""

    address: str
    """Other processes reach the same instance by."""
    folder: Path | None
    """Of the files of an instance that this process started; None where it was there before."""
    own: bool
    """Whether the connection was made here, and is closed here."""
    raylet: Any = None
    """Ray's process that was started with such an instance (`psutil.Process`). When it is gone, Ray ends this process
    at one of the next calls, without a word."""
    lock: IO[bytes] | None = None
    """Open for as long as this process lives, so that nobody takes the folder for one that was left behind."""


class RayEnded(ValueError):
    """Ray's own processes on this machine are gone, and no call of it may be made any more."""


_connection: list[Connection] = []  # at most one: Ray knows no more in a process


def check_extra(key: str) -> None:
    """Refuses a setting that needs Ray where it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f"{key} needs Ray, which is not installed: {EXTRA}, or set it to 0")


def connect(address: str | None, *, workers: int, gpus: Sequence[str] | None = None) -> Connection:
    """Connects this process to Ray, once: later calls give the connection that there is.

    Args:
        address: of a cluster ("auto" finds the one of this machine, "HOST:PORT" any); None starts an instance here,
            which ends with `disconnect`, and with this process however that ends.
        workers: that an instance started here has room for, at one CPU each; they share the cores there are.
        gpus: numbers of the GPUs that an instance started here lends to workers; None takes all that it finds.

    Raises ValueError: no cluster answers there, or it runs another version of Ray or of Python.
    """
    check_extra("workers")
    if _connection:
        return _connection[0]
    # Read by Ray when it is imported or started; a worker without a GPU then sees those of the machine as before.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    atexit.register(_remove_folders)  # before Ray's own way out is registered, and so called after it
    import ray

    if ray.is_initialized():  # by the program that this run is part of
        made = Connection(address=ray.get_runtime_context().gcs_address, folder=None, own=False)
        _connection.append(made)
        return made
    if address is not None:
        _refuse_silent(address)
    folder, lock = None, None
    if address is None:
        folder = _short_folder()
        lock = _claim(folder)
    settings: dict[str, Any] = {"address": address, "logging_level": logging.ERROR, "log_to_driver": False}
    if folder is not None:
        settings |= {"address": "local", "num_cpus": max(workers, os.cpu_count() or 1)}
        settings |= {"include_dashboard": False, "_temp_dir": str(folder)}
    try:
        with _own_signals(), _visible_gpus(gpus if folder is not None else None):
            ray.init(**settings)
    except BaseException as error:
        if folder is not None:
            with lock or nullcontext(), suppress(Exception):  # what was wrong first is told
                _end_instance(folder)
        if not isinstance(error, (OSError, RuntimeError, ValueError, ray.exceptions.RayError)):
            raise
        where = "Ray did not start on this machine" if address is None else f"no Ray cluster at {address}"
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{where} ({first}): start one with 'ray start --head' and name its address in workers.address, or leave "
            "that out for an instance of the run's own"
        ) from error
    raylet = None if folder is None else _raylet()
    address = ray.get_runtime_context().gcs_address
    made = Connection(address=address, folder=folder, own=True, lock=lock, raylet=raylet)
    _connection.append(made)
    return made


def refuse_ended() -> None:
    """Looks whether the instance that this process started is still there; to be called before Ray is. Raises RayEnded:
    it is not."""
    if _connection and _is_over(_connection[0]):
        raise RayEnded(
            "Ray ended on this machine (its process raylet is gone), and with it all workers. It was killed from "
            "outside, mostly for want of memory (dmesg names it), or Ray failed"
        )


def _psutil() -> Any:
    import psutil  # type: ignore[import-untyped]  # comes with accelerate

    return psutil


def _is_over(made: Connection) -> bool:
    psutil = _psutil()
    try:
        return made.raylet is not None and made.raylet.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _raylet() -> Any:
    return next((child for child in _psutil().Process().children() if child.name() == "raylet"), None)


def disconnect() -> None:
    """Ends what `connect` began: the connection, and an instance that was started for it. Without one it does nothing.

    Call it at the end of a run, however that ended.
    """
    if not _connection:
        return
    made = _connection.pop()
    with made.lock or nullcontext():
        if made.folder is not None and _is_over(made):  # Ray's own way out would end this process on the way
            psutil, rest = _psutil(), []
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
    """Ends what was started of an instance of this process; its folder goes, whatever Ray says."""
    import ray

    try:
        with _own_signals():
            ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_removed: list[Path] = []  # of instances that ended by themselves: when this process ends, Ray writes there again


def _remove_folders() -> None:
    for folder in _removed:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_silent(address: str) -> None:
    """Refuses an address that nobody listens at, or another server: Ray itself asks there for many minutes."""
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
    except (OSError, UnicodeError) as error:  # the latter where the name of the host can be none
        raise ValueError(
            f"workers.address={address}: nobody answers there ({error}): start a cluster with 'ray start --head', "
            "which says its address, or leave workers.address out for an instance of the run's own"
        ) from error
    if len(answer) < 9 or answer[3] != _HELLO[-6]:
        raise ValueError(
            f"workers.address={address}: what answers there is no Ray cluster: give the address that 'ray start "
            "--head' says, whose port is 6379 unless another was set (8265 is its dashboard)"
        )


def _short_folder() -> Path:
    """A new folder for Ray's files, with a name that leaves room for those of sockets; those left behind go."""
    parent = tempfile.gettempdir()
    parent = parent if len(parent) + 13 <= _LONGEST_FOLDER else "/tmp"
    for folder in Path(parent).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # not a run's, at work, or on a disk without locks
            if folder.is_symlink() or (folder / _OWNER).lstat().st_uid != os.getuid():
                continue
            with (folder / _OWNER).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))


def _claim(folder: Path) -> IO[bytes]:
    """Marks a folder as one of a process that lives."""
    lock = (folder / _OWNER).open("wb")
    with suppress(OSError):  # a disk without locks: then folders of killed runs stay
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


@contextmanager
def _own_signals() -> Iterator[None]:
    """Puts the handlers of signals back that Ray replaces: a run answers Ctrl-C and SIGTERM itself."""
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
    """Inside, processes that are started see these GPUs alone; this one has looked before."""
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
