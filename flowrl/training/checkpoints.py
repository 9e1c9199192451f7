"""Checkpoints: sealed states of a run on disk, and the LoRA as stock diffusers loads it.

A checkpoint is a folder with a number for a name; while it is written its name starts with a dot.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, cast

import torch

from flowrl.files import read_json, write_atomically
from flowrl.pipelines import Pipeline
from flowrl.pipelines.lora import Policy
from flowrl.pipelines.weights.saved_model import put_back
from flowrl.pipelines.weights.trained_weights import TrainedWeights
from flowrl.training.manifest import read_manifest
from flowrl.training.model_files import MODEL
from flowrl.training.optimizers import refuse_other_moments

_STATE, _SEAL = "state.pt", "checkpoint.json"
_STAGED = ".lora.writing"


class CheckpointError(ValueError):
    """A checkpoint is damaged or belongs to another configuration."""


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    found = (folder / "checkpoints").glob("[0-9]*")
    return sorted(path for path in found if (path / _SEAL).exists())


def write_checkpoint(
    run_folder: Path,
    iteration: int,
    state: Mapping[str, Any],
    *,
    keep: int,
    metrics_size: int,
    run: str,
    inputs: str,
) -> None:
    """Writes checkpoint number `iteration` (finished iterations), then removes all but the newest `keep`.

    Args:
        run_folder: of the run.
        iteration: the number.
        state: what is kept.
        keep: number of checkpoints that stay.
        metrics_size: bytes of `metrics.jsonl` that belong to it.
        run: id of the run.
        inputs: digest of what it is made with.

    Raises:
        OSError: it could not be written (a full disk, say); what was there before stays, half a file does not.
    """
    folder = run_folder / "checkpoints"
    final, temporary, aside = (folder / name.format(iteration) for name in ("{:06d}", ".{:06d}", ".{:06d}.old"))
    for half in (temporary, aside):
        shutil.rmtree(half, ignore_errors=True)
    temporary.mkdir(parents=True)
    about = {"iteration": iteration, "metrics_bytes": metrics_size, "run": run, "inputs": inputs}
    try:
        _write_state(temporary, {**state, "run": run}, about)
        if final.exists():
            os.replace(final, aside)
        os.replace(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)
    prune(run_folder, keep)


def prune(run_folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints."""
    for old in checkpoints(run_folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _write_state(folder: Path, state: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    # torch.save to a file reports a full disk as a RuntimeError; plain writes say OSError.
    with (folder / _STATE).open("wb") as file:
        stream = _Digested(file)
        torch.save(dict(state), cast(BinaryIO, stream))
        file.flush()
        os.fsync(file.fileno())
    write_atomically(folder / _SEAL, json.dumps({**about, "sha256": stream.digest.hexdigest()}) + "\n")


class _Digested(io.RawIOBase):
    """A stream into a file that keeps a digest of what went by: a state may be as large as the memory that is left."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self.file, self.digest = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self.file.write(data)


def read_checkpoint(run_folder: Path) -> tuple[dict[str, Any] | None, int]:
    """State of the newest complete checkpoint (None without one), and the bytes of `metrics.jsonl` that belong to it.

    Raises:
        CheckpointError: the checkpoint is damaged, or another run's; an older one is not taken unasked.
        ValueError: the manifest cannot be read.
    """
    found = checkpoints(run_folder)
    if not found:
        return None, 0
    folder, advice = found[-1], _advice(found)
    try:
        seal = read_json(folder / _SEAL)
        size = int(seal["metrics_bytes"])
        with (folder / _STATE).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != seal["sha256"]:
                raise CheckpointError(f"the checkpoint {folder} is damaged (its checksum does not fit): {advice}")
            file.seek(0)
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        run = state.get("run")
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be read ({_first_line(error)}): {advice}") from error
    _refuse_foreign(run_folder, folder, seal, run, advice)
    metrics = run_folder / "metrics.jsonl"
    length = metrics.stat().st_size if metrics.exists() else 0
    if length < size:
        raise CheckpointError(
            f"{metrics} is shorter ({length} bytes) than when the checkpoint was written ({size}): it was edited; "
            "restore it or start a new run"
        )
    return state, size


def check_newest(run_folder: Path) -> int | None:
    """The number of the newest complete checkpoint, of which the seal alone is read, not the weights; None without one.

    Raises:
        CheckpointError: its seal says that it is another run's, or cannot be read.
        ValueError: the manifest cannot be read.
    """
    found = checkpoints(run_folder)
    if not found:
        return None
    folder, advice = found[-1], _advice(found)
    try:
        seal = read_json(folder / _SEAL)
        number, run = int(seal["iteration"]), seal.get("run")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be read ({_first_line(error)}): {advice}") from error
    _refuse_foreign(run_folder, folder, seal, run, advice)
    return number


def _advice(found: Sequence[Path]) -> str:
    """What to do about the newest of a run's checkpoints where it cannot be taken."""
    *older, folder = found
    return (
        f"remove {folder} to continue from {older[-1].name}" if older else f"remove {folder} to start from iteration 0"
    )


def digest_of_newest(run_folder: Path) -> str | None:
    """Digest of the newest complete checkpoint's state, as its seal says; None where there is none to be read."""
    try:
        return str(read_json(checkpoints(run_folder)[-1] / _SEAL)["sha256"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _refuse_foreign(run_folder: Path, folder: Path, seal: Mapping[str, Any], run: str | None, advice: str) -> None:
    """Refuses a checkpoint of another run than the manifest's, or made with what that run never had."""
    manifest = read_manifest(run_folder)
    own = manifest.get("run", seal.get("run"))
    if not own == seal.get("run") == run:
        raise CheckpointError(
            f"the checkpoint {folder} is of another run ({seal.get('run')}; this one is {own}): put the run's own "
            f"back, or {advice}"
        )
    known = [entry.get("inputs_digest") for entry in (manifest, *manifest.get("resumed", ()))]
    if "inputs_digest" in manifest and seal.get("inputs") not in known:
        raise CheckpointError(
            f"the checkpoint {folder} was made with other inputs than manifest.json tells of: one of the two was "
            f"replaced; put it back, or {advice}"
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def save_lora(folder: Path, pipeline: Pipeline, policy: Policy) -> None:
    """Replaces the LoRA in a folder, each of its files in one step; a model of two experts has two."""
    staged = folder.with_name(_STAGED)
    pipeline.save_lora(staged, policy.tensors(), policy.config)
    for path in sorted(staged.rglob("*.safetensors")):
        place = folder / path.relative_to(staged)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.chmod(place.parent.stat().st_mode & 0o666)  # safetensors keeps a file to its owner, whatever the umask
        path.replace(place)
    shutil.rmtree(staged)


def remove_halves(run_folder: Path) -> None:
    """Removes what a process that was killed had begun to write; nobody may be at work in the folder."""
    for old in (run_folder / "checkpoints").glob(".[0-9]*.old"):  # killed between two renames
        number = old.name.removeprefix(".").removesuffix(".old")
        if not (old.parent / number).exists():
            old.replace(old.parent / number)
    put_back(run_folder / MODEL)
    staged = [run_folder / name for name in (_STAGED, ".shipped.keeping", ".shipped.restoring")]
    for path in [*staged, *(run_folder / "checkpoints").glob(".[0-9]*")]:
        shutil.rmtree(path, ignore_errors=True)
    for path in run_folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


def restore(state: dict[str, Any], policy: TrainedWeights, optimizer: torch.optim.Optimizer) -> int:
    """Puts a checkpoint back; returns the number of finished iterations.

    The optimizer keeps the learning rate and its like that it was made with: they are settings, not state.

    Raises:
        CheckpointError: it holds other weights than the policy has.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        if state["slots"].keys() != policy.slots.keys():
            raise KeyError(f"copies of the policy: {[*state['slots']]}, now {[*policy.slots]}")
        policy.load(state["policy"])
        for slot, tensors in state["slots"].items():
            for name, tensor in tensors.items():
                policy.slots[slot][name].copy_(tensor)
        refuse_other_moments(optimizer, state["optimizer"])
        optimizer.load_state_dict(state["optimizer"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint holds other weights than the configuration asks for ({_first_line(error)}): what is "
            "trained (policy.*, recipe, pipeline.model) cannot change within a run; start a new one, from its LoRA by "
            "policy.init_lora, or from its model by pipeline.model"
        ) from error
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
    return int(state["iteration"])
