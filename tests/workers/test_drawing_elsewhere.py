"""What a worker reads of a checkpoint, and which weights a run draws with that goes on; no Ray takes part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import tiny_runs

from flowrl.config.train import load_config
from flowrl.pipelines.weights.trained_weights import Held
from flowrl.training import paths
from flowrl.training.draws import Drawn
from flowrl.workers.actor import Duty, RolloutWorker
from flowrl.workers.parcels import lay_down


@pytest.mark.slow
def test_no_worker_reads_a_text_encoder(tmp_path: Path, tiny_sd3_folder: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_sd3_folder, model)
    weights = list(model.glob("text_encoder*/*.safetensors"))
    assert weights
    for file in weights:
        file.write_bytes(b"nobody reads this")
    config = load_config(tiny_runs(tmp_path, model).config, [])
    worker = RolloutWorker()
    probe, _ = lay_down({}, [], str)
    given: dict[str, Any] = {
        "config": config,
        "learners": 1,
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "probe": probe,
    }
    worker.load(Duty(**given, folder=os.getcwd()))
    assert sum(parameter.numel() for parameter in worker.pipeline.denoiser.parameters()) > 0
    assert worker.own


class Asked:
    """Workers that note which iterations they are asked for, with which weights."""

    def __init__(self) -> None:
        self.weights = list[tuple[int, float]]()

    def send(self, weights: dict[str, Held], split: None) -> float:
        return float(weights["w"].values)

    def submit(self, requests: list[int], version: float) -> list[int]:
        self.weights += [(iteration, version) for iteration in requests]
        return requests

    def collect(self, tickets: list[int]) -> Iterator[Drawn]:
        yield from ()


def held(number: float) -> Held:
    return Held(values=torch.tensor(number), dtype=torch.float32, shape=())


def drawn_with(
    staleness: int, iterations: range, memory: dict[str, Any], *, total: int = 9, idle: Collection[int] = ()
) -> list[tuple[int, float]]:
    """Iterations that are asked for with the weights, a number that says which iteration began with them."""
    workers, now = Asked(), [0]
    sampler: Any = SimpleNamespace(idle=idle)
    loop: Any = SimpleNamespace(
        run=SimpleNamespace(rollouts=workers), memory=memory, ahead={},
        config=SimpleNamespace(
            workers=SimpleNamespace(staleness=staleness), num_iterations=total, sampler=sampler, seed=0
        ),
        policy=SimpleNamespace(split=None, held=lambda: {"w": held(float(now[0]))}),
        batch=lambda iteration: SimpleNamespace(iteration=iteration),
    )  # fmt: skip
    how: Any = SimpleNamespace(steps=(0,), keep_means=False)
    for now[0] in iterations:
        if now[0] not in idle:
            batch: Any = SimpleNamespace(iteration=now[0])
            assert list(paths._draw_elsewhere(loop, batch, how)) == []
    return workers.weights


@pytest.fixture(autouse=True)
def plain_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is the iteration's number; iterations in `idle` sample nothing."""
    monkeypatch.setattr(paths, "requests_of", lambda loop, batch, *_: [batch.iteration])
    monkeypatch.setattr(paths, "stochastic_steps", lambda sampler, seed, later: () if later in sampler.idle else (0,))


@pytest.mark.parametrize("staleness", [0, 1, 2, 4, 20])
def test_an_iteration_is_drawn_with_weights_of_so_many_iterations_before(staleness: int) -> None:
    memory: dict[str, Any] = {}
    assert drawn_with(staleness, range(9), memory) == [(j, max(0, j - staleness)) for j in range(9)]
    kept = memory.get("ahead", {})
    assert {begun: float(weights["w"]) for begun, weights in kept.items()} == {
        begun: begun for begun in range(max(0, 9 - staleness), 9)
    }


@pytest.mark.parametrize("idle", [(), (3,), (4,), (2, 3, 5)])
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_a_run_that_goes_on_asks_for_the_same_images(staleness: int, idle: tuple[int, ...]) -> None:
    whole = dict(drawn_with(staleness, range(9), {}, idle=idle))
    for stop in range(1, 9):
        memory: dict[str, Any] = {}
        begun = drawn_with(staleness, range(stop), memory, idle=idle)
        again = drawn_with(staleness, range(stop, 9), memory, idle=idle)
        assert dict(begun) | dict(again) == whole
        assert {j for j, _ in again} == {j for j in range(stop, 9) if j not in idle}


def test_iterations_beyond_the_end_are_not_asked_for_until_there_are_more() -> None:
    memory: dict[str, Any] = {}
    assert [j for j, _ in drawn_with(3, range(4), memory, total=4)] == [0, 1, 2, 3]
    assert drawn_with(3, range(4, 6), memory, total=6) == [(4, 1), (5, 2)]


@pytest.mark.parametrize(("staleness", "first"), [(0, 3), (1, 2), (2, 1), (3, 1)])
def test_another_staleness_takes_the_oldest_weights_that_it_allows(staleness: int, first: int) -> None:
    """A run with staleness 2 goes on at iteration 3 with another, where `resume_changed` lets it."""
    memory: dict[str, Any] = {}
    drawn_with(2, range(3), memory)
    assert drawn_with(staleness, range(3, 4), memory)[0] == (3, first)


def test_weights_of_a_checkpoint_of_before_are_known() -> None:
    memory: dict[str, Any] = {"ahead": {"iteration": 3, "weights": {"w": torch.tensor(2.0)}}}
    assert drawn_with(1, range(3, 4), memory) == [(3, 2), (4, 3)]
