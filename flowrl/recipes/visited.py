"""Regression at states that the policy visits itself: `flowrl train tiny_opd|tiny_art [key=value ...]`

An iteration samples G images for each of P prompts with the policy and keeps states of their paths. There the policy's
velocity is moved towards a target, by a squared distance with a weight of the step (`flowrl.objectives.distillation`):

- `opd`: the velocity of the prompt's teacher, by any kernel or the ODE. A teacher is the model itself at another
  guidance scale, which the policy then absorbs, or a LoRA on it; each prompt has one, by its metadata
  (`policy.teachers`). Rewards, if there are any, are logged; without rewards nothing is decoded.
- `art`: by the ODE, the rollout's velocity, moved along the direction in which the rewards of the prompt's images rise.
A prompt of equal rewards is left out.

There is no ratio.

Letters: P prompts, G images per prompt, n images and p prompts of this process, M trained states, b rows of a batch.

Deviations from the published code: each teacher has its guidance scale, and the policy that of its sampling; the loss
is the mean over all states of an update, on all processes; with `updates_per_rollout` each update has its own images,
at states of a policy that is a few updates old (UniRL refuses more than one). The policy gradient on the KL of Flow-OPD
is not offered: with a detached KL its gradient is 0 in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.advantages.normalise import normalise
from flowrl.config.options import build_options, entry_of
from flowrl.config.readers import refuse_unread
from flowrl.config.sections import PolicyConfig
from flowrl.config.strict_yaml import refuse
from flowrl.config.train import Geometry, TrainConfig, location_of
from flowrl.objectives.distillation import VISITED, Art, Opd, reward_direction
from flowrl.objectives.forward_losses import noised
from flowrl.objectives.terms import velocity_kl
from flowrl.pipelines.weights.lora import Policy, refuse_other_network, refuse_unheld
from flowrl.pipelines.weights.lora_files import Lora
from flowrl.prompts.loading import Prompt
from flowrl.recipes.counting import STEP, Counts, Passes, RecipeCounts, RolloutRecord, only_here, trained_scale, walked
from flowrl.rewards import RewardOutput
from flowrl.runtime.placement import sent
from flowrl.runtime.randomness import Part, sample_normals
from flowrl.samplers.guidance import uncounted
from flowrl.training.draws import Batch
from flowrl.training.learner import GradientSum, Statistics, total_of
from flowrl.training.loop import TEACHER, Loop
from flowrl.training.parts import Ready, init_lora, kernel_of, lora_at, lora_of, model_family, sampler_of
from flowrl.training.paths import Paths, sample, stochastic_steps
from flowrl.training.processes.mesh import data_ranks, in_step
from flowrl.training.run import Run
from flowrl.trajectory import Schedule, Trajectory

__all__ = ["REGRESSES", "THROUGH_REWARDS", "check", "counts", "main", "objective_of", "only_here", "trained_scale"]

REGRESSES, THROUGH_REWARDS = None, False

Turn = tuple[int, Tensor]  # place of a teacher, and states [b] that it teaches


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Visited:
    """This process's paths, on the host, with the counters of each [n], and of each trained state [M] its image, step,
    and the weight of its loss; the direction [p, *latent] of each prompt, if the target is along it."""

    batch: Batch
    path: Trajectory
    schedule: Schedule
    keys: list[tuple[Part, ...]]
    image: Tensor
    step: Tensor
    weight: Tensor
    direction: Tensor | None


def main(ready: Ready, run: Run) -> bool:
    """Trains to the end or to an interrupt; returns whether it finished. Writes only into the run folder."""
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
    """One iteration; frees its memory before the next one samples."""
    run, config, objective, row = loop.run, loop.config, loop.ready.objective, dict[str, Any]()
    kernel, schedule = sampler_of(config.sampler, loop.pipeline, kernel=loop.ready.kernel)
    steps = trained_steps(config, iteration)
    if not steps:  # the last window of a round, with sampler.published_window
        loop.log(iteration, {"live_rows": 0})
        return

    # 1. Rollout: sample with the current policy, keep the states of its paths.
    batch = loop.batch(iteration)
    noisy, ends = (steps, ()) if kernel.stochastic else ((), steps)
    if isinstance(objective, Art):  # a step's two states are its velocity
        ends = (*steps, steps[-1] + 1)
    paths = Paths(kernel=kernel, schedule=schedule, steps=noisy, keep_states=ends)
    with loop.scorer.start(batch) as scoring:
        with loop.clock("rollout"), torch.no_grad():
            path = sample(loop, batch, paths, scoring if config.rewards else None)
        direction, live = None, torch.ones(len(batch.own), dtype=torch.bool)
        if config.rewards:
            with loop.clock("reward"):
                output = scoring.result()
                row = loop.scorer.row(output, batch.group)
                if isinstance(objective, Art):
                    direction, live, row["zero_std_ratio"] = directions_of(loop, batch, path.final, output)
    if direction is not None and not loop.trains_policy(iteration):  # only a jointly trained reward learns
        loop.log(iteration, row | {"live_rows": 0})
        return

    # 2. The states to train, and the teacher of each.
    keys: list[tuple[Part, ...]] = [(config.seed, iteration, *divmod(image, config.group_size)) for image in batch.own]
    place = torch.tensor([objective.places(len(steps), *key) for key in keys])
    weights = [objective.weight_of(kernel, schedule.sigma[step], schedule.sigma[step + 1]) for step in steps]
    image, place = torch.arange(len(keys)).repeat_interleave(place.shape[1]), place.flatten()
    weight, step = torch.tensor(weights, dtype=torch.float64)[place], torch.tensor(steps)[place]
    states: dict[str, Any] = {"keys": keys, "image": image, "step": step, "weight": weight}
    visited = Visited(batch=batch, path=path, schedule=schedule, direction=direction, **states)

    # 3. Update: towards the velocity of each prompt's teacher, or the rollout's own, moved.
    with loop.clock("update"):
        stats = Statistics("error", "masked_fraction", "old_kl", *(f"loss/step_{step}" for step in steps))
        for part in range(config.updates_per_rollout):
            own = live[image] & (image % config.updates_per_rollout == part)
            count = total_of(run, int(own.sum()))
            if count == 0:
                continue
            gradient, how = loop.gradient(), partial(descend, loop, visited, turns_of(loop, visited, own), count)
            how(gradient, stats)
            loop.update(gradient, stats, again=how)
    loop.log(iteration, row | stats.row(run) | {"live_rows": stats.rows(run)})


def turns_of(loop: Loop, visited: Visited, own: Tensor) -> list[Turn]:
    """The turns of an update, whose states are those of all that `own` [M] marks."""
    batch, settings, size = visited.batch, loop.config.policy, loop.geometry.micro_batch_size
    of_prompt = torch.tensor(teachers_of(settings, batch.asked.prompts))
    teacher = of_prompt[batch.asked.rows(batch.group[visited.image])]
    mine = [torch.nonzero(own & (teacher == number)).flatten() for number in range(len(settings.teachers) or 1)]
    return [(number, index) for number, all_M in enumerate(mine) for index in all_M.split(size) if len(index)]


def on_path(path: Trajectory, image: Tensor, step: Tensor) -> Tensor:
    """The latents [b, *latent] of images before their steps, which were kept."""
    return path.states[image, torch.searchsorted(torch.tensor(path.kept), step)]


def states_of(objective: Opd | Art, visited: Visited, index: Tensor) -> Tensor:
    """The latents [b, *latent] of trained states: of the path, or its finished one, noised again by its counters."""
    path, image, step = visited.path, visited.image[index], visited.step[index]
    x = on_path(path, image, step)
    if isinstance(objective, Opd) and objective.off_policy > 0:
        keys = [(*visited.keys[one], "off policy", now) for one, now in zip(image.tolist(), step.tolist(), strict=True)]
        off = [row for row, key in enumerate(keys) if objective.noised_again(*key)]
        if off:
            noise = sample_normals(x.shape[1:], [keys[row] for row in off])
            x[off] = noised(path.final[image[off]], noise, visited.schedule.sigma[step[off]])
    return x


def descend(
    loop: Loop, visited: Visited, turns: list[Turn], count: int, gradient: GradientSum, stats: Statistics
) -> None:
    """Adds up the gradient of an update, each turn of a teacher and states `[b]` of it, of `count` on all processes.
    The teacher comes first: weights must not change between a forward pass and its backward pass."""
    batch, objective, old = visited.batch, loop.ready.objective, None
    for (number, index), live in in_step(loop.shards, turns, lambda n: (n, torch.arange(1)), lambda turn: turn[0]):
        image, step = visited.image[index], visited.step[index]
        sigma, timestep = visited.schedule.sigma[step], visited.schedule.timestep[step]
        x = sent(states_of(objective, visited, index), loop.device)
        group = batch.group[image]
        cond = batch.asked.cond_of(group)
        with uncounted(not live):
            if visited.direction is None:
                teacher = loop.config.policy.teachers[number]
                slot = "reference" if teacher.lora is None else f"{TEACHER}{number}"
                with torch.no_grad(), loop.policy.under(slot), loop.network.counting("reference"):
                    target = loop.velocity(cond, teacher.guidance_scale)(x, sigma, timestep)
            else:
                after = sent(on_path(visited.path, image, step + 1), loop.device)
                length = sent(visited.schedule.sigma[step + 1] - sigma, loop.device)
                old = (after - x) / length.view(-1, *[1] * (x.ndim - 1))
                direction = sent(visited.direction[batch.asked.rows(group)], loop.device)
                target = objective.target(old, direction, sent(sigma, loop.device))
            with loop.network.counting("update"):
                velocity = loop.velocity(cond)(x, sigma, timestep)
        error = velocity_kl(velocity, target)
        if not live:
            gradient.add(error[:0].sum())
            continue
        loss = sent(visited.weight[index].to(error.dtype), error.device) * error
        if old is not None:
            left_out = objective.left_out(velocity.detach(), old, target)
            loss = torch.where(left_out, 0.0, loss)
            stats.mean(None, masked_fraction=left_out.to(error.dtype), old_kl=velocity_kl(velocity, old))
        stats.mean(None, loss=loss, error=error)
        for one in step.unique().tolist():
            stats.mean(step == one, **{f"loss/step_{one}": loss})
        gradient.add(loss.sum() / count)


def directions_of(loop: Loop, batch: Batch, clean: Tensor, output: RewardOutput) -> tuple[Tensor, Tensor, float]:
    """Directions `[p, *latent]` of this process's prompts by the rewards of all their images, which of its images `[n]`
    are trained, and the share of all prompts that are left out."""
    config, size = loop.config, loop.config.group_size
    reward_B, group_B = loop.rewards_of_all(output, compared=True), torch.arange(config.num_images) // size
    advantage_B = normalise(reward_B.double()[None], group_B, scope="none", min_std=config.adv_min_std)[0].nan_to_num()
    own = slice(batch.own.start, batch.own.stop)
    groups = zip(advantage_B[own].split(size), clean.split(size), strict=True)
    direction = torch.stack([reward_direction(*one) for one in groups]).to(clean.dtype)
    live = ~reward_B[own].isnan() & direction.flatten(1).any(1).repeat_interleave(size)
    return direction, live, 1 - float(advantage_B.view(-1, size).any(1).double().mean())


# ---- settings --------------------------------------------------------------------------------------------------------


def objective_of(config: TrainConfig) -> Opd | Art:
    """What a run minimises. Raises ValueError: an unknown name or option, or a bad value."""
    name = config.objective.name or "opd"
    options = entry_of(VISITED, name, "objective of recipe visited", owner="objective.name")
    return build_options(options, config.objective.options, owner=f"objective {name!r}")


def trained_steps(config: TrainConfig, iteration: int) -> tuple[int, ...]:
    """Steps whose states an iteration may train: the stochastic ones, or without noise all of them, or the noisiest, as
    many as objective art sets."""
    if kernel_of(config.sampler).stochastic:
        return stochastic_steps(config.sampler, config.seed, iteration)
    steps, objective = tuple(range(config.sampler.num_steps)), objective_of(config)
    return objective.places(len(steps)) if isinstance(objective, Art) else steps


def teachers_of(settings: PolicyConfig, prompts: Sequence[Prompt]) -> list[int]:
    """The place in `policy.teachers` of each prompt's teacher. Raises ValueError: a prompt's metadata name none."""
    known = {value: place for place, teacher in enumerate(settings.teachers) for value in teacher.prompts}
    said = [prompt.metadata.get(settings.teacher_key) for prompt in prompts]
    found = [known.get(str(value), -1) if known else 0 for value in said]
    if -1 in found:
        first = found.index(-1)
        raise ValueError(
            f"{found.count(-1)} of {len(prompts)} training prompts have no teacher (first: {prompts[first].text!r}, "
            f"whose metadata have {said[first]!r} under {settings.teacher_key!r}): policy.teachers name the prompts "
            f"{', '.join(known)}; set policy.teacher_key to a key whose values are among them, or name the others too"
        )
    return found


def teacher_loras(config: TrainConfig) -> list[Lora | None]:
    """The LoRA of each teacher, read; None of one that is the model without a LoRA. Raises ValueError: there is none at
    the place, it cannot be read, or the policy's LoRA has no room for it."""
    settings = config.policy
    found = [None if teacher.lora is None else lora_at(config, teacher.lora) for teacher in settings.teachers]
    for lora in filter(None, found):
        rank, _, targets = lora_of(settings, model_family(config.pipeline).lora_targets, init_lora(config))
        refuse_unheld(lora, rank=rank, targets=targets, variant=settings.lora_variant)
    return found


def counts(config: TrainConfig) -> RecipeCounts:
    """What a run counts before it starts."""
    sampler, objective, teachers = config.sampler, objective_of(config), config.policy.teachers
    scales = [sampler.guidance_scale if one.guidance_scale is None else one.guidance_scale for one in teachers]
    of_steps = kernel_of(sampler).stochastic or isinstance(objective, Art)  # both of whose states are kept
    images, kept = config.num_images, len(trained_steps(config, 0)) + of_steps

    def of_iteration(iteration: int, passes: Passes, geometry: Geometry) -> Counts:
        trained = images * len(objective.places(len(trained_steps(config, iteration)), 0))
        return Counts(
            rollout=images * sampler.num_steps * passes(sampler.guidance_scale),
            update=trained * passes(sampler.guidance_scale),
            backward=trained * walked(sampler.train_negative, sampler.guidance_scale, passes),
            reference=trained * max(map(passes, scales), default=0),
            images=images * bool(config.rewards),
        )

    return RecipeCounts(
        objective=config.objective.name or "opd",
        of_iteration=of_iteration,
        exact=len(set(scales)) == 1,  # else as if each prompt had the teacher that takes most
        teachers=sum(teacher.lora is not None for teacher in teachers),
        record=lambda: RolloutRecord(columns=(images * kept, images), batches=((kept + 1 + STEP, images),)),
    )


def check(config: TrainConfig) -> None:
    """Refuses settings of this recipe that cannot work, before a model loads. Raises ValueError: an unknown loss or
    option, teachers that cannot teach, or a combination without meaning."""
    objective, kernel = objective_of(config), kernel_of(config.sampler)
    if isinstance(objective, Art):
        refuse_unread(config, ["directions", "rollout"], "objective art of recipe visited")
        check_art(config, objective)
    else:
        window = ["window"] if kernel.stochastic else []
        refuse_unread(config, ["taught", "rollout", *window], "objective opd of recipe visited")
        check_teachers(config, objective)


def check_art(config: TrainConfig, objective: Art) -> None:
    """Refuses a rollout, groups or states from which objective art gets no direction or no velocity."""
    sampler, size, ranks = config.sampler, config.group_size, data_ranks(config)
    refuse(
        (
            sampler.kernel != "ode",
            f"objective art reads velocities off the rollout's steps, which have no noise, and sampler.kernel is "
            f"{sampler.kernel}: set sampler.kernel=ode, and remove sampler.noise_level",
        ),
        (
            bool(config.same_latent),
            f"same_latent is {config.same_latent}, and by the ODE of objective art images of one start noise are one "
            "image: set same_latent=false",
        ),
        (
            config.prompts_per_step % ranks > 0,
            f"objective art takes the direction of a prompt from all its images on one process, so prompts_per_step "
            f"({config.prompts_per_step}) must divide by the {ranks} processes",
        ),
        (
            size % config.updates_per_rollout > 0,
            f"objective art gives each update an equal share of every prompt's images, and group_size ({size}) does "
            f"not divide by updates_per_rollout ({config.updates_per_rollout}): change one of them",
        ),
        (
            (objective.high_noise or 0) > sampler.num_steps,
            f"objective.options.high_noise is {objective.high_noise}, and a path has {sampler.num_steps}: lower it",
        ),
    )


def check_teachers(config: TrainConfig, objective: Opd) -> None:
    """Refuses teachers that teach nothing, or for which the policy or a rollout has no room."""
    sampler, policy = config.sampler, config.policy
    kernel, teachers, steps = kernel_of(sampler), policy.teachers, len(trained_steps(config, 0))
    as_policy = [one.lora is None and one.guidance_scale in (None, sampler.guidance_scale) for one in teachers]
    refuse(
        (
            not teachers,
            "recipe visited learns from policy.teachers, and there are none: list one, such as {guidance_scale: 4.5}, "
            "the model itself under guidance, or {lora: FILE}, a LoRA on it; or set objective.name=art, which learns "
            "from rewards",
        ),
        (
            teachers and all(as_policy) and policy.init_lora is None,
            f"policy.teachers are the model itself at guidance {sampler.guidance_scale:g}, which the policy starts as, "
            "so there is nothing to learn: set the guidance_scale or the lora of one",
        ),
        (
            policy.train == "full" and any(teacher.lora is not None for teacher in teachers),
            "policy.train is full, and a teacher's LoRA takes the place of the policy's own: set policy.train=lora",
        ),
        (
            kernel.stochastic and kernel.noise_level == 0,
            f"sampler.noise_level 0 makes kernel {sampler.kernel} the ODE: set sampler.kernel=ode",
        ),
        (
            objective.states != "all" and objective.states > steps,
            f"objective.options.states is {objective.states}, and {steps} steps of a path are trained: lower it",
        ),
        (
            objective.weight == "kl" and not kernel.stochastic,
            "objective.options.weight kl is the KL of steps with noise, and sampler.kernel is ode: set weight=mean",
        ),
    )
    for lora in filter(None, teacher_loras(config)):
        if (network := model_family(config.pipeline).meta_denoiser(location_of(config.pipeline))) is not None:
            refuse_other_network(network, lora)
