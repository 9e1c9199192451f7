"""Matching on noised images: `flowrl train configs/tiny_nft.yaml [key=value ...]`

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

and the reference wherever `kl_coef` is above 0, as a penalty on the velocity's squared distance to it.

Letters: P prompts, G images a prompt, B = P * G, K rewards, b rows of a micro-batch, T noise levels of an image.

Deviations from the published code: levels are drawn for each image (or each group, where a loss compares its images at
one level), not for each micro-batch, and noise for each level, so that sizes of batches do not change the result; crd
centres within a group; DGPO's and AWM's fast averages move once an iteration, not after every update; the loss is
divided by the number of images of the whole update, on all processes, and rft leaves images of weight 0 out first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.advantages.normalise import Aggregation, aggregate, zero_variance_groups
from flowrl.config.train import TrainConfig
from flowrl.objectives.forward_losses import FORWARD, Matched, Method, noised
from flowrl.objectives.preference_losses import best_of_group
from flowrl.objectives.terms import velocity_kl
from flowrl.randomness import Part, sample_normals
from flowrl.recipes.forward_settings import (
    Options,
    check,
    decay_of,
    micro_batch_size,
    objective_of,
    sampling_slot,
    slot_decays,
    split_options,
    whole_groups,
)
from flowrl.rewards import RewardOutput
from flowrl.samplers import ode_rollout
from flowrl.samplers.times import Times, training_times
from flowrl.training.learner import GradientSum, Statistics
from flowrl.training.loop import Batch, Loop
from flowrl.training.parts import sampler_of
from flowrl.training.run import Run
from flowrl.training.scoring import MERGED, Scoring, reward_row, trained_channels
from flowrl.trajectory import Schedule

__all__ = ["check", "main"]

_ONE_LEVEL = ("dgpo", "crd")  # losses that compare errors of a group's images, which only mean something at one level
_METRICS = {"ratio": "ratio_mean", "clipped": "clip_fraction"}  # names that the log has already
_STATISTICS = (
    "policy_loss", "kl", "old_kl", "velocity_norm_ratio", "optimality", "positive_error", "negative_error", "error",
    "ratio_mean", "gate", "clip_fraction", "implicit_reward", "weight",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Images:
    """This process's images: finished latents [n, *latent], and [n] group, reward, advantage, and whether trained."""

    clean: Tensor
    group: Tensor
    reward: Tensor
    advantage: Tensor
    keep: Tensor


def main(config: TrainConfig, run: Run) -> bool:
    """Trains to the end or to an interrupt; returns whether it finished. Everything it makes lies in the run folder."""
    name, decays = objective_of(config), slot_decays(config)
    method, whole, (options, loss_options) = FORWARD[name], whole_groups(config), split_options(config)
    loop = Loop(config, run, slots=tuple(decays))
    schedule = sampler_of(config.sampler, loop.pipeline)[1]
    blocks = torch.arange(loop.geometry.images_per_process).split(micro_batch_size(config, run.world))
    for iteration in loop:
        batch = loop.batch(iteration)

        # 1. Rollout: sample with the policy that the method samples with, keep the finished latents.
        with loop.clock("rollout"), torch.no_grad(), loop.policy.under(sampling_slot(config)):
            scoring = Scoring(loop, batch)
            clean = sample(loop, batch, schedule, scoring)
        with loop.clock("reward"):
            output = scoring.result()

        # 2. Group-relative advantages, over the images of all processes.
        images, row = judged(loop, batch, clean, output, name)
        if not loop.trains_policy(iteration):  # only a reward that is trained along learns
            loop.log(iteration, row | {"live_rows": 0})
            continue

        # 3. Update: predict the velocity at noised images under the policy that changes.
        with loop.clock("update"):
            stats, count = Statistics(*_STATISTICS), config.times.count
            times = draw_times(loop, batch, schedule, shared=name in _ONE_LEVEL)
            for part in range(config.updates_per_rollout):
                own_blocks = trained_blocks(blocks[part :: config.updates_per_rollout], images.keep, whole)
                live = sum(len(index) for index in own_blocks)
                live = int(run.accelerator.reduce(torch.tensor(live, device=run.device)).item())
                if live == 0:
                    continue
                gradient = GradientSum(loop.policy, loop.counters, scale_loss=config.pipeline.dtype == "float16")
                for index in own_blocks:
                    for draw in range(count):
                        matched = match(loop, batch, images, times, index, draw, method, options)
                        loss_b = loss_of(matched, method, config, options, loss_options, stats)
                        gradient.add(loss_b.sum() / (live * count))
                stats.note("grad_norm", gradient.apply(run, loop.optimizer, config.optim.max_grad_norm, iteration))
                loop.updated()

        # 4. The old policies follow; log.
        for slot, kind in decays.items():
            decay = decay_of(config, kind, loop.counters["updates"])
            loop.policy.blend(slot, decay)
            row[f"{slot}_decay"] = decay
        loop.log(iteration, row | stats.means(run) | {"live_rows": stats.rows(run)})
    return loop.finished


# ---- rollout and advantages ------------------------------------------------------------------------------------------


def sample(loop: Loop, batch: Batch, schedule: Schedule, scoring: Scoring) -> Tensor:
    """Finished latents `[n, *latent]` of this process's images by the ODE, under the weights of now.

    Each piece goes to `scoring` as it is done.
    """
    size, solver, parts = loop.geometry.rollout_batch_size, loop.config.sampler.solver, []
    for start in range(0, len(batch.own), size):
        x = loop.start_noise(batch, batch.own[start : start + size])
        velocity = loop.velocity(batch.cond[batch.local(batch.group[start : start + size])])
        parts.append(ode_rollout(velocity, x, schedule, solver=solver))
        scoring.add(parts[-1], batch.group[start : start + size], batch.own[start : start + size])
    return torch.cat(parts)


def judged(loop: Loop, batch: Batch, clean: Tensor, output: RewardOutput, name: str) -> tuple[Images, dict[str, Any]]:
    """Rewards and advantages of this process's images, and the log's means over those of all processes.

    An image without a valid reward is not trained. One of a group of equal rewards is, with advantage 0: the losses
    still hold the policy to what it was there.
    """
    config, run = loop.config, loop.run
    members, weights = trained_channels(loop, output)
    how = "sum" if config.reward_aggregation in MERGED else config.reward_aggregation
    value_BK = run.gather(torch.stack([output.values, *members], 1).to(run.device)).cpu()
    valid_B = run.gather(output.valid.to(run.device)).cpu()
    reward_B, group_B = value_BK[:, 0], torch.arange(config.num_images) // config.group_size
    reward_B = torch.where(valid_B, reward_B, torch.nan)
    loop.check_rewards(reward_B, batch.iteration)
    advantage_B = aggregate(
        torch.where(valid_B, value_BK[:, 1:].T.double(), torch.nan), group_B, torch.tensor(weights).double(),
        how=cast(Aggregation, how), scope=config.adv_std, eps=config.adv_eps, correction=config.adv_correction,
        baseline=config.adv_baseline, virtual_max=config.adv_virtual_max, clip=config.adv_clip_range,
    )  # fmt: skip
    keep_B = valid_B.clone()
    if name == "rft":
        keep_B[valid_B] = best_of_group(reward_B[valid_B], group_B[valid_B]) == 1
    own = slice(batch.own.start, batch.own.stop)
    images = Images(clean=clean, **{key: column[own].to(run.device) for key, column in {
        "group": group_B, "reward": reward_B, "advantage": advantage_B.float(), "keep": keep_B,
    }.items()})  # fmt: skip
    dead_P = zero_variance_groups(reward_B, config.group_size, valid_B=valid_B)
    row = reward_row(loop, output.values, output.valid, output.parts)
    row |= {"advantage_abs": float(advantage_B[valid_B].abs().mean()), "zero_std_ratio": float(dead_P.double().mean())}
    return images, row


# ---- update ----------------------------------------------------------------------------------------------------------


def trained_blocks(blocks: tuple[Tensor, ...], keep: Tensor, whole: bool) -> list[Tensor]:
    """The blocks of image indexes without images that are not trained, filled up again unless groups stay `whole`."""
    kept = [index[keep.cpu()[index]] for index in blocks]
    return [index for index in (kept if whole else torch.cat(kept).split(len(blocks[0]))) if len(index)]


def draw_times(loop: Loop, batch: Batch, schedule: Schedule, *, shared: bool) -> Times:
    """Noise levels `[n, T]` of this process's images, one row a group where it shares them."""
    times = loop.config.times
    keys = image_keys(loop, batch, range(len(batch.own)), "noise levels", shared=shared)
    return training_times(times.kind, schedule, keys, count=times.count, fraction=times.fraction, shift=times.shift)


def image_keys(loop: Loop, batch: Batch, index: Iterable[int], tag: str, *, shared: bool) -> list[tuple[Part, ...]]:
    """Counters of images: (seed, tag, iteration, group, image in the group, or 0 for all of a group)."""
    size, numbers = loop.config.group_size, [batch.own[i] for i in index]
    return [(loop.config.seed, tag, batch.iteration, i // size, 0 if shared else i % size) for i in numbers]


def match(
    loop: Loop, batch: Batch, images: Images, times: Times, index: Tensor, draw: int, method: Method, options: Options
) -> Matched:
    """Images noised to one of their levels, and the velocities there: of the policy with its graph, of others without.

    The others come first: weights must not change between a forward pass and its backward pass.
    """
    keys = [(*key, draw) for key in image_keys(loop, batch, index.tolist(), "match", shared=method.shared_noise)]
    noise = sample_normals(loop.pipeline.latent_shape, keys).to(loop.run.device)
    clean, sigma, timestep = images.clean[index], times.sigma[index, draw], times.timestep[index, draw]
    x, cond = noised(clean, noise, sigma), batch.cond[batch.local(images.group[index])]
    velocity = loop.velocity(cond, options.guidance_scale)
    old = reference = None
    with torch.no_grad(), loop.network.counting("reference"):
        if "old" in loop.policy.slots:
            with loop.policy.under("old"):
                old = velocity(x, sigma, timestep)
        if method.needs_reference or loop.config.kl_coef > 0:
            scale = options.reference_guidance_scale
            with loop.policy.under("reference"):
                guided = loop.velocity(cond, options.guidance_scale if scale is None else scale)
                reference = guided(x, sigma, timestep)
    with loop.network.counting("update"):
        predicted = velocity(x, sigma, timestep)
    return Matched(
        clean=clean, noise=noise, sigma=sigma, velocity=predicted, old=old, reference=reference,
        advantage=images.advantage[index], reward=images.reward[index], group=images.group[index],
    )  # fmt: skip


def loss_of(
    matched: Matched, method: Method, config: TrainConfig, options: Options, loss_options: dict[str, Any],
    stats: Statistics,
) -> Tensor:  # fmt: skip
    """[b] loss of the method, plus `kl_coef mse(v, v_ref) + old_kl_coef mse(v, v_old)`."""
    policy_loss, metrics = method.function(matched, **loss_options)
    loss, noted = policy_loss, {_METRICS.get(name, name): value for name, value in metrics.items()}
    velocity = matched.velocity.detach()
    if matched.reference is not None:
        noted["kl"] = velocity_kl(velocity, matched.reference)
        noted["velocity_norm_ratio"] = velocity.flatten(1).norm(dim=1) / matched.reference.flatten(1).norm(dim=1)
        if config.kl_coef > 0:
            loss = loss + config.kl_coef * velocity_kl(matched.velocity, matched.reference)
    if matched.old is not None:
        noted["old_kl"] = velocity_kl(velocity, matched.old)
        if options.old_kl_coef > 0:
            loss = loss + options.old_kl_coef * velocity_kl(matched.velocity, matched.old)
    everything = torch.ones(len(loss), dtype=torch.bool, device=loss.device)
    stats.add(everything, loss=loss, policy_loss=policy_loss, **noted)
    return loss
