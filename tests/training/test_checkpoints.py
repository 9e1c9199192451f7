"""Checkpoints as files: their order, whose they are, what a killed process leaves, and what is put back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import differences

from flowrl.training.checkpoints import (
    CheckpointError,
    begin_checkpoint,
    checkpoints,
    find_checkpoint,
    own_state,
    prune,
    remove_halves,
    restore,
    sealed_digest,
    state_of,
    write_checkpoint,
    write_part,
)
from flowrl.training.trackers.metric_rows import Sealed


def write(run: Path, number: int, *, inputs: str = "first", keep: int = 9) -> Path:
    """A checkpoint with next to nothing in it."""
    state = {"number": torch.tensor(number)}
    write_checkpoint(run, number, state, keep=keep, rows=Sealed(), run="a run", inputs=inputs)
    return run / "checkpoints" / f"{number:06d}"


def names(run: Path) -> list[str]:
    return [path.name for path in checkpoints(run)]


def test_checkpoints_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (1_000_000, 999_999):
        write(tmp_path, number)
    assert names(tmp_path) == ["999999", "1000000"]
    found = find_checkpoint(tmp_path)
    assert found.folder is not None
    assert found.folder.name == "1000000"
    prune(tmp_path, 1)
    assert names(tmp_path) == ["1000000"]


def test_a_checkpoint_is_of_inputs_that_the_manifest_tells_of(tmp_path: Path) -> None:
    """Also of those that a run went on with later: a change that was allowed stays so."""
    history = {"run": "a run", "inputs_digest": "first", "resumed": [{"inputs_digest": "second"}]}
    (tmp_path / "manifest.json").write_text(json.dumps(history))
    for number, inputs in enumerate(("first", "second"), start=1):
        folder = write(tmp_path, number, inputs=inputs)
        assert find_checkpoint(tmp_path).folder == folder
    write(tmp_path, 3, inputs="third")
    with pytest.raises(CheckpointError, match="other inputs than manifest"):
        find_checkpoint(tmp_path)


def test_what_was_set_aside_comes_back_where_its_place_is_empty(tmp_path: Path) -> None:
    """A checkpoint that is written again is moved aside first; a kill may come before the new one has its name."""
    folder = write(tmp_path, 4)
    aside = folder.with_name(".000004.old")
    folder.rename(aside)
    remove_halves(tmp_path)
    assert names(tmp_path) == ["000004"]
    digest = sealed_digest(folder)
    folder.rename(aside)
    write(tmp_path, 4, inputs="second")
    aside.mkdir()
    remove_halves(tmp_path)
    assert not aside.exists()
    assert names(tmp_path) == ["000004"]
    assert sealed_digest(folder) == digest


def test_a_process_takes_the_state_that_was_named(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    state = state_of(folder, sealed_digest(folder))
    assert state is not None
    assert int(state["number"]) == 1
    assert state_of(folder, sealed_digest(write(tmp_path, 2))) is None


# ---- weights that are split ------------------------------------------------------------------------------------------

MOMENTS = {"exp_avg": -torch.arange(10.0).view(5, 2), "step": torch.tensor(3.0)}
WHOLE: dict[str, Any] = {
    "policy": {"a": torch.arange(10.0).view(5, 2), "b": torch.arange(1.0)},
    "slots": {},
    "optimizer": {"state": {0: MOMENTS}, "param_groups": [{"lr": 0.1}]},
}
"""Five rows, which no number of processes above one divides; and one."""


def split_into(number: int) -> list[Any]:
    """The processes of a copy, of which this is the one that is asked for."""
    return [
        SimpleNamespace(mesh=SimpleNamespace(get_local_rank=lambda place=place: place, size=lambda: number))
        for place in range(number)
    ]


def write_split(run: Path, number: int, processes: int) -> Path:
    """A checkpoint of which each process writes what torch's `chunk` gives it."""
    begin_checkpoint(run, number)
    digests = [write_part(run, number, place, dealt(processes, place)) for place in range(processes)]
    rest = {"iteration": number}
    write_checkpoint(run, number, rest, keep=9, rows=Sealed(), run="a run", inputs="first", parts=digests)
    return run / "checkpoints" / f"{number:06d}"


def dealt(processes: int, place: int) -> Any:
    def rows(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.chunk(processes)
        return found[place].clone() if place < len(found) else tensor[:0]

    policy = {name: rows(tensor) for name, tensor in WHOLE["policy"].items()}
    state = {0: {"exp_avg": rows(MOMENTS["exp_avg"]), "step": MOMENTS["step"]}}
    return {"policy": policy, "slots": {}, "optimizer": {"state": state, "param_groups": [{"lr": 0.1}]}}


@pytest.mark.parametrize("written", [1, 2, 3, 7])
@pytest.mark.parametrize("read", [1, 2, 3, 7])
def test_rows_come_to_whoever_holds_them(tmp_path: Path, written: int, read: int) -> None:
    write_split(tmp_path, 1, written)
    state = find_checkpoint(tmp_path).state
    assert state is not None
    for place, split in enumerate(split_into(read)):
        found = own_state(state, split if read > 1 else None)
        assert found["iteration"] == 1
        assert differences({key: found[key] for key in WHOLE}, dealt(read, place)) == 0


def test_a_checkpoint_that_is_whole_is_split_on_the_way(tmp_path: Path) -> None:
    state = {"iteration": 1, **WHOLE}
    assert own_state(state, None)["policy"]["a"] is WHOLE["policy"]["a"]
    for place, split in enumerate(split_into(3)):
        assert differences({key: own_state(state, split)[key] for key in WHOLE}, dealt(3, place)) == 0


def test_parts_are_no_checkpoint_before_all_are_sealed(tmp_path: Path) -> None:
    """A process that is killed while it writes its part, or before the seal, leaves the checkpoint before."""
    before = write_split(tmp_path, 1, 2)
    folder = begin_checkpoint(tmp_path, 2)
    write_part(tmp_path, 2, 0, dealt(2, 0))
    (folder / "part-001.pt").write_bytes(b"half")
    assert find_checkpoint(tmp_path).folder == before
    remove_halves(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000001"]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda part: part.write_bytes(part.read_bytes()[:-9] + b"something"), "that of part-001.pt does not fit"),
        (Path.unlink, "it has no part-001.pt"),
    ],
    ids=["flipped", "gone"],
)
def test_a_part_that_is_damaged_is_told(tmp_path: Path, harm: Callable[[Path], object], words: str) -> None:
    before, newest = write_split(tmp_path, 1, 2), write_split(tmp_path, 2, 2)
    harm(newest / "part-001.pt")
    found = find_checkpoint(tmp_path)
    assert found.folder == before
    assert words in found.said


class NoWeights:
    """A policy of one weight, without copies."""

    slots: dict[str, Any] = {}  # noqa: RUF012 - nothing is ever in it

    def __init__(self) -> None:
        self.weight = torch.ones(2, requires_grad=True)

    def load(self, tensors: Any) -> None:
        self.weight.data.copy_(tensors["weight"])


def test_moments_come_back_and_settings_are_those_of_now() -> None:
    def optimizer(policy: NoWeights, **settings: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW([policy.weight], **settings)

    before, now = NoWeights(), NoWeights()
    first = optimizer(before, lr=0.1, weight_decay=0.5, betas=(0.5, 0.6))
    before.weight.sum().backward()
    first.step()
    state = {"iteration": 3, "slots": {}, "policy": {"weight": before.weight.detach()}, "optimizer": first.state_dict()}
    then = optimizer(now, lr=0.2, weight_decay=0.25, betas=(0.75, 0.875))
    assert restore(state, now, then) == 3  # type: ignore[arg-type]
    (group,) = then.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.2, 0.25, (0.75, 0.875))
    assert torch.equal(then.state[now.weight]["exp_avg"], first.state[before.weight]["exp_avg"])
    assert torch.equal(now.weight, before.weight)
