"""What draws images of a run: the learner itself, or a worker elsewhere that gets a piece of a rollout.

Noise, windows and schedules follow from counters: the same weights and batch give the same image on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.config.train import Geometry, TrainConfig
from flowrl.pipelines import Pipeline
from flowrl.prompts.loading import Prompt
from flowrl.runtime.placement import sent
from flowrl.runtime.randomness import Part, sample_normals
from flowrl.samplers import Velocity
from flowrl.training.learner import NetworkCounter
from flowrl.training.prompting import guided
from flowrl.trajectory import Conditioning, Sampled, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AskedPrompts:
    """The prompts of p groups."""

    groups: Tensor
    """[p] numbers of the groups, counted over all processes (and over the rounds of an iteration), ascending."""
    prompts: tuple[Prompt, ...]
    """One per group."""
    prompt_ids: tuple[int, ...]
    """Their lines in the prompt file."""
    cond: Conditioning
    """The prompts encoded, one row per group."""

    def rows(self, group: Tensor) -> Tensor:
        """Place of group numbers among the groups."""
        return torch.searchsorted(self.groups, group.cpu())

    def cond_of(self, group: Tensor) -> Conditioning:
        """Conditioning of groups `[b]`, one row each."""
        return self.cond[self.rows(group)]

    def prompts_of(self, group: Tensor) -> list[Prompt]:
        """Prompts of groups `[b]`."""
        return [self.prompts[int(row)] for row in self.rows(group)]

    def prompt_ids_of(self, group: Tensor) -> Tensor:
        """Lines in the prompt file of groups `[b]`."""
        return torch.tensor(self.prompt_ids)[self.rows(group)]

    @staticmethod
    def cat(parts: Sequence[AskedPrompts]) -> AskedPrompts:
        """Joins the rounds of one iteration."""
        return AskedPrompts(
            groups=torch.cat([part.groups for part in parts]),
            prompts=tuple(prompt for part in parts for prompt in part.prompts),
            prompt_ids=tuple(number for part in parts for number in part.prompt_ids),
            cond=Conditioning.cat([part.cond for part in parts]),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The images of one round of sampling."""

    iteration: int
    """Counts from 0."""
    own: range
    """Image numbers of this process, consecutive; image i belongs to group `i // group_size`."""
    group: Tensor
    """[b] group of each image."""
    asked: AskedPrompts
    """The prompts of those groups."""


HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """A piece of an iteration's rollout."""

    iteration: int
    """Counts from 0."""
    images: range
    """Their numbers, of at most one `rollout_batch_size`; of whole batches of trees where `plan` is set."""
    asked: AskedPrompts
    """The prompts of their groups, encoded and on the host; without their texts."""
    steps: tuple[int, ...]
    """Stochastic ones; none is sampling by the ODE."""
    levels: tuple[float, ...] | None = None
    """Noise levels from a calibration."""
    plan: bool = False
    """Whether to draw everything the credit method needs (branches, trees, completions), as a `Sampled`."""
    keep_means: bool = False
    """Whether to keep means of the stochastic steps."""
    keep_states: tuple[int, ...] = ()
    """States to keep besides those of the stochastic steps."""

    @property
    def calls(self) -> tuple[Any, ...]:
        """What the number of network calls depends on, within an iteration."""
        return len(self.images), self.steps


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvalRequest:
    """A batch of an evaluation: finished latents by the ODE, at the evaluation's size and steps."""

    cond: Conditioning
    """Their prompts, encoded; on the host if a worker draws."""
    keys: tuple[tuple[Part, ...], ...]
    """Counters of each one's start noise."""
    scale: float
    """Guidance."""

    @property
    def calls(self) -> tuple[Any, ...]:
        """What the number of network calls depends on, within an evaluation."""
        return (len(self.keys),)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """The result of a request, on the host, and its network evaluations by kind, without those of evaluations."""

    found: Trajectory | Sampled | Tensor
    evaluations: Mapping[str, int]


class Draws:
    """What sampling needs to know of the one that draws: the run's settings, its batches, the generator with its
    counted network, and the device of latents."""

    config: TrainConfig
    geometry: Geometry
    pipeline: Pipeline
    network: NetworkCounter
    device: torch.device

    def velocity(self, cond: Conditioning, scale: float | None = None) -> Velocity:
        """The guided, counted velocity under the network's current weights."""
        scale = self.config.sampler.guidance_scale if scale is None else scale
        return guided(self.pipeline, self.network, cond, scale, self.config.sampler.train_negative)

    def normals(
        self, tag: str, batch: Batch, places: Sequence[tuple[int, ...]], *, device: torch.device | None = None
    ) -> Tensor:
        """Standard normal latents `[b, *latent]`, each a function of (seed, tag, iteration, its place); on the latents'
        device, or another."""
        keys: list[tuple[Part, ...]] = [(self.config.seed, tag, batch.iteration, *place) for place in places]
        return sent(sample_normals(self.pipeline.latent_shape, keys), device or self.device)

    def start_noise(self, batch: Batch, images: range) -> Tensor:
        """Start noise `[b, *latent]` of some images: a function of (seed, iteration, group, image in the group)."""
        size = self.config.group_size
        return self.normals("start", batch, [(i // size, i % size // self.config.images_per_start) for i in images])

    def step_noise(self, batch: Batch, images: range) -> Callable[[int], Tensor]:
        """Step noise of some images: a function of (seed, iteration, group, image in the group, step)."""
        return lambda step: self.normals("step", batch, [(*divmod(i, self.config.group_size), step) for i in images])


def batch_of(request: Request, group_size: int, device: torch.device) -> Batch:
    """The images of a request as sampling takes them."""
    own, asked = request.images, request.asked
    group = torch.arange(own.start, own.stop) // group_size
    asked = replace(asked, cond=asked.cond.to(device))
    return Batch(iteration=request.iteration, own=own, group=group, asked=asked)


def without_texts(asked: AskedPrompts, group: Tensor) -> AskedPrompts:
    """The conditions of the groups in `[b]`, on the host and without their texts, which drawing does not read."""
    own = group.unique(sorted=True)
    return AskedPrompts(groups=own, prompts=(), prompt_ids=(), cond=asked.cond_of(own).to("cpu"))
