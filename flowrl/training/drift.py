"""How far a policy has moved from its base, measured alike for every method."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowrl.pipelines import Pipeline
from flowrl.pipelines.lora import Policy
from flowrl.prompts.loading import EvalItem
from flowrl.randomness import sample_normals
from flowrl.samplers import KERNELS
from flowrl.training.prompting import device_of, encode_prompts, guided
from flowrl.trajectory import Schedule, start_state

KL_PROMPTS, KL_SIGMAS = 24, 4

KL_TEXT = (
    f"mean square difference of the guided velocities of the trained and the base network, over {KL_PROMPTS} held-out "
    f"prompts, {KL_SIGMAS} noise levels (the first of each quarter of the evaluation's steps) and all latent elements, "
    "at the states of the base's own deterministic evaluation trajectories; the KL of two diffusions is an integral of "
    "this quantity, so it orders methods without depending on their samplers, but is not in nats"
)


@torch.no_grad()
def velocity_distance(
    pipeline: Pipeline, policy: Policy, items: Sequence[EvalItem], schedule: Schedule, *, scale: float, seed: int,
    slot: str = "policy", batch_size: int = KL_PROMPTS,
) -> float:  # fmt: skip
    """`KL_TEXT`, of the weights of a slot; start noise as in the evaluation, whose `seed` it takes.

    `batch_size` prompts are run at once.
    """
    parts = [items[first : first + batch_size] for first in range(0, len(items), batch_size)]
    total = 0.0
    for part in parts:
        total += len(part) * _distance(pipeline, policy, part, schedule, scale=scale, seed=seed, slot=slot)
    return total / len(items)


def _distance(
    pipeline: Pipeline, policy: Policy, items: Sequence[EvalItem], schedule: Schedule, *, scale: float, seed: int,
    slot: str,
) -> float:  # fmt: skip
    prompts = [item.prompt for item in items]
    velocity = guided(pipeline, pipeline.network, encode_prompts(pipeline, prompts), scale)
    noise = sample_normals(pipeline.latent_shape, [(seed, "eval", prompt.key, 0) for prompt in prompts])
    x = start_state(noise.to(device_of(pipeline)), schedule)
    steps = schedule.num_steps
    compared = {quarter * steps // KL_SIGMAS for quarter in range(KL_SIGMAS)}
    distances = []
    for step in range(steps):
        sigma, timestep = schedule.sigma[step], schedule.timestep[step]
        with policy.under("reference"):
            base = velocity(x, sigma, timestep)
        if step in compared:
            with policy.under(slot):
                distances.append(float((velocity(x, sigma, timestep) - base).double().square().mean()))
        x = KERNELS["ode"](x, base, sigma, schedule.sigma[step + 1]).mean
    return sum(distances) / len(distances)


def spread(items: Sequence[EvalItem], count: int) -> list[EvalItem]:
    """Up to `count` items, evenly spread over the list."""
    count = min(count, len(items))
    return [items[(2 * k + 1) * len(items) // (2 * count)] for k in range(count)]
