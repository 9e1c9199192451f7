"""Two processes: on two cards by NCCL, in the CPU form by gloo; with one card they are left out, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_place import Figures, Place
from gpu_runs import apart, rows_of, weights_apart

pytestmark = pytest.mark.seconds(100)
CLOSE = 1e-3
"""On cards; on a CPU processes differ from one by the order in which they add up."""
KINDS = {
    "replicated": (),
    "sharded": ("parallel.shard=2",),
    "context": ("parallel.context=2",),
}


@pytest.fixture(scope="module")
def runs(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of short runs of a random SD3, of one process and of two, made in two launches."""
    if place.on_card and torch.cuda.device_count() < 2:
        pytest.skip("one card here, and two processes want two")
    from split_runs import command
    from two_processes import train_on_two

    folder = tmp_path_factory.mktemp("several")
    own = f"pipeline.device={place.device.type}", "checkpoint_every=1", "eval_every=0", "keep_checkpoints=9"

    def told(name: str, *more: str) -> tuple[int, bool, list[str]]:
        return 0, False, command(folder, "sd3", "grpo", folder / name, *own, *more)

    two: list[tuple[int, bool, Any]] = [told(name, *more) for name, more in KINDS.items()]
    train_on_two(folder, two)
    copied = ["copy", str(folder / "replicated"), str(folder / "narrowed"), "000002"]
    again = told("narrowed", f"resume={folder / 'narrowed'}")
    train_on_two(folder, [told("alone"), (0, False, copied), again], processes=1)
    return folder


@pytest.mark.parametrize("kind", list(KINDS))
def check_kind(place: Place, figures: Figures, runs: Path, kind: str) -> None:
    """Two processes that share images, weights or tokens give one process's numbers."""
    _same(place, figures, runs / kind, runs / "alone")


def check_narrower(place: Place, figures: Figures, runs: Path) -> None:
    """A run of two processes goes on with one."""
    _same(place, figures, runs / "narrowed", runs / "replicated")


def check_timeout(place: Place, figures: Figures) -> None:
    """One process may save for eleven minutes while others wait."""
    pytest.skip("eleven minutes do not fit into ten: start a run on two cards and stop one process for so long")


def _same(place: Place, figures: Figures, found: Path, wanted: Path) -> None:
    figures["rows apart"] = rows = apart(rows_of(found), rows_of(wanted))
    figures["weights apart"] = weights = weights_apart(found, wanted)
    assert max(rows, weights) < place.pick(CLOSE, 1e-5)
