"""Two workers on Ray draw what the learner would have drawn, bit for bit. Ray is started once, processes are kept."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from kept_workers import Kept, start_warm, without_toy
from tiny_runs import TinyRuns, differences, lasting, lora, metrics, model_tensors, tiny_runs
from toy_pipeline import toy_in_place

import flowrl.runtime.cluster
from flowrl.cli import main
from flowrl.runtime.cluster import connect, disconnect
from flowrl.workers import parcels, rollouts
from flowrl.workers.dispatch import PieceDone
from flowrl.workers.ray_backend import RayBackend

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray")

WORKERS = "workers.rollouts=2"
STALE = (WORKERS, "workers.staleness=1")


@pytest.fixture(scope="module")
def there(warm_python: str) -> Iterator[None]:
    """Ray, started as runs start it, with kept actors; it leaves nothing behind."""
    helpers = Path(__file__).parents[1] / "helpers"
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(helpers), prepend=os.pathsep)
        start_warm(patch, warm_python)
        made = connect(None, workers=3)
        assert connect(None, workers=3) is made
        assert signal.getsignal(signal.SIGTERM) is handler
        patch.setattr(flowrl.runtime.cluster, "disconnect", lambda: None)  # at the end of a run
        patch.setattr(rollouts, "RayBackend", Kept)
        yield
    disconnect()
    assert not ray.is_initialized()
    assert made.folder is not None
    assert not made.folder.exists()


@pytest.fixture
def toy(there: None, tmp_path: Path) -> Iterator[TinyRuns]:
    Kept.answers = []
    for config in toy_in_place(tmp_path):
        yield TinyRuns(folder=tmp_path, config=config)


@pytest.fixture
def tiny(there: None, tmp_path: Path, tiny_sd3_folder: Path, monkeypatch: pytest.MonkeyPatch) -> TinyRuns:
    monkeypatch.setattr(Kept, "family", staticmethod(without_toy))
    return tiny_runs(tmp_path, tiny_sd3_folder)


def rows(run: Path) -> list[dict[str, Any]]:
    """Rows of a run without times and numbers of workers."""
    return [{key: value for key, value in row.items() if not key.startswith("workers/")} for row in metrics(run)]


def assert_same(run: Path, other: Path) -> None:
    assert rows(run) == rows(other)
    assert lora(run) == lora(other)


def numbers(run: Path) -> Mapping[str, float]:
    """Numbers of workers in the last row."""
    return {key: value for key, value in metrics(run)[-1].items() if key.startswith("workers/")}


def test_a_worker_killed_and_one_added_change_no_bit(
    toy: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("num_iterations=3", "rollout_batch_size=1")
    here = toy.train("here", *sizes)
    row = rollouts.Rollouts.row

    def grown(self: rollouts.Rollouts) -> dict[str, float]:
        (toy.folder / "there" / rollouts.ASKED).write_text("3")
        until = time.monotonic() + 120
        while self.dispatcher.alive < 3 and time.monotonic() < until:
            time.sleep(0.05)
        return row(self)

    monkeypatch.setattr(rollouts.Rollouts, "row", grown)
    monkeypatch.setattr(Kept, "dies_at", 4)
    there = toy.train("there", *sizes, WORKERS)
    assert Kept.dies_at is None
    assert_same(here, there)
    assert "was lost (its process ended)" in capsys.readouterr().err
    assert {type(answer).__name__ for answer in Kept.answers} >= {"WorkerGone", "PieceDone"}
    assert numbers(there)["workers/alive"] == 3
    assert numbers(there)["workers/wait_seconds"] > 0
    assert {answer.worker for answer in Kept.answers if isinstance(answer, PieceDone)} == {0, 1, 2}


@pytest.mark.parametrize(
    "settings",
    [
        ("credit.method=g2rpo", "sampler.kernel=cps"),
        ("credit.method=dense_grpo",),
        (
            "recipe=forward",
            "objective.name=nft",
            "sampler.kernel=ode",
            "slots.old_decay=constant",
            "slots.old_decay_value=0.5",
        ),
        ("recipe=visited", "objective.name=art", "sampler.kernel=ode"),
        ("recipe=visited", "policy.teachers=[{guidance_scale: 3}]", "sampler.kernel=ode"),
    ],
    ids=["branches", "values", "nft", "art", "opd"],
)
def test_plans_and_copies_of_the_policy_are_drawn_alike(toy: TinyRuns, settings: tuple[str, ...]) -> None:
    more = ("num_iterations=2", *settings)
    assert_same(toy.train("here", *more), toy.train("there", *more, WORKERS))


def test_a_tiny_model_is_drawn_alike(tiny: TinyRuns) -> None:
    sizes = ("rollout_batch_size=2", "sampler.guidance_scale=3", "pipeline.dtype=bfloat16")
    assert_same(tiny.train("here", *sizes), tiny.train("there", *sizes, WORKERS))


def test_all_weights_come_by_memory_or_through_ray(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker is killed; none is on the learner's machine; the machine has no memory left."""
    sizes = ("rollout_batch_size=2", "pipeline.dtype=bfloat16", "policy.train=full", "policy.lora_rank=null")
    here = tiny.train("here", *sizes, "threads=1")
    monkeypatch.setattr(parcels, "BUNDLE", 2**15)
    monkeypatch.setattr(Kept, "dies_at", 2)
    by_ray = mock.Mock(side_effect=RayBackend.put)
    monkeypatch.setattr(RayBackend, "put", lambda backend, data: by_ray(backend, data))
    runs, calls = [tiny.train("near", *sizes, "threads=1", WORKERS)], [by_ray.call_count]
    monkeypatch.setattr(Kept, "far", True)
    runs.append(tiny.train("far", *sizes, "threads=1", WORKERS))
    calls.append(by_ray.call_count)
    assert "no room" not in capsys.readouterr().err
    monkeypatch.setattr(Kept, "far", False)
    room = os.posix_fallocate

    def scarce(fd: int, offset: int, size: int) -> None:
        if size > 2**12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    runs.append(tiny.train("full", *sizes, "threads=1", WORKERS))
    calls.append(by_ray.call_count)
    assert calls[0] == 0 < calls[1] < calls[2]
    assert "Weights go to workers through Ray from now on: there is no room" in capsys.readouterr().err
    for run in runs:
        assert rows(here) == rows(run)
        assert differences(model_tensors(here), model_tensors(run)) == 0


def test_stale_rollouts_are_scored_again_and_a_resumed_run_draws_them_again(toy: TinyRuns) -> None:
    whole = toy.train("whole", "num_iterations=4", *STALE)
    assert [row["ratio_max_deviation"] for row in rows(whole)] == [0] * 4
    assert [row["ratio_first_deviation"] > 0 for row in rows(whole)] == [False, True, True, True]
    fresh = toy.train("fresh", "num_iterations=4")
    still = toy.train("still", "num_iterations=2", "optim.lr=1e-30")
    rewards = {run.name: [row["reward"] for row in rows(run)] for run in (whole, fresh, still)}
    assert rewards["whole"][0] == rewards["fresh"][0]
    assert rewards["whole"][1] == rewards["still"][1]  # drawn with the weights that the run began with
    assert rewards["whole"][1] != rewards["fresh"][1]

    parts = toy.train("parts", "num_iterations=2", *STALE)
    assert main(["train", f"resume={parts}", "num_iterations=4"]) == 0
    assert_same(whole, parts)
    assert str(lasting(whole)) == str(lasting(parts))
