"""How far a policy has moved from its base, measured in the same way for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.pipelines import Pipeline
from flowrl.pipelines.weights.trained_weights import TrainedWeights
from flowrl.prompts.loading import EvalItem, Prompt
from flowrl.prompts.loading import spread as places
from flowrl.runtime.placement import sent, widened
from flowrl.runtime.randomness import sample_normals
from flowrl.samplers import Velocity
from flowrl.samplers.path_memory import PathMemory
from flowrl.samplers.step import euler
from flowrl.training.prompting import device_of, encode_prompts, guided
from flowrl.trajectory import Schedule, start_state

KL_PROMPTS, KL_SIGMAS = 24, 4

KL_TEXT = (
    f"mean square difference of the guided velocities of the trained and the base network, over {KL_PROMPTS} "
    f"evaluation prompts, {KL_SIGMAS} noise levels (the first of each quarter of the evaluation's steps) and all "
    "latent elements, at the states of the base's own deterministic evaluation trajectories; the KL of two diffusions "
    "is an integral of this quantity, so it orders methods without depending on their samplers, but is not in nats"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BaseSide:
    """Points on a base model's trajectories to compare others with, for prompts that run together. On the host: two
    latents per prompt and compared noise level, 48 MiB for the 24 prompts of SD3.5 at 512 pixels."""

    prompts: tuple[Prompt, ...]
    """[b]."""
    places: tuple[tuple[Tensor, Tensor, int, Tensor | None], ...]
    """The base's state and velocity `[b, *latent]` at a step, the step, and what guidance had kept there."""
    idle: bool = False
    """Whether it runs only to keep processes in step that share a copy of the weights."""


@torch.no_grad()
def base_sides(
    pipeline: Pipeline,
    policy: TrainedWeights,
    items: Sequence[EvalItem],
    schedule: Schedule,
    *,
    scale: float,
    seed: int,
    batch_size: int = KL_PROMPTS,
    in_step: Sequence[EvalItem] | None = None,
) -> list[BaseSide]:
    """The base's side of `KL_TEXT`, which training does not change. It takes the start noise of the evaluation with
    this `seed` and runs `batch_size` prompts at once. If processes must keep step, `in_step` is the longest list of
    any; idle sides fill the shorter ones."""
    sides = []
    for first in range(0, len(items if in_step is None else in_step), batch_size):
        own = items[first : first + batch_size]
        prompts = [item.prompt for item in (own or (in_step or ())[:1])]
        base = _under(policy, "reference", _guided(pipeline, prompts, scale))
        sides.append(replace(_base_side(pipeline, prompts, base, schedule, seed=seed), idle=not own))
    return sides


@torch.no_grad()
def velocity_distances(
    pipeline: Pipeline,
    policy: TrainedWeights,
    sides: Sequence[BaseSide],
    schedule: Schedule,
    *,
    scale: float,
    slot: str = "policy",
) -> list[float]:
    """`KL_TEXT` of the weights of a slot, times its number of prompts, for each part of the base's side."""
    distances = []
    for side in sides:
        tuned = _under(policy, slot, _guided(pipeline, side.prompts, scale))
        distance = _distance(side, tuned, schedule, device_of(pipeline))
        if not side.idle:
            distances.append(len(side.prompts) * distance)
    return distances


@torch.no_grad()
def distance_of(
    pipeline: Pipeline, prompts: Sequence[Prompt], base: Velocity, tuned: Velocity, schedule: Schedule, *, seed: int
) -> float:
    """`KL_TEXT`, of two velocity functions for these prompts."""
    return _distance(_base_side(pipeline, prompts, base, schedule, seed=seed), tuned, schedule, device_of(pipeline))


def _base_side(
    pipeline: Pipeline, prompts: Sequence[Prompt], base: Velocity, schedule: Schedule, *, seed: int
) -> BaseSide:
    noise = sample_normals(pipeline.latent_shape, [(seed, "eval", prompt.noise_name, 0) for prompt in prompts])
    x = start_state(noise.to(device_of(pipeline)), schedule)
    compared = {quarter * schedule.num_steps // KL_SIGMAS for quarter in range(KL_SIGMAS)}
    places, memory = [], PathMemory(schedule)
    evaluated = memory.along(base)
    for step in range(max(compared) + 1):
        sigma, timestep = schedule.sigma[step], schedule.timestep[step]
        velocity = evaluated(x, sigma, timestep)
        if step in compared:
            places.append((x.cpu(), velocity.cpu(), step, memory.at_states([step])))
        x = euler(x, velocity, sigma, schedule.sigma[step + 1])
    return BaseSide(prompts=tuple(prompts), places=tuple(places))


def _distance(side: BaseSide, tuned: Velocity, schedule: Schedule, device: torch.device) -> float:
    distances = []
    for x, base, step, kept in side.places:
        evaluated = PathMemory(schedule, None if kept is None else kept[:, 0]).along(tuned)
        velocity = evaluated(sent(x, device), schedule.sigma[step], schedule.timestep[step])
        distances.append(float(widened(velocity - sent(base, device)).square().mean()))
    return sum(distances) / len(distances)


def _guided(pipeline: Pipeline, prompts: Sequence[Prompt], scale: float) -> Velocity:
    return guided(pipeline, pipeline.network, encode_prompts(pipeline, prompts), scale)


def _under(policy: TrainedWeights, slot: str, velocity: Velocity) -> Velocity:
    """The velocity function with the weights of a slot."""

    def run(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        with policy.under(slot):
            return velocity(x, sigma, timestep)

    return run


def spread(items: Sequence[EvalItem], count: int) -> list[EvalItem]:
    """Up to `count` items, evenly spread over the list."""
    return [items[place] for place in places(len(items), count)]
