"""Workers that would draw nothing, or not all, are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from config_files import as_launched
from toy_pipeline import toy_config, write_toy

from flowrl.config.train import TrainConfig
from flowrl.session.preflight import recipe_of
from flowrl.workers import layout
from flowrl.workers.layout import check_workers, join_cluster, local_gpus


def checked(config: TrainConfig, *, here: bool = True) -> None:
    check_workers(config, recipe_of(config).only_here(config), here=here)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["recipe=backprop", "sampler.kernel=ode"], "sends the gradient through its own sampling"),
        (["recipe=preference", "objective.name=dpo_offline"], "draws nothing"),
    ],
)
def test_refused(tmp_path: Path, settings: list[str], words: str) -> None:
    config = toy_config(write_toy(tmp_path), "workers.rollouts=2", *settings)
    with pytest.raises(ValueError, match=words):
        checked(config)
    checked(toy_config(write_toy(tmp_path), *settings))


def test_learners_share_workers_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_launched(monkeypatch, 2)
    checked(toy_config(write_toy(tmp_path), "workers.rollouts=4"))
    with pytest.raises(ValueError, match=r"workers\.rollouts \(3\) does not divide by 2"):
        checked(toy_config(write_toy(tmp_path), "workers.rollouts=3"))


def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = toy_config(write_toy(tmp_path), "workers.rollouts=1")
    with pytest.raises(ValueError, match=r"workers\.rollouts=1 needs Ray.*flowrl's folder, pip install -e '\.\[ray\]'"):
        checked(config)
    checked(config, here=False)


def test_stale_ratios_are_allowed_for_every_recipe_that_samples(tmp_path: Path) -> None:
    for settings in (
        [], ["credit.method=g2rpo"], ["recipe=forward", "objective.name=awm", "sampler.kernel=ode"],
        ["recipe=preference", "objective.name=dpo", "sampler.kernel=ode"],
    ):  # fmt: skip
        config = toy_config(write_toy(tmp_path), "workers.rollouts=1", "workers.staleness=1", *settings)
        recipe_of(config).check(config)
        checked(config)


def test_workers_get_the_gpus_that_no_learner_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = toy_config(write_toy(tmp_path), "workers.rollouts=3")
    assert local_gpus(config, torch.device("cpu"), 1) == []
    assert local_gpus(config, torch.device("cuda", 0), 1) == ["1", "2", "3"]
    assert local_gpus(config, torch.device("cuda", 2), 1) == ["0", "1", "3"]
    with pytest.raises(ValueError, match=r"ask for 3 GPUs .* has 2 for them of its 4"):
        local_gpus(config, torch.device("cuda", 0), 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert local_gpus(config, torch.device("cuda", 0), 1) == ["5", "6", "7"]
    split = toy_config(write_toy(tmp_path), "workers.rollouts=2", "workers.shard=2")
    with pytest.raises(ValueError, match=r"ask for 4 GPUs .*rollouts=2 of workers\.shard=2 processes of 1.* has 3 for"):
        local_gpus(split, torch.device("cuda", 0), 1)


def test_every_process_that_learns_keeps_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where some of them share the tokens of an image, and count as one where images are divided."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    lent = list[Any]()

    def connected(address: str | None, *, workers: int, gpus: Any) -> Any:
        lent.append(gpus)
        return SimpleNamespace(address="here:1")

    monkeypatch.setattr(layout, "connect", connected)
    run: Any = SimpleNamespace(device=torch.device("cuda", 0), world=1, processes=2, main=True)
    assert join_cluster(toy_config(write_toy(tmp_path), "workers.rewards=2"), run) == "here:1"
    assert lent == [["2", "3"]]


def test_one_gpu_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    shared = toy_config(write_toy(tmp_path), "workers.rollouts=2", "workers.rollout_gpus=0.3")
    with pytest.raises(ValueError, match="weights by NCCL each need a GPU: set"):
        toy_config(write_toy(tmp_path), "workers.rollouts=1", "workers.shard=2", "workers.rollout_gpus=0.5")
    assert local_gpus(shared, torch.device("cuda", 0), 1) == ["0"]
    with pytest.raises(ValueError, match="give shares below 1"):
        local_gpus(toy_config(write_toy(tmp_path), "workers.rollouts=2"), torch.device("cuda", 0), 1)
