"""Checks that every video family passes, around a tiny pipeline of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from flowrl.pipelines.lora import Policy
from flowrl.randomness import counter_normal
from flowrl.samplers import KERNELS, Velocity, gaussian_log_prob, rollout
from flowrl.trajectory import Schedule

PROMPTS = ["a photo of a red circle", "two blue squares"]
STEPS = 4
Sources = Sequence[Sequence[Tensor]]


class OnSchedule(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Stock Euler steps on the noise levels of a given schedule, whatever the pipeline asks for."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.given = schedule

    def set_timesteps(
        self, num_inference_steps: int | None = None, device: Any = None, sigmas: Any = None, mu: Any = None
    ) -> None:
        self.sigmas, self.timesteps = self.given.sigma, self.given.timestep
        self.num_inference_steps = self.given.num_steps
        self._step_index = self._begin_index = None


def start_noise(pipeline: Any, b: int = len(PROMPTS)) -> Tensor:
    """Start noise `[b, *latent]`, always the same."""
    return counter_normal((b, *pipeline.latent_shape), "start")


def image(seed: int, height: int, width: int) -> Tensor:
    """A source image of 8-bit values: a colour gradient."""
    ramp = torch.linspace(0, 1, height)[:, None] * torch.linspace(seed % 3 / 2, 1, width)
    return torch.stack([ramp, 1 - ramp, ramp.flip(0)]).mul(255).round() / 255


def guided(pipeline: Any, scale: float, sources: Sources | None = None) -> Velocity:
    """The guided velocity of the prompts."""
    cond = pipeline.encode(PROMPTS, sources)
    negative = pipeline.encode([""] * len(PROMPTS), sources) if pipeline.passes(scale) > 1 else None
    velocity: Velocity = pipeline.guided(pipeline.network, cond, negative, scale)
    return velocity


@torch.no_grad()
def sample_ode(pipeline: Any, schedule: Schedule, scale: float, sources: Sources | None = None) -> Tensor:
    """Finished latents without any noise on the way."""
    kernel = replace(KERNELS["ode"], sigma_max=schedule.sigma_max)
    x = start_noise(pipeline)
    return rollout(guided(pipeline, scale, sources), x, schedule, kernel, lambda step: x, stochastic=()).final


def adapted(pipeline: Any) -> Policy:
    """A LoRA on the published targets that does something."""
    policy = Policy(pipeline.denoiser, rank=2, alpha=4, targets=pipeline.lora_targets, seed=1)
    for name, parameter in policy.parameters.items():
        if "lora_B" in name:
            parameter.data.copy_(0.2 * counter_normal(parameter.shape, 0, "filled", name))
    return policy


def check_ratio_is_one(
    pipeline: Any, policy: Policy, scale: float, sources: Sources | None = None, kernel: str = "flow_sde"
) -> None:
    """Replayed log-probabilities equal the rollout's to the bit, and every LoRA tensor is trained by some step."""
    schedule = pipeline.schedule(STEPS, "diffusers")
    step_rule = replace(KERNELS[kernel], sigma_max=schedule.sigma_max)
    x = start_noise(pipeline)
    with torch.no_grad():
        trajectory = rollout(
            guided(pipeline, scale, sources), x, schedule, step_rule, lambda step: counter_normal(x.shape, "s", step),
            stochastic=range(STEPS - 1),
        )  # fmt: skip
    velocity = guided(pipeline, scale, sources)
    loss = torch.zeros(())
    for k, step in enumerate(trajectory.steps):
        x, sigma = trajectory.states[:, k], schedule.sigma[step]
        transition = step_rule(x, velocity(x, sigma, schedule.timestep[step]), sigma, schedule.sigma[step + 1])
        log_prob = gaussian_log_prob(trajectory.states[:, k + 1], transition)
        assert log_prob.dtype == torch.float32
        assert torch.equal(log_prob, trajectory.log_prob[:, k])
        loss = loss + (log_prob * torch.tensor([1.0, -2.0])).sum()
    gradients = torch.autograd.grad(loss, list(policy.parameters.values()))
    for name, gradient in zip(policy.parameters, gradients, strict=True):
        assert gradient.dtype == torch.float32
        assert bool(gradient.isfinite().all())
        assert float(gradient.abs().sum()) > 0, name
