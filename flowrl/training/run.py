"""The run: its folder, processes, metrics, checkpoints and interrupts.

Folder: `config.yaml`, `manifest.json`, `metrics.jsonl`, `checkpoints/`, `lora/`, `samples/`, `eval/`, `report.html`.
A checkpoint is a folder with a number for a name; while it is written its name starts with a dot.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from flowrl.capabilities import capabilities
from flowrl.files import replacing, write_atomically

_STATE, _SEAL = "state.pt", "checkpoint.json"


class CheckpointError(ValueError):
    """A checkpoint is damaged or belongs to another configuration."""


def make_free_folder(name: str, parent: Path = Path("runs")) -> Path:
    """Makes `runs/<name>-<n>` with the first free n; two runs that start at once get two folders."""
    number = 1
    while True:
        folder = parent / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


class Run:
    """One run on one or more processes. Only the main process writes."""

    def __init__(
        self, folder: Path | None, *, name: str, config_yaml: str, resumed: bool, device: str, tensorboard: bool
    ) -> None:
        """Opens a run folder.

        Args:
            folder: where; None takes the first free `runs/<name>-<n>`.
            name: of the configuration.
            config_yaml: the resolved configuration, written to `config.yaml`.
            resumed: whether the folder holds a run to continue; a new run refuses a folder that holds anything.
            device: "auto", "cpu", "cuda", "cuda:N" or "mps".
            tensorboard: also write TensorBoard events.

        Raises:
            ValueError: the device is not there, or the folder is taken.
        """
        self.accelerator = _accelerator(device)
        self.device = self.accelerator.device
        self.main, self.rank, self.world = (
            self.accelerator.is_main_process, self.accelerator.process_index, self.accelerator.num_processes,
        )  # fmt: skip
        self.folder = self._claim(folder, name, resumed)
        self.started = time.time()
        self.stop_requested = False
        self._writer: Any = None
        if self.main:
            write_atomically(self.folder / "config.yaml", config_yaml)  # resumed: num_iterations may have been raised
            (self.folder / "summary.json").unlink(missing_ok=True)  # marks a finished run
            self._write_manifest(name, resumed)
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self.folder / "tensorboard"))

    def _claim(self, folder: Path | None, name: str, resumed: bool) -> Path:
        """The run folder, the same on every process; made by the main one."""
        answer: list[Any] = [None, None]
        if self.main:
            chosen = folder or make_free_folder(name)
            if not resumed and chosen.exists() and any(chosen.iterdir()):
                answer[1] = (
                    f"the run folder {chosen} is not empty, and nothing in it will be overwritten: continue it with "
                    f"'flowrl train resume={chosen}', or choose another folder with out="
                )
            else:
                chosen.mkdir(parents=True, exist_ok=True)
                answer[0] = str(chosen)
        broadcast_object_list(answer)
        if answer[1] is not None:
            raise ValueError(answer[1])
        return Path(answer[0])

    # ---- metrics -------------------------------------------------------------------------------------------------

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends a row to `metrics.jsonl` and to TensorBoard at its `iteration`; what is not finite becomes null."""
        if not self.main:
            return
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean) + "\n")
        if self._writer is not None:
            for key, value in clean.items():
                if isinstance(value, int | float) and key != "iteration":
                    self._writer.add_scalar(key, value, int(row["iteration"]))
            self._writer.flush()

    def rows(self) -> list[dict[str, Any]]:
        """What `metrics.jsonl` holds."""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, iteration: int, state: Mapping[str, Any], keep: int) -> Path:
        """Writes checkpoint number `iteration` (finished iterations), then removes all but the newest `keep`.

        Raises:
            OSError: it could not be written (a full disk, say); what was there before stays, half a file does not.
        """
        folder = self.folder / "checkpoints"
        final, temporary = folder / f"{iteration:06d}", folder / f".{iteration:06d}"
        if self.main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            try:
                _write_state(temporary, iteration, state, self._metrics_size())
                if final.exists():
                    shutil.rmtree(final)
                os.replace(temporary, final)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            for old in checkpoints(self.folder)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return final

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The newest complete checkpoint's state, or None; rows of `metrics.jsonl` written after it are dropped.

        Raises:
            CheckpointError: the newest checkpoint is damaged.
        """
        state, size = read_checkpoint(self.folder)
        self.accelerator.wait_for_everyone()
        if self.main:
            self._truncate_metrics(size)
        return state

    def _metrics_size(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def _truncate_metrics(self, size: int) -> None:
        path = self.folder / "metrics.jsonl"
        if path.exists():
            kept = path.read_bytes()[:size]
            with replacing(path) as stream:
                stream.write(kept)

    # ---- manifest, interrupts, end -------------------------------------------------------------------------------

    def _write_manifest(self, name: str, resumed: bool) -> None:
        path = self.folder / "manifest.json"
        manifest = json.loads(path.read_text(encoding="utf-8")) if resumed and path.exists() else {}
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        if manifest:
            manifest.setdefault("resumed", []).append(now)
            manifest.pop("finished", None)
        else:
            manifest = {"config_name": name, "started": now}
        manifest |= {
            "command": shlex.join(["flowrl", *sys.argv[1:]]),
            "git_commit": _git_commit(),
            "versions": {
                p: _version(p) for p in ("flowrl-toolkit", "torch", "diffusers", "transformers", "peft", "accelerate")
            },
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else str(self.device),
            "capabilities": capabilities(),
            "cpu_count": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "num_processes": self.world,
        }
        write_atomically(path, json.dumps(manifest, indent=2) + "\n")

    def note(self, **facts: Any) -> None:
        """Adds facts to the manifest."""
        if self.main:
            path = self.folder / "manifest.json"
            manifest = json.loads(path.read_text(encoding="utf-8")) | facts
            write_atomically(path, json.dumps(manifest, indent=2) + "\n")

    def finish(self, *, finished: bool) -> None:
        """Notes in the manifest when the run finished, or was stopped, and its peak memory; closes TensorBoard."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        end = {"finished" if finished else "stopped": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        self.note(**end, peak_memory_gib=round(peak / 2**30, 2))
        if self._writer is not None:
            self._writer.close()

    @contextmanager
    def watching_interrupts(self) -> Iterator[None]:
        """Inside, the first Ctrl-C (or SIGTERM) asks for a stop after this iteration; a second one stops at once."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True
            if self.main:
                print("\nStopping after this iteration, then saving. Press Ctrl-C again to stop at once.", flush=True)

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def should_stop(self) -> bool:
        """Whether any process was asked to stop; every process gets the same answer."""
        flag = torch.tensor([int(self.stop_requested)], device=self.device)
        return bool(self.accelerator.reduce(flag, reduction="sum").item())

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Joins a tensor `[b, ...]` of every process along the batch, in rank order."""
        gathered: torch.Tensor = self.accelerator.gather(tensor.contiguous())
        return gathered


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    found = (folder / "checkpoints").glob("[0-9]*")
    return sorted(path for path in found if (path / _SEAL).exists())


def _write_state(folder: Path, iteration: int, state: Mapping[str, Any], metrics_size: int) -> None:
    # torch.save to a file reports a full disk as a RuntimeError; plain writes say OSError.
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    with (folder / _STATE).open("wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    seal = {"iteration": iteration, "sha256": digest, "metrics_bytes": metrics_size}
    write_atomically(folder / _SEAL, json.dumps(seal) + "\n")


def read_checkpoint(run_folder: Path) -> tuple[dict[str, Any] | None, int]:
    """State of the newest complete checkpoint (None without one), and the bytes of `metrics.jsonl` that belong to it.

    Raises:
        CheckpointError: the checkpoint is damaged; an older one is not taken unasked.
    """
    found = checkpoints(run_folder)
    if not found:
        return None, 0
    *older, folder = found
    advice = (
        f"remove {folder} to continue from {older[-1].name}" if older else f"remove {folder} to start from iteration 0"
    )
    try:
        seal = json.loads((folder / _SEAL).read_text(encoding="utf-8"))
        data = (folder / _STATE).read_bytes()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be read ({error}): {advice}") from error
    if hashlib.sha256(data).hexdigest() != seal.get("sha256"):
        raise CheckpointError(f"the checkpoint {folder} is damaged (its checksum does not fit): {advice}")
    metrics, size = run_folder / "metrics.jsonl", int(seal["metrics_bytes"])
    length = metrics.stat().st_size if metrics.exists() else 0
    if length < size:
        raise CheckpointError(
            f"{metrics} is shorter ({length} bytes) than when the checkpoint was written ({size}): it was edited; "
            "restore it or start a new run"
        )
    state: dict[str, Any] = torch.load(folder / _STATE, map_location="cpu", weights_only=True)
    return state, size


def check_device(device: str, key: str = "pipeline.device=") -> None:
    """Refuses a device that this machine does not have, and one GPU by number for several processes.

    Raises:
        ValueError: names those there are.
    """
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    usable = ["auto", "cpu", *(["cuda", *gpus] if gpus else [])]
    usable += ["mps"] if torch.backends.mps.is_available() else []
    if device not in usable:
        raise ValueError(f"{key}{device} is not available on this machine: choose {', '.join(usable)}")
    if device in gpus and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"pipeline.device={device} names one GPU, but several processes were launched and each takes its own: "
            "set pipeline.device=cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )


def _accelerator(device: str) -> Accelerator:
    check_device(device)
    kind, _, number = device.partition(":")
    if number:
        torch.cuda.set_device(int(number))  # accelerate's "cuda" is the current device
    accelerator = Accelerator(cpu=kind == "cpu")
    if kind not in ("auto", "cpu") and accelerator.device.type != kind:
        raise ValueError(
            f"pipeline.device={device}, but accelerate chose {accelerator.device}: check ACCELERATE_USE_CPU"
        )
    return accelerator


def _git_commit() -> str | None:
    """The commit of the checkout that flowrl runs from; None for an installed wheel."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
