"""Checks of a family of flow models around a tiny pipeline of it: sampling, replay, gradients, a saved LoRA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from flowrl.pipelines.lora import Policy
from flowrl.randomness import counter_normal
from flowrl.samplers import KERNELS, gaussian_log_prob, rollout
from flowrl.trajectory import Conditioning, Schedule

PROMPTS = ["a red circle", "two big blue squares left of a star"]
NEGATIVE = " "
STEPS = 4
RANK, ALPHA = 2, 8


class OnSchedule(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Stock Euler steps on exactly these levels: the last bit of a timestep would be seen in images at 1e-5."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.given = schedule

    def set_timesteps(self, num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, **_: Any) -> None:
        self.sigmas, self.timesteps = self.given.sigma, self.given.timestep
        self.num_inference_steps, self._step_index, self._begin_index = self.given.num_steps, None, None


def check_schedule_is_stocks(pipeline: Any, mu: float) -> None:
    """Our levels are those of the checkpoint's scheduler, given what the stock pipeline gives it."""
    schedule, scheduler = pipeline.schedule(STEPS, "diffusers"), pipeline.pipe.scheduler
    scheduler.set_timesteps(sigmas=[1 - i / STEPS for i in range(STEPS)], mu=mu)
    torch.testing.assert_close(schedule.sigma, scheduler.sigmas, atol=1e-6, rtol=0)
    torch.testing.assert_close(schedule.timestep, scheduler.timesteps, atol=1e-3, rtol=0)


def start_noise(pipeline: Any, b: int) -> Tensor:
    """Start noise `[b, *latent]`, always the same."""
    return counter_normal((b, *pipeline.latent_shape), "start")


@torch.no_grad()
def sample_ode(pipeline: Any, cond: Conditioning, negative: Conditioning | None, scale: float) -> Tensor:
    """Finished latents of the family's own grid, without any noise on the way."""
    schedule, x = pipeline.schedule(STEPS, "diffusers"), start_noise(pipeline, len(cond))
    velocity = pipeline.guided(pipeline.network, cond, negative, scale)
    kernel = replace(KERNELS["ode"], sigma_max=schedule.sigma_max)
    return rollout(velocity, x, schedule, kernel, lambda step: x, stochastic=()).final


def adapted(pipeline: Any) -> Policy:
    """A LoRA on the family's targets that does something; with B zero A would get no gradient."""
    policy = Policy(pipeline.denoiser, rank=RANK, alpha=ALPHA, targets=pipeline.lora_targets, seed=1)
    for name, parameter in policy.parameters.items():
        if "lora_B" in name:
            parameter.data.copy_(0.1 * counter_normal(parameter.shape, 0, "filled", name))
    return policy


def check_replay(pipeline: Any, policy: Policy, cond: Conditioning, negative: Conditioning, scale: float) -> set[str]:
    """Replays a rollout's steps, bit for bit, and gives the names of the LoRA tensors that got no gradient."""
    schedule, x = pipeline.schedule(STEPS, "diffusers"), start_noise(pipeline, len(cond))
    kernel = replace(KERNELS["flow_sde"], sigma_max=schedule.sigma_max)
    velocity = pipeline.guided(pipeline.network, cond, negative, scale)
    with torch.no_grad():
        trajectory = rollout(
            velocity,
            x,
            schedule,
            kernel,
            lambda step: counter_normal(x.shape, "step", step),
            stochastic=range(STEPS - 1),
        )
    loss = torch.zeros(())
    for k, step in enumerate(trajectory.steps):
        state, sigma = trajectory.states[:, k], schedule.sigma[step]
        transition = kernel(state, velocity(state, sigma, schedule.timestep[step]), sigma, schedule.sigma[step + 1])
        log_prob = gaussian_log_prob(trajectory.states[:, k + 1], transition)
        assert log_prob.dtype == torch.float32
        assert torch.equal(log_prob, trajectory.log_prob[:, k])
        loss = loss + (log_prob * torch.linspace(1, 2, len(log_prob))).sum()
    found = torch.autograd.grad(loss, list(policy.parameters.values()), allow_unused=True)
    named = zip(policy.parameters, found, strict=True)
    return {name for name, gradient in named if gradient is None or not bool(gradient.abs().max() > 0)}
