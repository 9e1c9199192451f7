"""Checkpoints as files: their order, whose they are, what a killed process leaves, and what is put back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.training.checkpoints import (
    CheckpointError,
    checkpoints,
    find_checkpoint,
    prune,
    remove_halves,
    restore,
    sealed_digest,
    state_of,
    write_checkpoint,
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
