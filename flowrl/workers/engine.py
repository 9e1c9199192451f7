"""Engines: what draws for a worker in the place of its own denoiser, mostly a client of a server (`workers.engine`).

An engine returns states and no densities: the learner computes those of its own policy, at these states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flowrl.config.train import TrainConfig
from flowrl.samplers import Kernel
from flowrl.training.draws import HOST, Drawn, Draws, Request, batch_of
from flowrl.training.paths import sampler_with
from flowrl.trajectory import Schedule, Trajectory, start_state


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineRequest:
    """b images that an engine is to draw. All tensors lie on the host."""

    cond: Mapping[str, Tensor]
    """Their prompts as the family encodes them, [b, ...] by name; "negative/..." are those of negative prompts."""
    guidance_scale: float
    """1 is without guidance."""
    schedule: Schedule
    """Sigmas [T + 1] from noise to 0, and what the network is told of each step [T]."""
    start: Tensor
    """[b, *latent] state 0, of which each image begins."""
    kernel: Kernel
    """Of the stochastic steps, with its noise level; the others are steps of the ODE by Euler's rule."""
    noise: Mapping[int, Tensor]
    """Standard normal noise [b, *latent] of each stochastic step. An engine that cannot take it draws its own."""


class Engine(Protocol):
    """What draws; made in a worker's process, without arguments."""

    def load(self, config: TrainConfig) -> None:
        """Finds or starts what draws: `config.pipeline.model`, with a LoRA as `config.policy` says."""

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Draws with these float32 tensors of the LoRA from now on, by the names that PEFT gives them."""

    def draw(self, asked: EngineRequest) -> Tensor:
        """States [b, T + 1, *latent] in float32, the first of them `start`; an error ends the run."""


def drawn_by(engine: Engine, draws: Draws, request: Request) -> Drawn:
    """The piece that a request asks for, with densities of 0 in the place of those that nobody knows. Raises
    ValueError: what the engine returned has another shape, or other start states."""
    batch = batch_of(request, draws.config.group_size, HOST)
    kernel, schedule = sampler_with(draws, request.steps, request.levels)
    start, noise = start_state(draws.start_noise(batch, batch.own), schedule), draws.step_noise(batch, batch.own)
    asked = EngineRequest(
        cond=batch.asked.cond_of(batch.group).tensors,
        guidance_scale=draws.config.sampler.guidance_scale,
        schedule=schedule,
        start=start,
        kernel=kernel,
        noise={step: noise(step) for step in request.steps},
    )
    states = engine.draw(asked)
    wanted = (len(start), schedule.num_steps + 1, *start.shape[1:])
    if tuple(states.shape) != wanted or states.dtype != start.dtype or not torch.equal(states[:, 0], start):
        raise ValueError(
            f"the engine of workers.engine returned states {tuple(states.shape)} in {states.dtype}, and {wanted} in "
            f"{start.dtype} were asked for, which begin with the start states: let its draw return these"
        )
    kept = tuple(sorted({*request.keep_states, *(state for step in request.steps for state in (step, step + 1))}))
    log_prob = torch.zeros(len(start), len(request.steps))
    own = {"states": states[:, kept], "log_prob": log_prob, "final": states[:, -1].contiguous()}
    found = Trajectory(kept=kept, steps=request.steps, **own)
    calls = schedule.num_steps * draws.pipeline.passes(asked.guidance_scale)
    return Drawn(found=found, evaluations={"rollout": len(start) * calls})
