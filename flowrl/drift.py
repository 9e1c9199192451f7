"""How far a policy has moved from its base, measured alike for every method."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowrl.pipelines import Pipeline
from flowrl.pipelines.lora import Policy
from flowrl.prompts import EvalItem
from flowrl.randomness import sample_normals
from flowrl.samplers import KERNELS, classifier_free_guidance
from flowrl.trajectory import Schedule

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
    slot: str = "policy",
) -> float:  # fmt: skip
    """`KL_TEXT`, of the weights of a slot; start noise as in the evaluation, whose `seed` it takes."""
    texts = [item.prompt.text for item in items]
    velocity = classifier_free_guidance(pipeline.network, pipeline.encode(texts), pipeline.encode([""]), scale)
    device = next(pipeline.transformer.parameters()).device
    x = sample_normals(pipeline.latent_shape, [(seed, "eval", text, 0) for text in texts]).to(device)
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
