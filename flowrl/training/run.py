"""The run: its folder, its processes, its metrics, and interrupts.

Folder: `config.yaml`, `manifest.json`, `metrics.jsonl`, `checkpoints/`, `lora/`, `samples/`, `eval/`, `report.html`.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from flowrl.files import read_json_lines, replacing, write_atomically
from flowrl.training.checkpoints import read_checkpoint, write_checkpoint
from flowrl.training.devices import accelerator_of
from flowrl.training.manifest import note_in_manifest, write_manifest
from flowrl.training.run_folder import make_free_folder, refuse_taken


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
        self.accelerator = accelerator_of(device)
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
            write_manifest(self.folder, name=name, resumed=resumed, device=self.device, num_processes=self.world)
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self.folder / "tensorboard"))

    def _claim(self, folder: Path | None, name: str, resumed: bool) -> Path:
        """The run folder, the same on every process; made by the main one."""
        answer: list[Any] = [None, None]
        if self.main:
            chosen = folder or make_free_folder(name)
            try:
                if not resumed:
                    refuse_taken(chosen)
            except ValueError as error:
                answer[1] = str(error)
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
        return read_json_lines(path) if path.exists() else []

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, iteration: int, state: Mapping[str, Any], keep: int) -> None:
        """Writes checkpoint number `iteration` (finished iterations), then removes all but the newest `keep`.

        Raises:
            OSError: as `write_checkpoint`.
        """
        if self.main:
            metrics = self.folder / "metrics.jsonl"
            size = metrics.stat().st_size if metrics.exists() else 0
            write_checkpoint(self.folder, iteration, state, keep=keep, metrics_size=size)
        self.accelerator.wait_for_everyone()

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The newest complete checkpoint's state, or None; rows of `metrics.jsonl` written after it are dropped.

        Raises:
            CheckpointError: the newest checkpoint is damaged.
        """
        state, size = read_checkpoint(self.folder)
        self.accelerator.wait_for_everyone()
        metrics = self.folder / "metrics.jsonl"
        if self.main and metrics.exists():
            kept = metrics.read_bytes()[:size]
            with replacing(metrics) as stream:
                stream.write(kept)
        return state

    # ---- interrupts, end -----------------------------------------------------------------------------------------

    def note(self, **facts: Any) -> None:
        """Adds facts to the manifest."""
        if self.main:
            note_in_manifest(self.folder, facts)

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
