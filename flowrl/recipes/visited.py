"""Distillation at states that the policy visits itself: `flowrl train tiny_opd [key=value ...]`

An iteration samples G images for each of P prompts with the policy, by any kernel or the ODE, and keeps states of their
paths. There the policy's velocity is moved towards that of the prompt's teacher, by a squared distance with a weight of
the step (`flowrl.objectives.distillation`). A teacher is the model itself at another guidance scale, which the policy
then absorbs, or a LoRA on it; each prompt has one, by its metadata (`policy.teachers`). There is no advantage and no
ratio. Rewards are logged where there are any, and nothing is decoded where there are none.

Letters: P prompts, G images per prompt, n images of this process, K steps that may be trained, N of them per image, b
rows of a micro-batch.

Deviations from the published code: each teacher has its guidance scale, and the policy the one it is sampled with; the
loss is the mean over all states of an update, on all processes; with `updates_per_rollout` each update has images of
its own, at states of a policy that is a few updates old (UniRL refuses more than one). The policy gradient on the KL of
Flow-OPD is not offered: with a detached KL its gradient is 0 in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.objectives.terms import velocity_kl
from flowrl.pipelines.weights.lora import Policy
from flowrl.recipes.counting import trained_scale
from flowrl.recipes.visited_settings import (
    check,
    counts,
    objective_of,
    only_here,
    teacher_loras,
    teachers_of,
    trained_steps,
)
from flowrl.runtime.placement import sent
from flowrl.samplers.guidance import uncounted
from flowrl.training.batch import Batch
from flowrl.training.learner import GradientSum, Statistics, total_of
from flowrl.training.loop import TEACHER, Loop
from flowrl.training.parts import sampler_of
from flowrl.training.paths import Paths, sample
from flowrl.training.processes.mesh import in_step
from flowrl.training.ready import Ready
from flowrl.training.run import Run
from flowrl.trajectory import Schedule

__all__ = ["REGRESSES", "THROUGH_REWARDS", "check", "counts", "main", "objective_of", "only_here", "trained_scale"]

REGRESSES, THROUGH_REWARDS = False, False

Turn = tuple[int, Tensor]
"""Place of a teacher, and images `[b]` of this process that it teaches."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Visited:
    """States of this process's paths, on the host, and what is trained of them.

    Attributes:
        states: [n, S, *latent] that were kept.
        column: [K] the place among them of a step's source.
        step: [K] steps.
        weight: [K] of their losses.
        place: [n, N] steps of each image that are trained, as places in the three.
        schedule: of the rollout.
    """

    states: Tensor
    column: Tensor
    step: Tensor
    weight: Tensor
    place: Tensor
    schedule: Schedule


def main(ready: Ready, run: Run) -> bool:
    """Trains to the end or to an interrupt; returns whether it finished. Everything it makes lies in the run folder."""
    loras = teacher_loras(ready.config)
    loop = Loop(ready, run, needs_reference=None in loras)
    for place, lora in enumerate(loras):
        if lora is not None:
            assert isinstance(loop.policy, Policy)
            loop.policy.add_lora(f"{TEACHER}{place}", lora)
    for iteration in loop:
        iterate(loop, iteration)
    return loop.finished


def iterate(loop: Loop, iteration: int) -> None:
    """One iteration; what it made is freed before the next one samples."""
    run, config, row = loop.run, loop.config, dict[str, Any]()
    steps = trained_steps(config, iteration)
    if not steps:  # the last window of a round, with sampler.published_window
        loop.log(iteration, {"live_rows": 0})
        return

    # 1. Rollout: sample with the current policy, keep the states of its paths.
    batch = loop.batch(iteration)
    with loop.scorer.start(batch) as scoring:
        with loop.clock("rollout"), torch.no_grad():
            visited = visit(loop, batch, steps, scoring if config.rewards else None)
        if config.rewards:
            with loop.clock("reward"):
                row = loop.scorer.row(scoring.result(), batch.group)

    # 2. Update: towards the velocity of each prompt's teacher.
    with loop.clock("update"):
        stats = Statistics("error", *(f"loss/step_{step}" for step in steps))
        teacher = torch.tensor(teachers_of(config.policy, batch.asked.prompts))[batch.asked.rows(batch.group)]
        for part in range(config.updates_per_rollout):
            own = torch.arange(len(batch.own))[part :: config.updates_per_rollout]
            turns: list[Turn] = []
            for place in range(len(config.policy.teachers)):
                taught = own[teacher[own] == place]
                turns += [(place, index) for index in taught.split(loop.geometry.micro_batch_size) if len(index)]
            gradient, count = loop.gradient(), total_of(run, len(own)) * visited.place.shape[1]
            how = partial(descend, loop, batch, visited, turns, count)
            how(gradient, stats)
            loop.update(gradient, stats, again=how)
    loop.log(iteration, row | stats.row(run) | {"live_rows": stats.rows(run)})


def visit(loop: Loop, batch: Batch, steps: tuple[int, ...], scoring: Any) -> Visited:
    """Samples this process's images, and says which of their states are trained; call it without gradient."""
    config, objective = loop.config, loop.ready.objective
    stochastic = loop.ready.kernel.stochastic
    kernel, schedule = sampler_of(config.sampler, loop.pipeline, kernel=loop.ready.kernel)
    how = Paths(kernel=kernel, schedule=schedule, **{"steps" if stochastic else "keep_states": steps})
    path = sample(loop, batch, how, scoring)
    keys = [(config.seed, batch.iteration, *divmod(image, config.group_size)) for image in batch.own]
    weights = [objective.weight_of(kernel, schedule.sigma[step], schedule.sigma[step + 1]) for step in steps]
    return Visited(
        states=path.states,
        column=torch.tensor([path.kept.index(step) for step in steps]),
        step=torch.tensor(steps),
        weight=torch.tensor(weights, dtype=torch.float64),
        place=torch.tensor([objective.places(len(steps), *key) for key in keys]),
        schedule=schedule,
    )


def descend(
    loop: Loop, batch: Batch, visited: Visited, turns: list[Turn], count: int, gradient: GradientSum, stats: Statistics
) -> None:
    """Adds up the gradient of an update, of which `count` states are trained on all processes."""
    for (teacher, index), live in in_step(
        loop.shards, turns, lambda place: (place, torch.arange(1)), lambda own: own[0]
    ):
        for place in visited.place[index].unbind(1):
            with uncounted(not live):
                error = distance(loop, batch, visited, teacher, index, place)
            if not live:
                gradient.add(error[:0].sum())
                continue
            loss = sent(visited.weight[place].to(error.dtype), error.device) * error
            stats.mean(None, loss=loss, error=error)
            for one in place.unique().tolist():
                stats.mean(place == one, **{f"loss/step_{int(visited.step[one])}": loss})
            gradient.add(loss.sum() / count)


def distance(loop: Loop, batch: Batch, visited: Visited, teacher: int, index: Tensor, place: Tensor) -> Tensor:
    """[b] squared distance of the policy's velocity, with its graph, to the teacher's, at one state of each image.

    The teacher comes first: weights must not change between a forward pass and its backward pass.
    """
    settings, step = loop.config.policy.teachers[teacher], visited.step[place]
    sigma, timestep = visited.schedule.sigma[step], visited.schedule.timestep[step]
    x, cond = sent(visited.states[index, visited.column[place]], loop.device), batch.asked.cond_of(batch.group[index])
    slot = "reference" if settings.lora is None else f"{TEACHER}{teacher}"
    with torch.no_grad(), loop.policy.under(slot), loop.network.counting("reference"):
        taught = loop.velocity(cond, settings.guidance_scale)(x, sigma, timestep)
    with loop.network.counting("update"):
        return velocity_kl(loop.velocity(cond)(x, sigma, timestep), taught)
