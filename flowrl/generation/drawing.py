"""Draws images of prompts with any velocity by the deterministic sampler of evaluations; finds the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowrl.pipelines import Pipeline
from flowrl.prompts.loading import Prompt
from flowrl.runtime.shapes import Float
from flowrl.samplers import Velocity, ode_rollout
from flowrl.training.processes.devices import check_device
from flowrl.training.prompting import device_of
from flowrl.trajectory import Schedule

Make = Callable[[Sequence[Prompt]], Velocity]
"""Makes the velocity for a batch of prompts, from a base model, a tuned one or RLG between them."""


def find_device(given: str | None, key: str = "`device` ") -> torch.device:
    """The named device, or this machine's best one; `key` names the setting. Raises ValueError: it does not exist."""
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(given, key=key)
    return find_device(None) if given == "auto" else torch.device(given)


def in_batches(make: Make, size: int) -> Make:
    """A velocity that hands the network at most `size` images at once."""

    def whole(prompts: Sequence[Prompt]) -> Velocity:
        parts = [make(prompts[first : first + size]) for first in range(0, len(prompts), size)]

        def velocity(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
            pieces = x.split(size)
            return torch.cat([part(piece, sigma, timestep) for part, piece in zip(parts, pieces, strict=True)])

        return velocity

    return whole


@torch.no_grad()
def draw(
    pipeline: Pipeline, make: Make, prompts: Sequence[Prompt], x: Float[Tensor, " b *latent"], schedule: Schedule
) -> Tensor:
    """Images float32 [b, 3, H, W], or videos [b, F, 3, H, W], on the host, of start noise that may lie anywhere."""
    return pipeline.decode(ode_rollout(make(prompts), x.to(device_of(pipeline)), schedule)).cpu()
