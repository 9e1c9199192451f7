"""What tests of every family do with a tiny pipeline of it: load it, sample it, give it a LoRA, replay its rollouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrl.pipelines import ModelFamily, Pipeline
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.shared.like_blocks import fewest
from flowrl.pipelines.weights.lora import Policy
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, Velocity, gaussian_log_prob, rollout
from flowrl.samplers.path_memory import PathMemory
from flowrl.trajectory import Conditioning, Schedule


def load(
    family: Family, usual: Mapping[str, Any], folder: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> FamilyPipeline:
    """A folder with the usual options of its tests, or others."""
    return family.load(str(folder), dtype=dtype, **{**usual, **options})


@cache
def stock(cls: Any, folder: Path) -> Any:
    """The stock pipeline of a folder, loaded once; the tests that take it leave it as it was."""
    return fresh_stock(cls, folder)


def fresh_stock(cls: Any, folder: Path, lora: Path | None = None, **options: Any) -> Any:
    """The stock pipeline of a folder, with a saved LoRA."""
    pipe = cls.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(lora)
    return pipe


def start_noise(pipeline: Pipeline, b: int = 2) -> Tensor:
    """Start noise `[b, *latent]`, always the same."""
    return counter_normal((b, *pipeline.latent_shape), "start")


@torch.no_grad()
def sample(pipeline: Pipeline, velocity: Velocity, schedule: Schedule, b: int = 2, **options: Any) -> Tensor:
    """Finished latents without any noise on the way."""
    x, kernel = start_noise(pipeline, b), replace(KERNELS["ode"], sigma_max=schedule.sigma_max)
    return rollout(velocity, x, schedule, kernel, lambda step: x, stochastic=(), **options).final


def fill_lora(policy: Policy, seed: int = 0, scale: float = 0.2) -> None:
    """Gives B values, as after some training; with B zero a LoRA changes nothing and A gets no gradient."""
    for name, parameter in policy.parameters.items():
        if "lora_B" in name:
            parameter.data.copy_(scale * counter_normal(parameter.shape, seed, "filled", name))


def adapted(pipeline: Pipeline, *, rank: int = 2, alpha: int = 4, scale: float = 0.2) -> Policy:
    """A LoRA on the family's own targets that does something."""
    policy = Policy(pipeline.denoiser, rank=rank, alpha=alpha, targets=pipeline.lora_targets, seed=1)
    fill_lora(policy, scale=scale)
    return policy


def replayed_with_memory(
    pipeline: Pipeline, velocity: Velocity, again: Velocity, num_steps: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each stochastic step of a rollout under `velocity`, as an update evaluates it by `again`: with what guidance had
    kept before it, the same to the bit, and without."""
    schedule, x = pipeline.schedule(num_steps, "diffusers"), start_noise(pipeline)
    with torch.no_grad():
        path = rollout(
            velocity,
            x,
            schedule,
            KERNELS["flow_sde"],
            lambda step: counter_normal(x.shape, "step", step),
            stochastic=range(num_steps - 1),
            keep_velocity=True,
        )
    assert path.memory is not None
    assert path.velocity is not None
    for step in path.steps:
        given = path.states[:, step], schedule.sigma[step], schedule.timestep[step]
        answer = PathMemory(schedule, path.memory[:, step]).along(again)(*given)
        assert torch.equal(answer, path.velocity[:, step])
        yield step, answer, again(*given)


def replayed(pipeline: Pipeline, velocity: Velocity, b: int, num_steps: int, kernel: str = "flow_sde") -> Tensor:
    """Log-probabilities `[steps, b]` of a rollout's stochastic steps, replayed with gradient: the same to the bit."""
    schedule, x = pipeline.schedule(num_steps, "diffusers"), start_noise(pipeline, b)
    rule = replace(KERNELS[kernel], sigma_max=schedule.sigma_max)
    with torch.no_grad():
        trajectory = rollout(
            velocity, x, schedule, rule, lambda step: counter_normal(x.shape, "step", step),
            stochastic=range(num_steps - 1),
        )  # fmt: skip
    found = []
    for k, step in enumerate(trajectory.steps):
        state, sigma = trajectory.states[:, k], schedule.sigma[step]
        predicted = velocity(state, sigma, schedule.timestep[step])
        assert predicted.dtype == torch.float32
        transition = rule(state, predicted, sigma, schedule.sigma[step + 1])
        log_prob = gaussian_log_prob(trajectory.states[:, k + 1], transition)
        assert log_prob.dtype == torch.float32
        assert torch.equal(log_prob, trajectory.log_prob[:, k])
        found.append(log_prob)
    return torch.stack(found)


def idle_tensors(policy: Policy, loss: Tensor) -> set[str]:
    """Names of the LoRA tensors that a loss gives no gradient; gradients are float32 and finite."""
    found = torch.autograd.grad(loss, list(policy.parameters.values()), allow_unused=True)
    given = {name: g for name, g in zip(policy.parameters, found, strict=True) if g is not None and bool(g.any())}
    assert {g.dtype for g in given.values()} == {torch.float32}
    assert all(bool(g.isfinite().all()) for g in given.values())
    return policy.parameters.keys() - given.keys()


def check_published(family: ModelFamily, model: str, parameters: float, *, rel: float = 0) -> nn.Module:
    """A published checkpoint has its number of parameters, and the LoRA targets bind there."""
    family.check(model, family.lora_targets)
    network = family.meta_denoiser(model)
    assert network is not None
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(parameters, rel=rel)
    assert family.meta_denoiser("someone/unknown") is None
    return network


def check_call(family: ModelFamily, model: str, size: Size, tokens: int, shape: tuple[int, ...]) -> None:
    """A published network is called as planned, on numbers that are not there, and answers in a shape. It has as few
    blocks of each kind as have its first and its last one among them."""
    network: Any = family.meta_denoiser(model, fewest(family.block_kinds(model)))
    with torch.no_grad():
        out = network(**family.meta_call(model, size, tokens))[0]
    assert (out.device.type, out.shape) == ("meta", shape)


def same(first: Conditioning, second: Conditioning) -> bool:
    """Whether two conditionings hold the same numbers."""
    names = first.tensors.keys() == second.tensors.keys()
    return names and all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


def check_targets(family: ModelFamily, folder: Path, wrong: str) -> None:
    """The family's LoRA targets bind to the network of a folder, and another one does not."""
    family.check(str(folder), family.lora_targets)
    with pytest.raises(ValueError, match=rf"'{re.escape(wrong)}' matches no linear layer"):
        family.check(str(folder), [wrong])
