"""Matching on noised images: `flowrl train tiny_nft [key=value ...]`

An iteration samples G images for each of P prompts, scores them and keeps nothing but the finished latents. Each is
noised again at `times.count` levels, where the velocity that leads back to it is known, and the LoRA is updated with a
loss on the velocity. There is no trajectory and no density of the sampler, so any solver will do. Methods differ in one
function of `flowrl.objectives.forward_losses` (`objective.name`) and in the copies of the policy they keep.

| objective | sampled by | other networks at the noised latent |
|---|---|---|
| nft | old | old |
| crd | sampling | old |
| awm | policy; old with off_policy | old with off_policy or old_kl_coef |
| dgpo | policy | reference; old with clip |
| rwr, rft | policy | none |
| sft | none: its images are files | none |

and the reference if `kl_coef` is above 0, as a penalty on the velocity's squared distance to it.

Letters: P prompts, G images per prompt, B = P * G, K rewards, b rows of a micro-batch, T noise levels of an image.

Deviations from the published code: levels are drawn for each image (or each group, where a loss compares its images at
one level), not for each micro-batch, and noise for each level, so that sizes of batches do not change the result; crd
centres within a group; DGPO's and AWM's fast averages move once per iteration, not after every update; the loss is
divided by the number of images of the whole update, on all processes, and rft leaves images of weight 0 out first
(`loss_denominator: all` counts them).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.advantages.normalise import combine, zero_variance_groups
from flowrl.advantages.reward_maps import log_tame
from flowrl.advantages.routing import by_part, means_of_parts, regions_of, with_parts
from flowrl.advantages.shaping import select_best
from flowrl.config.train import resolve_path
from flowrl.objectives.forward_losses import Matched, noised
from flowrl.objectives.preference_losses import best_of_group
from flowrl.objectives.terms import velocity_kl
from flowrl.prompts.loading import Prompt, prompts_of_iteration
from flowrl.prompts.pairs import Shown, load_images, read_shown
from flowrl.recipes.forward_settings import (
    ForwardObjective,
    check,
    counts,
    decay_of,
    micro_batch_size,
    objective_of,
    only_here,
    slot_decays,
    trained_scale,
)
from flowrl.rewards import RewardOutput
from flowrl.runtime.placement import sent, taken
from flowrl.runtime.randomness import Part, sample_normals
from flowrl.samplers import Kernel
from flowrl.samplers.guidance import uncounted
from flowrl.samplers.times import Times, training_times
from flowrl.training.assignment import normalise, part_row, reward_channels
from flowrl.training.draws import AskedPrompts, Batch
from flowrl.training.learner import GradientSum, Statistics, total_of
from flowrl.training.loop import Loop
from flowrl.training.parts import Ready, sampler_of
from flowrl.training.paths import Paths, sample
from flowrl.training.processes.mesh import in_step
from flowrl.training.prompting import encode_prompts
from flowrl.training.run import Run
from flowrl.trajectory import Schedule

__all__ = ["REGRESSES", "THROUGH_REWARDS", "check", "counts", "main", "objective_of", "only_here", "trained_scale"]

REGRESSES, THROUGH_REWARDS = True, False

_METRICS = {"ratio": "ratio_mean", "clipped": "clip_fraction"}  # names that the log has already
_MEANS = (
    "policy_loss kl old_kl velocity_norm_ratio optimality positive_error negative_error error ratio_mean gate "
    "clip_fraction implicit_reward weight"
).split()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Images:
    """This process's images: finished latents [n, *latent], and on the host [n] group and whether trained, and [P, n]
    reward and advantage of each part of a state, P = 1 if rewards judge the whole."""

    clean: Tensor
    group: Tensor
    reward: Tensor
    advantage: Tensor
    keep: Tensor


def main(ready: Ready, run: Run) -> bool:
    """Trains to the end or to an interrupt; returns whether it finished. Writes only into the run folder."""
    config, file, needs_reference = ready.config, ready.objective.images_file, ready.objective.method.needs_reference
    shown = [] if file is None else read_shown(resolve_path(file))
    more = tuple(Prompt(text=one.prompt, metadata={}, negative=config.prompts.negative) for one in shown)
    ready = replace(ready, prompts=replace(ready.prompts, more=more))
    loop = Loop(ready, run, slots=tuple(slot_decays(config)), needs_reference=needs_reference)
    kernel, schedule = sampler_of(config.sampler, loop.pipeline, kernel=ready.kernel)
    blocks = torch.arange(loop.geometry.images_per_process).split(micro_batch_size(config, run.world))
    for iteration in loop:
        iterate(loop, kernel, schedule, blocks, shown, iteration)
    return loop.finished


def iterate(
    loop: Loop, kernel: Kernel, schedule: Schedule, blocks: tuple[Tensor, ...], shown: list[Shown], iteration: int
) -> None:
    """One iteration; frees its memory before the next one samples."""
    run, config, objective = loop.run, loop.config, loop.ready.objective
    row: dict[str, Any] = {}

    # 1. Images of files; or sample with the policy that the method samples with, keep the finished latents.
    if shown:
        with loop.clock("images"):
            batch, images = images_of_files(loop, shown, iteration)
    else:
        batch = loop.batch(iteration)
        with loop.scorer.start(batch) as scoring:
            with loop.clock("rollout"), torch.no_grad(), loop.policy.under(objective.sampled_by):
                clean = sample(loop, batch, Paths(kernel=kernel, schedule=schedule), scoring).final
            with loop.clock("reward"):
                output = scoring.result()

        # 2. Group-relative advantages, over the images of all processes.
        images, row = judge(loop, batch, clean, output, best_only=objective.method.best_only)
    if not loop.trains_policy(iteration):  # only a jointly trained reward learns
        loop.log(iteration, row | {"live_rows": 0})
        return

    # 3. Update: predict the velocity at noised images under the policy that changes.
    with loop.clock("update"):
        stats, moved = Statistics(*with_parts(loop.routes, ("loss", *_MEANS))), list[bool]()
        levels, shared = config.times, objective.method.one_level
        keys = image_keys(loop, batch, range(len(batch.own)), "noise levels", shared=shared)
        how_many: dict[str, Any] = {"count": levels.count, "fraction": levels.fraction, "shift": levels.shift}
        times = training_times(levels.kind, schedule, keys, **how_many)
        for part in range(config.updates_per_rollout):
            share = blocks[part :: config.updates_per_rollout]
            kept = [index[images.keep[index]] for index in share]  # filled up again unless groups stay whole
            kept = kept if objective.whole_groups else [*torch.cat(kept).split(len(share[0]))]
            own_blocks = [index for index in kept if len(index)]
            counted = total_of(run, sum(len(index) for index in own_blocks))
            if counted == 0:
                continue
            if config.loss_denominator == "all":  # those that are not the best of their group too
                counted = total_of(run, sum(int(images.reward[0, index].isfinite().sum()) for index in share))
            gradient = loop.gradient()
            how = partial(descend, loop, batch, images, times, own_blocks, objective, counted)
            how(gradient, stats)
            moved.append(loop.update(gradient, stats, again=how))

    # 4. The old policies follow, unless every update was left out; log.
    for slot, kind in slot_decays(config).items():
        decay = 1.0 if moved and not any(moved) else decay_of(config, kind, loop.counters["updates"])
        loop.policy.blend(slot, decay)
        row[f"{slot}_decay"] = decay
    loop.log(iteration, row | stats.row(run) | {"live_rows": stats.rows(run)})


def images_of_files(loop: Loop, shown: list[Shown], iteration: int) -> tuple[Batch, Images]:
    """This process's images of an iteration, encoded, each its own group: shuffled passes as for prompts."""
    config, count = loop.config, loop.geometry.images_per_process
    own = range(loop.run.rank * count, (loop.run.rank + 1) * count)
    lines = prompts_of_iteration(len(shown), config.num_images, config.seed, iteration)[own.start : own.stop]
    prompts, group = tuple(loop.prompts.more[line] for line in lines), torch.arange(own.start, own.stop)
    cond = encode_prompts(loop.pipeline, prompts)
    asked = AskedPrompts(groups=group, prompts=prompts, prompt_ids=tuple(lines), cond=cond)
    size = loop.pipeline.image_shape[1], loop.pipeline.image_shape[2]
    clean = loop.pipeline.encode_images(load_images([shown[line].image for line in lines], size))
    none, every = torch.zeros(1, count), torch.ones(count, dtype=torch.bool)
    images = Images(clean=clean, group=group, reward=none, advantage=none, keep=every)
    return Batch(iteration=iteration, own=own, group=group, asked=asked), images


# ---- advantages ------------------------------------------------------------------------------------------------------


def judge(
    loop: Loop, batch: Batch, clean: Tensor, output: RewardOutput, *, best_only: bool
) -> tuple[Images, dict[str, Any]]:
    """Rewards and advantages of this process's images, and the log's means over those of all processes. An image
    without a valid reward is not trained, nor one that `best_of` leaves out. One in a group of equal rewards is, with
    advantage 0: the losses still hold the policy to its old outputs there."""
    config = loop.config
    # With a virtual member of every group, or raw rewards as weights, groups of equal rewards teach too.
    compared = config.adv_virtual_max is None and config.objective.options.get("weights") != "raw"
    reward_B = loop.rewards_of_all(output, compared=compared)
    group_B = torch.arange(config.num_images) // config.group_size
    members_KB, weights = reward_channels(loop, output)
    members_KB = torch.stack([loop.scorer.of_all(member, output.valid) for member in members_KB])
    if config.reward_aggregation == "log_tame":
        members_KB, weights = combine(log_tame(members_KB.double()), weights)[None], weights.new_ones(1)
    valid_B = ~reward_B.isnan()
    of_parts = partial(by_part, loop.routes, members_KB, weights)
    advantage_PB = of_parts(partial(normalise, config, members_KB.double(), group_B))
    advantage_PB = advantage_PB.clamp(-config.adv_clip_range, config.adv_clip_range)
    reward_PB = reward_B[None] if loop.routes is None else of_parts(partial(combine, members_KB))
    keep_B = valid_B.clone()
    if best_only:
        keep_B[valid_B] = best_of_group(reward_B[valid_B], group_B[valid_B]) == 1
    if config.best_of is not None:
        keep_B = select_best(reward_B, group_B, config.best_of)
    own = slice(batch.own.start, batch.own.stop)
    group, reward, advantage, keep = (column[..., own] for column in (group_B, reward_PB, advantage_PB.float(), keep_B))
    images = Images(clean=clean, group=group, reward=reward, advantage=advantage, keep=keep)
    how: dict[str, Any] = {"correction": config.adv_correction, "min_std": config.adv_min_std}
    dead = [zero_variance_groups(one, config.group_size, valid_B=valid_B, **how) for one in reward_PB]
    row = loop.scorer.row(output, batch.group) | part_row(loop, advantage)
    row["advantage_abs"] = float(advantage_PB[:, valid_B].abs().mean())
    return images, row | {"zero_std_ratio": float(torch.stack(dead).all(0).double().mean())}


# ---- update ----------------------------------------------------------------------------------------------------------


def descend(
    loop: Loop,
    batch: Batch,
    images: Images,
    times: Times,
    blocks: list[Tensor],
    objective: ForwardObjective,
    counted: int,
    gradient: GradientSum,
    stats: Statistics,
) -> None:
    """Adds up the gradient of an update's images at each of their noise levels, in the mean over `counted` images."""
    count = loop.config.times.count
    for index, live in in_step(loop.shards, blocks, idle=lambda _: torch.arange(1)):
        for draw in range(count):
            with uncounted(not live):
                matched = match(loop, batch, images, times, index, draw, objective)
            if not live:
                gradient.add(torch.stack([one.velocity[:0].sum() for one in matched]).sum())
                continue
            loss_b = loss_of(loop, matched, objective, stats)
            gradient.add(loss_b.sum() / (counted * count))


def image_keys(loop: Loop, batch: Batch, index: Iterable[int], tag: str, *, shared: bool) -> list[tuple[Part, ...]]:
    """Counters of images: (seed, tag, iteration, group, image in the group, or 0 for all of a group)."""
    size, numbers = loop.config.group_size, [batch.own[i] for i in index]
    return [(loop.config.seed, tag, batch.iteration, i // size, 0 if shared else i % size) for i in numbers]


def match(
    loop: Loop, batch: Batch, images: Images, times: Times, index: Tensor, draw: int, objective: ForwardObjective
) -> list[Matched]:
    """Images noised to one of their levels, and the velocities there: of the policy with its graph, of others without;
    for each part of a state with its own loss. The others come first: weights must not change between a forward pass
    and its backward pass."""
    method, options = objective.method, objective.options
    keys = [(*key, draw) for key in image_keys(loop, batch, index.tolist(), "match", shared=method.shared_noise)]
    clean = taken(images.clean, index, loop.device)
    sigma, timestep = times.sigma[index, draw], times.timestep[index, draw]
    noise = sent(sample_normals(loop.pipeline.latent_shape, keys), clean.device)
    x, cond = noised(clean, noise, sigma), batch.asked.cond_of(images.group[index])
    velocity = loop.velocity(cond, options.guidance_scale)
    old = reference = None
    with torch.no_grad(), loop.network.counting("reference"):
        if "old" in loop.policy.slots:
            with loop.policy.under("old"):
                old = velocity(x, sigma, timestep)
        if method.needs_reference or loop.config.kl_coef > 0:
            scale = options.reference_guidance_scale
            with loop.policy.under(loop.reference_slot):
                guided = loop.velocity(cond, options.guidance_scale if scale is None else scale)
                reference = guided(x, sigma, timestep)
    with loop.network.counting("update"):
        predicted = velocity(x, sigma, timestep)
    columns = (images.advantage, images.reward, images.group)
    advantage, reward, group = (sent(column[..., index], clean.device) for column in columns)
    latents = {"clean": clean, "noise": noise, "velocity": predicted, "old": old, "reference": reference}
    found = list[Matched]()
    for region, own_advantage, own_reward in zip(regions_of(loop.routes), advantage, reward, strict=True):
        parts: dict[str, Any] = {name: latent[region] for name, latent in latents.items() if latent is not None}
        found.append(Matched(**parts, sigma=sigma, advantage=own_advantage, reward=own_reward, group=group))
    return found


def loss_of(loop: Loop, matched: list[Matched], objective: ForwardObjective, stats: Statistics) -> Tensor:
    """[b] loss of images, the mean over the parts of a state with their own losses."""
    found = [loss_of_part(one, objective, loop.config.kl_coef) for one in matched]
    stats.mean(None, **(noted := means_of_parts(loop.routes, found)))
    return noted["loss"]


def loss_of_part(matched: Matched, objective: ForwardObjective, kl_coef: float) -> dict[str, Tensor]:
    """[b] loss of the method, plus `kl_coef mse(v, v_ref) + old_kl_coef mse(v, v_old)`, with what is logged of it."""
    policy_loss, metrics = objective.loss(matched)
    old_kl_coef = objective.options.old_kl_coef
    loss, noted = policy_loss, {_METRICS.get(name, name): value for name, value in metrics.items()}
    velocity = matched.velocity.detach()
    if matched.reference is not None:
        noted["kl"] = velocity_kl(velocity, matched.reference)
        noted["velocity_norm_ratio"] = velocity.flatten(1).norm(dim=1) / matched.reference.flatten(1).norm(dim=1)
        if kl_coef > 0:
            loss = loss + kl_coef * velocity_kl(matched.velocity, matched.reference)
    if matched.old is not None:
        noted["old_kl"] = velocity_kl(velocity, matched.old)
        if old_kl_coef > 0:
            loss = loss + old_kl_coef * velocity_kl(matched.velocity, matched.old)
    return {"loss": loss, "policy_loss": policy_loss, **noted}
