"""What a worker reads of a checkpoint, and which weights a run draws with that goes on; no Ray takes part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import tiny_runs

from flowrl.config.train import load_config
from flowrl.training import paths
from flowrl.training.draws import Drawn
from flowrl.workers.actor import Duty, RolloutWorker


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
    worker.load(Duty(config=config, learners=1, device="cpu", threads=torch.get_num_threads(), folder=os.getcwd()))
    assert sum(parameter.numel() for parameter in worker.pipeline.denoiser.parameters()) > 0
    assert worker.policy.tensors()


class Asked:
    """Workers that note the weights they are asked to draw with."""

    def __init__(self) -> None:
        self.weights = list[float]()

    def submit(self, requests: list[Any], weights: dict[str, torch.Tensor]) -> list[int]:
        self.weights.append(float(weights["w"]))
        return [0]

    def collect(self, tickets: list[int]) -> Iterator[Drawn]:
        yield from ()


@pytest.mark.parametrize(("staleness", "drawn_with", "kept"), [(1, [1.0, 2.0], {"ahead"}), (0, [2.0], set[str]())])
def test_weights_of_the_iteration_before_are_drawn_with_only_ahead(
    staleness: int, drawn_with: list[float], kept: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was ahead goes on, with `workers.staleness` as it was or with 0."""
    monkeypatch.setattr(paths, "_requests", lambda *_, **__: [])
    workers = Asked()
    loop: Any = SimpleNamespace(
        run=SimpleNamespace(rollouts=workers), memory={"ahead": {"iteration": 3, "weights": {"w": torch.tensor(1.0)}}},
        config=SimpleNamespace(workers=SimpleNamespace(staleness=staleness), num_iterations=9), ahead={},
        policy=SimpleNamespace(tensors=lambda: {"w": torch.tensor(2.0)}), batch=lambda iteration: None,
    )  # fmt: skip
    batch: Any = SimpleNamespace(iteration=3)
    how: Any = SimpleNamespace(steps=(0,))
    assert list(paths._draw_elsewhere(loop, batch, how, (0,))) == []
    assert workers.weights == drawn_with
    assert set(loop.memory) == kept
