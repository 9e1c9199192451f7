"""Checkpoints: sealed states of a run on disk, and the LoRA as stock diffusers loads it.

A checkpoint is a folder named by a number; while it is written its name starts with a dot. First its state and its rows
of metrics reach the disk, then the seal `checkpoint.json` with checksums of both and of itself, then the name. So
damage by a power cut can be told, and a run continues from its newest whole checkpoint.

If trained weights are split, each process of a copy writes its part of them, their copies and moments to its own file
beside the state. The seal has the checksums of all and comes last. Parts are rows of weights: another number of
processes finds its own in them (`own_state`), and reads no others.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from flowrl.pipelines import Pipeline
from flowrl.pipelines.shared.saved_model import put_back
from flowrl.pipelines.weights.loading_choices import Split
from flowrl.pipelines.weights.lora import Policy
from flowrl.pipelines.weights.trained_weights import TrainedWeights
from flowrl.runs.manifest import read_manifest
from flowrl.runtime.files import make_folder, read_json, sync, sync_tree, write_atomically
from flowrl.training.model_files import MODEL
from flowrl.training.optimizers import refuse_other_moments
from flowrl.training.trackers.metric_rows import ROWS, Sealed, readable, rows_fault, tail_fault

_STATE, _PART, _SEAL, _FOLDER = "state.pt", "part-{:03d}.pt", "checkpoint.json", "checkpoints"
_SPLIT = ("policy", "slots", "optimizer")  # what parts are of
AHEAD = "ahead"
"""What a run remembers of the weights that later iterations are drawn with: by the iteration that began with them."""
_STAGED = ".lora.writing"
_OLDER_SEAL = {"iteration", "metrics_bytes", "run", "inputs", "sha256"}
"""What seals of versions hold that had no checksum of the seal itself."""


class CheckpointError(ValueError):
    """A checkpoint is damaged or belongs to another configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """What a run continues from: its newest whole checkpoint, with its rows."""

    folder: Path | None = None
    """The checkpoint; None if there is none and the run begins at iteration 0."""
    state: dict[str, Any] | None = None
    rows: bytes = b""
    damaged: tuple[Path, ...] = ()
    """What moves out of the way before the run continues: it is damaged, or later than the checkpoint."""
    said: str = ""
    """A line about that for the user."""
    lost: bool = False
    """Whether rows of the checkpoint are left out, so that its seal must be written again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seal:
    """What the seal of a checkpoint says."""

    iteration: int
    rows: Sealed
    run: str | None
    inputs: str | None
    sha256: str
    parts: tuple[str, ...]
    """Digests of the parts of what is split, by process; empty if the state has everything."""

    def files(self) -> dict[str, str]:
        """Names of the checkpoint's files, with their digests."""
        return {_STATE: self.sha256, **{_PART.format(place): digest for place, digest in enumerate(self.parts)}}


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    return [path for path in _numbered(folder) if (path / _SEAL).exists()]


def _numbered(folder: Path) -> list[Path]:
    """Everything with a checkpoint's name, oldest first."""
    found = (folder / _FOLDER).glob("[0-9]*")
    return sorted((path for path in found if path.name.isdecimal()), key=lambda path: int(path.name))


def begin_checkpoint(run_folder: Path, iteration: int) -> Path:
    """Makes the folder to write checkpoint number `iteration` in; removes what a killed process left there."""
    temporary = run_folder / _FOLDER / f".{iteration:06d}"
    for half in (temporary, temporary.with_name(f"{temporary.name}.old")):
        shutil.rmtree(half, ignore_errors=True)
    make_folder(temporary)
    return temporary


def write_part(run_folder: Path, iteration: int, place: int, own: Mapping[str, Any]) -> str:
    """Writes the part of process number `place` of a copy into the folder of `begin_checkpoint`; returns its digest.
    Raises OSError: it could not be written."""
    return _write_tensors(run_folder / _FOLDER / f".{iteration:06d}" / _PART.format(place), own)


def _write_tensors(path: Path, state: Mapping[str, Any]) -> str:
    """Writes a file and waits until the disk has it; returns its digest."""
    # torch.save to a file reports a full disk as a RuntimeError; plain writes say OSError.
    with path.open("wb") as file:
        stream = _Digested(file)
        torch.save(dict(state), cast(BinaryIO, stream))
        file.flush()
        os.fsync(file.fileno())
    return stream.digest.hexdigest()


def write_checkpoint(
    run_folder: Path,
    iteration: int,
    state: Mapping[str, Any],
    *,
    keep: int,
    rows: Sealed,
    run: str,
    inputs: str,
    parts: Sequence[str] = (),
) -> None:
    """Writes checkpoint number `iteration` (finished iterations), then removes all but the newest `keep`.

    Args:
        rows: its rows of metrics, which are on the disk.
        inputs: digest of what it is made with.
        parts: digests of the parts that `write_part` has written, by process.

    Raises OSError: it could not be written (a full disk, say); earlier files stay, half a file does not.
    """
    folder = run_folder / _FOLDER
    final, temporary, aside = (folder / name.format(iteration) for name in ("{:06d}", ".{:06d}", ".{:06d}.old"))
    if not parts:
        begin_checkpoint(run_folder, iteration)
    about = {"iteration": iteration, **_of_rows(rows), "run": run, "inputs": inputs}
    try:
        about["sha256"] = _write_tensors(temporary / _STATE, {**state, "run": run})
        _write_seal(temporary, about | ({"parts": list(parts)} if parts else {}))
        if final.exists():
            os.replace(final, aside)
        os.replace(temporary, final)
        sync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)
    prune(run_folder, keep)


def prune(run_folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints."""
    for old in checkpoints(run_folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def reseal(folder: Path, rows: Sealed) -> None:
    """Writes the seal of a checkpoint again, with other rows."""
    seal = {key: value for key, value in read_json(folder / _SEAL).items() if key != "seal_sha256"}
    _write_seal(folder, seal | _of_rows(rows))


def _of_rows(rows: Sealed) -> dict[str, Any]:
    return {"metrics_bytes": rows.size, "metrics_sha256": rows.digest}


def _write_seal(folder: Path, seal: Mapping[str, Any]) -> None:
    write_atomically(folder / _SEAL, json.dumps({**seal, "seal_sha256": _digest_of_seal(seal)}) + "\n")


def _digest_of_seal(seal: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(seal, sort_keys=True).encode()).hexdigest()


class _Digested(io.RawIOBase):
    """A stream into a file that digests what it writes: a state may be as large as the memory left."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self.file, self.digest = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self.file.write(data)


def find_checkpoint(run_folder: Path, *, changed: bool = False) -> Continued:
    """The newest whole checkpoint of a run folder, with its rows. Reads only. With `changed`, if the rows of every
    checkpoint are damaged, the newest state without the rows that cannot be read. Raises CheckpointError: a checkpoint
    is another run's, or states are whole and the rows of none of them are; ValueError: the manifest cannot be read."""
    path = run_folder / ROWS
    data = path.read_bytes() if path.is_file() else None
    damaged, why, faults = list[Path](), list[str](), dict[Path, str]()
    for folder in reversed(_numbered(run_folder)):
        try:
            seal = _read_seal(folder)
            _refuse_foreign(run_folder, folder, seal)
            if fault := rows_fault(data, seal.rows):
                faults[folder] = fault
                raise _Damaged(fault)
            state = _read_state(folder, seal)
        except _Damaged as error:
            damaged.append(folder)
            why.append(f"checkpoint {folder.name} cannot be used ({error})")
            continue
        if damaged and data is not None:
            damaged.append(path)
        elif tail_fault(data or b"", seal.rows.size):
            why.append(f"the end of {ROWS}, written after that checkpoint, cannot be read and is cut off")
        rows = (data or b"")[: seal.rows.size]
        return Continued(folder=folder, state=state, rows=rows, damaged=tuple(damaged), said=_said(why, folder))
    if faults and not changed:
        raise CheckpointError(
            f"{path} is damaged ({next(iter(faults.values()))}), and no checkpoint of the run has whole rows; nothing "
            "was touched. Put the file back from a copy. To go on without the rows that cannot be read, which the "
            f"manifest records: flowrl train resume={run_folder} resume_changed=true"
        )
    return _without_rows(faults, damaged, data) or _without_checkpoint(run_folder, damaged, why)


def _without_rows(faults: Mapping[Path, str], damaged: Sequence[Path], data: bytes | None) -> Continued | None:
    """The newest readable state of checkpoints without whole rows; None if none is readable. `faults` say what is wrong
    with the rows, by checkpoint, newest first; `damaged` are all checkpoints that cannot be used, `data` the rows."""
    for folder, fault in faults.items():
        try:
            seal = _read_seal(folder)
            state = _read_state(folder, seal)
        except _Damaged:
            continue
        aside = [other for other in damaged if int(other.name) > int(folder.name)]
        aside += [] if data is None else [folder.parents[1] / ROWS]
        rows, said = readable((data or b"")[: seal.rows.size]), _said([f"rows are lost ({fault})"], folder)
        return Continued(folder=folder, state=state, rows=rows, damaged=tuple(aside), said=said, lost=True)
    return None


def _without_checkpoint(run_folder: Path, damaged: list[Path], why: list[str]) -> Continued:
    """A new beginning: all that the run had written moves out of the way."""
    trained = [place for name in ("lora", MODEL) if (place := run_folder / name).exists()]
    if not damaged and not trained:
        return Continued(said="No checkpoint was complete yet: the run begins at iteration 0")
    others = (".lora.good", f".{MODEL}.good", ROWS, "eval", "samples", "summary.json", "report.html")
    aside = [*damaged, *trained, *(place for name in others if (place := run_folder / name).exists())]
    why = [*why, "no other is left"] if why else ["there are trained weights and no checkpoint"]
    return Continued(damaged=tuple(aside), said=_said(why, None))


def _said(why: list[str], folder: Path | None) -> str:
    """What was wrong, and where the run continues, in a line."""
    after = "begins at iteration 0" if folder is None else f"goes on from checkpoint {folder.name}"
    words = "; ".join(why)
    return f"{words[:1].upper()}{words[1:]}: the run {after}" if why else ""


class _Damaged(Exception):
    """A checkpoint that cannot be used, and why."""


def _read_seal(folder: Path) -> _Seal:
    """The seal of a checkpoint; raises `_Damaged` if it is missing or not as it was written."""
    if not (folder / _SEAL).is_file():
        raise _Damaged(f"it has no {_SEAL}")
    try:
        found = read_json(folder / _SEAL)
    except (OSError, ValueError) as error:
        raise _Damaged(f"its {_SEAL} is empty or damaged") from error
    written = found.pop("seal_sha256", None)
    if written != _digest_of_seal(found) and (written is not None or found.keys() - _OLDER_SEAL):
        raise _Damaged(f"its {_SEAL} does not fit its own checksum")
    numbers = [found.get(key) for key in ("iteration", "metrics_bytes")]
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(found.get("sha256"), str):
        raise _Damaged(f"its {_SEAL} does not say iteration, metrics_bytes and sha256")
    if numbers[0] != int(folder.name):
        raise _Damaged(f"its {_SEAL} is of iteration {numbers[0]}")
    rows = Sealed(size=found["metrics_bytes"], digest=found.get("metrics_sha256"))
    run, inputs, parts = found.get("run"), found.get("inputs"), tuple(found.get("parts", ()))
    return _Seal(iteration=found["iteration"], rows=rows, run=run, inputs=inputs, sha256=found["sha256"], parts=parts)


def _read_state(folder: Path, seal: _Seal) -> dict[str, Any]:
    """The state of a checkpoint; raises `_Damaged` if it does not match its seal, `CheckpointError` if it is another
    run's. Parts of what is split are in "parts", by process; they stay on the disk until used."""
    read = list[dict[str, Any]]()
    for name, digest in seal.files().items():
        try:
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise _Damaged(f"{'its checksum' if name == _STATE else f'that of {name}'} does not fit")
            read.append(torch.load(folder / name, map_location="cpu", weights_only=True, mmap=name != _STATE))
        except FileNotFoundError as error:
            raise _Damaged(f"it has no {name}") from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError, RuntimeError, UnpicklingError) as error:
            raise _Damaged(_first_line(error)) from error
    state, *parts = read
    if state.get("run") != seal.run:
        raise CheckpointError(f"the checkpoint {folder} holds the state of another run: {_put_back(folder)}")
    return state | ({"parts": parts} if parts else {})


def own_state(state: Mapping[str, Any], split: Split | None) -> dict[str, Any]:
    """The state that a process of a copy restores: its own part of what is split, whatever processes have written it.
    `state` has whole weights, or parts; `split` are the processes that share them, None if this one holds all."""
    own = (0, 1) if split is None else (split.mesh.get_local_rank(), split.mesh.size())
    memory = state.get("memory", {})
    parts = state.get("parts") or [{AHEAD: memory.get(AHEAD, {})} | {key: state[key] for key in _SPLIT}]
    rows = _rows_of(parts, *own)
    if ahead := rows.pop(AHEAD, None):
        memory = {**memory, AHEAD: ahead}
    return {**state, "memory": memory, **rows}


def _rows_of(parts: Sequence[Any], place: int, number: int) -> Any:
    """The rows of tensors, one after another in `parts`, that process `place` of `number` holds, as `fully_shard` deals
    them out; of what is no such tensor the first."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _rows_of([part[key] for part in parts], place, number) for key in first}
    if not isinstance(first, Tensor) or first.ndim == 0 or len(parts) == number == 1:
        return first
    each = -(-sum(len(part) for part in parts) // number)
    begun, found = 0, list[Tensor]()
    for part in parts:
        low, high = (min(max(row - begun, 0), len(part)) for row in (place * each, (place + 1) * each))
        found += [part[low:high]] if low < high or not found else []
        begun += len(part)
    return torch.cat(found)


def state_of(folder: Path, digest: str) -> dict[str, Any] | None:
    """The state of a checkpoint with this digest; None if there is none."""
    try:
        seal = _read_seal(folder)
        return _read_state(folder, seal) if seal.sha256 == digest else None
    except (_Damaged, ValueError):
        return None


def sealed_digest(folder: Path) -> str:
    """The digest of a checkpoint's state, from its seal."""
    return _read_seal(folder).sha256


def check_newest(run_folder: Path) -> int | None:
    """The number of the newest checkpoint, from its seal alone, without weights and rows; None without one.
    Raises CheckpointError: it is another run's, or damaged; ValueError: the manifest cannot be read."""
    found = _numbered(run_folder)
    if not found:
        return None
    try:
        seal = _read_seal(found[-1])
        _refuse_foreign(run_folder, found[-1], seal)
        if not (found[-1] / _STATE).is_file():
            raise _Damaged(f"it has no {_STATE}")
    except _Damaged as error:
        raise CheckpointError(
            f"the checkpoint {found[-1]} cannot be read ({error}): 'flowrl train resume={run_folder}' takes the newest "
            "that is whole, and keeps this one aside"
        ) from error
    return seal.iteration


def _put_back(folder: Path) -> str:
    """What to do about a checkpoint that does not belong to the run."""
    return f"put the run's own back, or remove {folder} to go on from the one before, or from iteration 0"


def _refuse_foreign(run_folder: Path, folder: Path, seal: _Seal) -> None:
    """Refuses a checkpoint of another run than the manifest's, or made with what that run never had."""
    manifest = read_manifest(run_folder)
    own = manifest.get("run", seal.run)
    if own != seal.run:
        raise CheckpointError(f"{folder} is of another run ({seal.run}; this one is {own}): {_put_back(folder)}")
    known = [entry.get("inputs_digest") for entry in (manifest, *manifest.get("resumed", ()))]
    if "inputs_digest" in manifest and seal.inputs not in known:
        raise CheckpointError(
            f"the checkpoint {folder} was made with other inputs than manifest.json records: one of the two was "
            f"replaced; {_put_back(folder)}"
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def save_lora(folder: Path, pipeline: Pipeline, policy: Policy) -> None:
    """Replaces the LoRA in a folder, file by file, each in one step; a model of two experts has two."""
    staged = folder.with_name(_STAGED)
    pipeline.save_lora(staged, policy.tensors(), policy.config)
    sync_tree(staged)
    for path in sorted(staged.rglob("*.safetensors")):
        place = folder / path.relative_to(staged)
        make_folder(place.parent)
        path.chmod(place.parent.stat().st_mode & 0o666)  # safetensors keeps a file to its owner, whatever the umask
        path.replace(place)
        sync(place.parent)
    shutil.rmtree(staged)


def remove_halves(run_folder: Path) -> None:
    """Removes what a killed process had begun to write; no process may be at work in the folder."""
    for old in (run_folder / _FOLDER).glob(".[0-9]*.old"):  # killed between two renames
        number = old.name.removeprefix(".").removesuffix(".old")
        if not (old.parent / number).exists():
            old.replace(old.parent / number)
    put_back(run_folder / MODEL)
    staged = [run_folder / name for name in (_STAGED, ".shipped.keeping", ".shipped.restoring")]
    for path in [*staged, *(run_folder / _FOLDER).glob(".[0-9]*")]:
        shutil.rmtree(path, ignore_errors=True)
    for path in run_folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


def restore(
    state: dict[str, Any],
    policy: TrainedWeights,
    optimizer: torch.optim.Optimizer,
    learners: Mapping[str, torch.optim.Optimizer] = MappingProxyType({}),
) -> int:
    """Restores a checkpoint, also of slots that learn by themselves; returns the number of finished iterations.

    Optimizers keep their own learning rate and other settings: those are not state.

    Raises CheckpointError: it holds other weights than the policy has.
    """
    try:
        if state["slots"].keys() != policy.slots.keys():
            raise KeyError(f"copies of the policy: {[*state['slots']]}, now {[*policy.slots]}")
        policy.load(state["policy"])
        for slot, tensors in state["slots"].items():
            for name, tensor in tensors.items():
                policy.slots[slot][name].copy_(tensor)
        for one, moments in ((optimizer, state["optimizer"]), *((learners[s], state["learners"][s]) for s in learners)):
            groups = [{key: value for key, value in group.items() if key != "params"} for group in one.param_groups]
            refuse_other_moments(one, moments)
            one.load_state_dict(moments)
            for group, values in zip(one.param_groups, groups, strict=True):
                group.update(values)
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint holds other weights than the configuration asks for ({_first_line(error)}): what is "
            "trained (policy.*, recipe, pipeline.model) cannot change within a run; start a new one, from its LoRA by "
            "policy.init_lora, or from its model by pipeline.model"
        ) from error
    return int(state["iteration"])
