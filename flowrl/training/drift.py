"""How far a policy has moved from its base, measured alike for every method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.pipelines import Pipeline
from flowrl.pipelines.lora import Policy
from flowrl.placement import widened
from flowrl.prompts.loading import EvalItem, Prompt
from flowrl.prompts.loading import spread as places
from flowrl.randomness import sample_normals
from flowrl.samplers import KERNELS, Velocity
from flowrl.training.prompting import device_of, encode_prompts, guided
from flowrl.trajectory import Schedule, start_state

KL_PROMPTS, KL_SIGMAS = 24, 4

KL_TEXT = (
    f"mean square difference of the guided velocities of the trained and the base network, over {KL_PROMPTS} "
    f"evaluation prompts, {KL_SIGMAS} noise levels (the first of each quarter of the evaluation's steps) and all "
    "latent elements, at the states of the base's own deterministic evaluation trajectories; the KL of two diffusions "
    "is an integral of this quantity, so it orders methods without depending on their samplers, but is not in nats"
)


@torch.no_grad()
def velocity_distance(
    pipeline: Pipeline, policy: Policy, items: Sequence[EvalItem], schedule: Schedule, *, scale: float, seed: int,
    slot: str = "policy", batch_size: int = KL_PROMPTS,
) -> float:  # fmt: skip
    """`KL_TEXT`, of the weights of a slot; start noise as in the evaluation, whose `seed` it takes.

    `batch_size` prompts are run at once.
    """
    total = 0.0
    for first in range(0, len(items), batch_size):
        prompts = [item.prompt for item in items[first : first + batch_size]]
        velocity = guided(pipeline, pipeline.network, encode_prompts(pipeline, prompts), scale)
        base, tuned = (_under(policy, name, velocity) for name in ("reference", slot))
        total += len(prompts) * distance_of(pipeline, prompts, base, tuned, schedule, seed=seed)
    return total / len(items)


@torch.no_grad()
def distance_of(
    pipeline: Pipeline, prompts: Sequence[Prompt], base: Velocity, tuned: Velocity, schedule: Schedule, *, seed: int
) -> float:
    """`KL_TEXT`, of two velocity functions for these prompts."""
    noise = sample_normals(pipeline.latent_shape, [(seed, "eval", prompt.key, 0) for prompt in prompts])
    x = start_state(noise.to(device_of(pipeline)), schedule)
    compared = {quarter * schedule.num_steps // KL_SIGMAS for quarter in range(KL_SIGMAS)}
    distances = []
    for step in range(schedule.num_steps):
        sigma, timestep = schedule.sigma[step], schedule.timestep[step]
        velocity = base(x, sigma, timestep)
        if step in compared:
            distances.append(float(widened(tuned(x, sigma, timestep) - velocity).square().mean()))
        x = KERNELS["ode"](x, velocity, sigma, schedule.sigma[step + 1]).mean
    return sum(distances) / len(distances)


def _under(policy: Policy, slot: str, velocity: Velocity) -> Velocity:
    """The velocity function with the weights of a slot."""

    def run(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        with policy.under(slot):
            return velocity(x, sigma, timestep)

    return run


def spread(items: Sequence[EvalItem], count: int) -> list[EvalItem]:
    """Up to `count` items, evenly spread over the list."""
    return [items[place] for place in places(len(items), count)]
