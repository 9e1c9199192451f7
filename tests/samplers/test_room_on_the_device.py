"""Latents that the device has while an iteration is sampled: those of one batch, as many as a plan counts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretend_gpu import Pretended, pretend_gpu
from pretend_runs import in_short
from torch import Tensor
from toy_pipeline import toy_config, toy_in_place

from flowrl.credit import CREDIT
from flowrl.recipes.grpo_counts import counts
from flowrl.samplers import KERNELS, Velocity, build_schedule
from flowrl.training.draws import AskedPrompts, Batch, Draws
from flowrl.training.learner import NetworkCounter
from flowrl.training.paths import Paths, sample_paths, stochastic_steps
from flowrl.trajectory import Conditioning, Sampled

LATENT = (2, 4, 4)
STEPS = ("sampler.num_steps=6", "rollout_batch_size=4", "group_size=4")
CASES: dict[str, tuple[str, ...]] = {
    "trajectories": (),
    "trajectories with means": ("objective.name=guard",),
    "completions": ("credit.method=dense_grpo",),
    "branches": ("credit.method=tempflow", "credit.branches=2"),
    "branches on strides": ("credit.method=g2rpo", "credit.strides=[1,2,3]", "sampler.sde_window_range=[0,4]"),
    "trees": ("credit.method=branch_grpo", "credit.splits=[0,2]"),
}


class Drawing(Draws):
    """Draws for a network that keeps nothing and needs no room."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self.config, self.geometry, self.device = config, config.resolve_batch(1), device
        self.pipeline: Any = SimpleNamespace(latent_shape=LATENT)
        self.network = NetworkCounter(lambda *_: torch.zeros(()), {})
        self.run = SimpleNamespace(rollouts=None)

    def velocity(self, cond: Conditioning, scale: float | None = None) -> Velocity:
        return lambda x, sigma, timestep: 0.5 * x


class Taken:
    """A scoring that looks at what it is given."""

    def __init__(self) -> None:
        self.numbers, self.on_device = list[int](), 0

    def add(self, latents: Tensor, group: Tensor, numbers: range) -> None:
        assert len(latents) == len(group) == len(numbers)
        self.numbers += numbers
        self.on_device += isinstance(latents, Pretended) and len(latents)


@contextmanager
def most_on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of latents and their products on the pretend device, at most."""
    found, alive, new = [0], list[tuple[weakref.ref[Tensor], int, int]](), Pretended.__new__

    def made(cls: type[Pretended], held: Tensor) -> Pretended:
        tensor, storage = new(cls, held), held.untyped_storage()
        alive[:] = [one for one in alive if one[0]() is not None]
        known = any(address == storage.data_ptr() for _, address, _ in alive)
        # A part of what is not known is the host's, on its way to the device.
        if held.ndim >= len(LATENT) and (known or held.nbytes == storage.nbytes()):
            alive.append((weakref.ref(tensor), storage.data_ptr(), storage.nbytes()))
            found[0] = max(found[0], sum({address: size for _, address, size in alive}.values()))
        return tensor

    with monkeypatch.context() as patch, in_short(), pretend_gpu("cuda") as findings:
        patch.setattr(Pretended, "__new__", staticmethod(made))
        yield found
        assert not findings.faults
        assert not findings.waits, findings.waits


def sampled_of(config: Any, monkeypatch: pytest.MonkeyPatch, scoring: Any) -> tuple[Sampled, int]:
    prompts, images, steps = config.prompts_per_step, config.num_images, stochastic_steps(config.sampler, 0, 0)
    schedule = build_schedule({"shift": 3.0}, config.sampler.num_steps, grid="linspace")
    kernel = replace(KERNELS["flow_sde"], noise_level=0.7, sigma_max=schedule.sigma_max)
    how = Paths(kernel=kernel, schedule=schedule, steps=steps, keep_means=config.objective.name == "guard")
    groups, none = torch.arange(prompts), Conditioning({"text": torch.zeros(prompts, 1)})
    asked = AskedPrompts(groups=groups, prompts=(), prompt_ids=(), cond=none)
    batch = Batch(iteration=0, own=range(images), group=groups.repeat_interleave(4), asked=asked)
    with most_on_device(monkeypatch) as most, torch.no_grad():
        loop: Any = Drawing(config, torch.device("cuda", 0))
        found = sample_paths(loop, batch, CREDIT[config.credit.method], how, scoring)
    return found, most[0]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from toy_in_place(tmp_path_factory.mktemp("room"))


@pytest.mark.parametrize("name", CASES)
def test_the_device_has_the_latents_of_one_batch(toy: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    most, fewest = [], 4 if "strides" in name else 2  # two batches
    for prompts in (fewest, 2 * fewest):
        config, scoring = toy_config(toy, *STEPS, *CASES[name], f"prompts_per_step={prompts}"), Taken()
        sampled, taken = sampled_of(config, monkeypatch, scoring)
        assert not any(isinstance(one, Pretended) for one in (sampled.states, sampled.finished, sampled.mean))
        assert scoring.numbers == list(range(len(sampled.finished)))
        assert scoring.on_device == len(sampled.finished) * CREDIT[config.credit.method].of_outcomes
        record, batch = counts(config).record(), config.resolve_batch(1).rollout_batch_size
        counted = max(each * min(batch, rows) for each, rows in record.batches) * 4 * 2 * 4 * 4
        assert taken <= counted
        most.append(taken)
    assert most[1] == most[0]
    assert most[0] > 0.6 * counted
