"""Two processes: on two cards by NCCL, in the CPU form by gloo; with one card they are left out, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_place import Figures, Place
from gpu_runs import apart, rows_of, weights_apart

pytestmark = pytest.mark.seconds(100)
CLOSE, CLOSE_ON_CPU = 1e-3, 1e-4
"""On cards, and on a CPU, where processes differ from one by the order in which they add up and by Adam's first steps,
which divide a gradient by itself."""
KINDS = {
    "replicated": ("sd3",),
    "sharded": ("sd3", "parallel.shard=2"),
    "context": ("flux", "parallel.context=2"),
}
"""How two processes work together -> a family that can, and the setting; diffusers splits no tokens of SD3."""


@pytest.fixture(scope="module")
def runs(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of short runs of a random SD3, of one process and of two, made in two launches."""
    if place.on_card and torch.cuda.device_count() < 2:
        pytest.skip("one card here, and two processes want two")
    from split_runs import command
    from two_processes import train_on_two

    folder = tmp_path_factory.mktemp("several")
    own = f"pipeline.device={place.device.type}", "checkpoint_every=1", "eval_every=0", "keep_checkpoints=9"

    def told(name: str, family: str, *more: str) -> tuple[int, bool, list[str]]:
        return 0, False, command(folder, family, "grpo", folder / name, *own, *more)

    two: list[tuple[int, bool, Any]] = [told(name, *more) for name, more in KINDS.items()]
    train_on_two(folder, two)
    copied = ["copy", str(folder / "replicated"), str(folder / "narrowed"), "000002"]
    one = [told("sd3", "sd3"), told("flux", "flux"), (0, False, copied)]
    train_on_two(folder, [*one, (0, False, [f"resume={folder / 'narrowed'}"])], processes=1)
    return folder


@pytest.mark.parametrize("kind", list(KINDS))
def check_kind(place: Place, figures: Figures, runs: Path, kind: str) -> None:
    """Two processes that share images, weights or tokens give one process's numbers."""
    _same(place, figures, runs / kind, runs / KINDS[kind][0])


def check_narrower(place: Place, figures: Figures, runs: Path) -> None:
    """A run of two processes goes on with one."""
    _same(place, figures, runs / "narrowed", runs / "replicated")


def check_timeout(place: Place, figures: Figures) -> None:
    """One process may save for eleven minutes while others wait."""
    pytest.skip("eleven minutes do not fit into ten: start a run on two cards and stop one process for so long")


def _same(place: Place, figures: Figures, found: Path, wanted: Path) -> None:
    figures["rows apart"] = rows = apart(rows_of(found), rows_of(wanted))
    figures["weights apart"] = weights = weights_apart(found, wanted)
    figures["norm"] = norm = rows_of(found)[-1]["grad_norm"]
    assert norm > 0
    assert max(rows, weights) < place.pick(CLOSE, CLOSE_ON_CPU)
