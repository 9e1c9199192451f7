"""Checkpoints: sealed states of a run on disk, and the LoRA as stock diffusers loads it.

A checkpoint is a folder with a number for a name; while it is written its name starts with a dot.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flowrl.files import read_json, write_atomically
from flowrl.pipelines import Pipeline
from flowrl.pipelines.lora import Policy

_STATE, _SEAL = "state.pt", "checkpoint.json"


class CheckpointError(ValueError):
    """A checkpoint is damaged or belongs to another configuration."""


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    found = (folder / "checkpoints").glob("[0-9]*")
    return sorted(path for path in found if (path / _SEAL).exists())


def write_checkpoint(
    run_folder: Path, iteration: int, state: Mapping[str, Any], *, keep: int, metrics_size: int
) -> None:
    """Writes checkpoint number `iteration` (finished iterations), then removes all but the newest `keep`.

    Args:
        run_folder: of the run.
        iteration: the number.
        state: what is kept.
        keep: number of checkpoints that stay.
        metrics_size: bytes of `metrics.jsonl` that belong to it.

    Raises:
        OSError: it could not be written (a full disk, say); what was there before stays, half a file does not.
    """
    folder = run_folder / "checkpoints"
    final, temporary = folder / f"{iteration:06d}", folder / f".{iteration:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_state(temporary, iteration, state, metrics_size)
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in checkpoints(run_folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


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
        seal = read_json(folder / _SEAL)
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


def save_lora(folder: Path, pipeline: Pipeline, policy: Policy) -> None:
    """Replaces the LoRA in a folder, each of its files in one step; a model of two experts has two."""
    staged = folder.with_name(".lora.writing")
    pipeline.save_lora(staged, policy.tensors(), policy.config)
    for path in sorted(staged.rglob("*.safetensors")):
        place = folder / path.relative_to(staged)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    shutil.rmtree(staged)


def restore(state: dict[str, Any], policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Puts a checkpoint back; returns the number of finished iterations."""
    policy.load(state["policy"])
    for slot, tensors in state["slots"].items():
        for name, tensor in tensors.items():
            policy.slots[slot][name].copy_(tensor)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["iteration"])
