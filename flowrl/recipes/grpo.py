"""Policy gradient on sampled paths: `flowrl train configs/tiny_grpo_geneval.yaml [key=value ...]`

An iteration samples paths of G images for each of P prompts with a stochastic kernel, scores images, assigns credit to
every stochastic step, turns it into group-relative advantages, and updates the LoRA with a clipped surrogate
(Flow-GRPO, arXiv 2505.05470). Methods differ in one function each: which steps are stochastic (`sampler`), which images
are scored and what each step gets of their rewards (`credit`), how rewards become advantages (`adv_*`,
`reward_aggregation`, `shaping`), and the loss of a scored transition (`objective`).

Letters: P prompts, G images a prompt, B = P * G, b rows of a micro-batch, M transitions, F finished latents.

Deviations from the published code: the KL is exact (`kl_type: no_dt` is the published one); the last step is an ODE
step (there too it is never trained); groups of equal rewards are masked where they stand rather than re-packed; the
loss is divided by the number of live rows of the whole update, on all processes; gradients are summed in float64 over
micro-batches and processes, so that their number does not change the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowrl.advantages.shaping import aggregation_weights
from flowrl.config.options import check_options, unknown_name
from flowrl.config.train import TrainConfig
from flowrl.credit import CREDIT
from flowrl.objectives.policy_gradient import OBJECTIVES, Scored, kernel_sensitivity, sequence_coefficients
from flowrl.objectives.terms import clipped_above, clipped_below
from flowrl.rewards import RewardOutput
from flowrl.rewards.outputs import joined
from flowrl.samplers import KERNELS, Kernel, Transition, gaussian_kl, published_kl
from flowrl.training.assignment import (
    Ends,
    accuracy_scale,
    advantages,
    all_ends,
    best_samples,
    check_assignment,
    credit_of,
)
from flowrl.training.learner import GradientSum, Statistics
from flowrl.training.loop import Batch, Loop
from flowrl.training.paths import check_plan, sample_paths, sampler_at, shared_sources
from flowrl.training.prompt_choice import check_choice, choose_prompts, enough, remember
from flowrl.training.run import Run
from flowrl.training.sampler_checks import check_density
from flowrl.training.scoring import Scoring, reward_row
from flowrl.trajectory import Credit, Rows, Sampled, Schedule

_OF_RUN = ("step_std", "per_dim", "gather", "rank")  # arguments of credit methods that are no options
_STATISTICS = ("policy_loss", "ratio_mean", "clip_fraction", "approx_kl", "kl")


def main(config: TrainConfig, run: Run) -> bool:
    """Trains to the end or to an interrupt; returns whether it finished. Everything it makes lies in the run folder."""
    loop = Loop(config, run)
    method, objective = CREDIT[config.credit.method], OBJECTIVES[config.objective.name or "clip"]
    for iteration in loop:
        kernel, schedule, steps = sampler_at(loop, iteration)
        if not steps:  # the last window of a round, with sampler.published_window
            loop.log(iteration, {"live_rows": 0})
            continue

        # 1. Rollout: sample paths with the current policy, score the images they lead to. More rounds where a method
        #    asks for more groups that disagree.
        rounds: list[tuple[Batch, Sampled, RewardOutput, Ends]] = []
        while not rounds or (len(rounds) < config.curriculum.max_rounds and not enough(loop, [r[3] for r in rounds])):
            batch = loop.batch(iteration, round=len(rounds), prompt_ids=choose_prompts(loop, iteration, len(rounds)))
            scoring = Scoring(loop, batch)
            with loop.clock("rollout"), torch.no_grad():
                sampled = sample_paths(
                    loop, batch, method, kernel, schedule, steps, scoring, keep_means=objective.needs_old_mean
                )
            with loop.clock("reward"):
                output = scoring.result()
            rounds.append((batch, sampled, output, all_ends(loop, batch, sampled, output)))
        batch, sampled = Batch.cat([r[0] for r in rounds]), Sampled.cat([r[1] for r in rounds])
        output, ends = joined([r[2] for r in rounds]), Ends.cat([r[3] for r in rounds])
        loop.check_rewards(ends.reward, iteration)

        if not loop.trains_policy(iteration):  # only a reward that is trained along learns
            nothing = torch.zeros(len(sampled))
            loop.log(iteration, reward_metrics(loop, sampled, output, nothing) | {"live_rows": 0})
            continue

        # 2. Credit and group-relative advantages, over the images of all processes.
        credit = credit_of(loop, method, sampled, output, kernel, schedule)
        advantage_M, live_M, dead = advantages(loop, method, batch, sampled, credit, output, ends)
        rows = rows_of(sampled, credit, advantage_M, live_M & best_samples(loop, sampled, ends), config.clip_bounds)
        kl_scale_M = accuracy_scale(loop, sampled, ends)

        # 3. Update: score the stored transitions again under the policy that changes.
        with loop.clock("update"):
            stats = Statistics(*_STATISTICS)
            subset = config.sampler.trained_fraction < 1 and config.sampler.trained_steps == "random"
            blocks = micro_batches(rows, loop.geometry.micro_batch_size, config.updates_per_rollout, kept_only=subset)
            # Where the plan shares latents, the pieces of several updates or rounds are not those of the rollout.
            shared = method.plan != "trajectories" and (config.updates_per_rollout > 1 or len(rounds) > 1)
            if subset or shared or loop.geometry.micro_batch_size != loop.geometry.rollout_batch_size:
                rows, sampled = scored_again(loop, batch, rows, sampled, blocks, schedule, kernel)
            first_update = True
            for own_blocks in blocks:
                weight_M = loss_weights(loop, rows, own_blocks)
                if weight_M is None:
                    continue
                gradient = GradientSum(loop.policy, loop.counters, scale_loss=config.pipeline.dtype == "float16")
                whole = whole_paths(loop, batch, rows, sampled, own_blocks, schedule, kernel, known_one=first_update)
                for index in own_blocks:
                    part = rows[index]
                    if not bool(part.keep.any()):
                        continue
                    reference = None
                    if config.kl_coef > 0:
                        with torch.no_grad(), loop.policy.under("reference"), loop.network.counting("reference"):
                            reference = replay(loop, batch, part, sampled.states, schedule, kernel)
                    with loop.network.counting("update"):
                        new = replay(loop, batch, part, sampled.states, schedule, kernel)
                    scored = scored_rows(part, index, sampled, new, schedule, kernel, config)
                    policy_loss = objective.function(scored, **config.objective.options)
                    if whole is not None:
                        policy_loss = whole[index] * scored.log_ratio
                    loss_b = policy_loss
                    if reference is not None:
                        kl_b = kl_of(new, reference, scored.step_size, config)
                        loss_b = loss_b + config.kl_coef * kl_scale_M[index] * kl_b
                        stats.add(part.keep, kl=kl_b)
                    note(stats, part, scored, loss_b, policy_loss)
                    gradient.add((loss_b * part.weight * weight_M[index])[part.keep].sum())
                if first_update:
                    check_first_ratio(stats, run, config, iteration)
                    first_update = False
                stats.note("grad_norm", gradient.apply(run, loop.optimizer, config.optim.max_grad_norm, iteration))
                loop.updated()

        # 4. What a method remembers, and the log.
        remember(loop, ends)
        row = reward_metrics(loop, sampled, output, advantage_M) | stats.means(run)
        loop.log(iteration, row | {"zero_std_ratio": dead, "live_rows": stats.rows(run)})
    return loop.finished


def check(config: TrainConfig) -> None:
    """Refuses settings of this recipe that cannot work, before a model loads.

    Raises:
        ValueError: an unknown method or option, or a combination without meaning, with what to change.
    """
    name = config.objective.name or "clip"
    if name not in OBJECTIVES:
        raise ValueError(f"objective.name: {unknown_name('objective of recipe grpo', name, OBJECTIVES)}")
    check_options(OBJECTIVES[name].function, config.objective.options, owner=f"objective {name!r}")
    if config.credit.method not in CREDIT:
        raise ValueError(f"credit.method: {unknown_name('credit method', config.credit.method, CREDIT)}")
    check_density(config.sampler, "recipe grpo")
    method = CREDIT[config.credit.method]
    check_options(method.credit, config.credit.options, owner=f"credit {config.credit.method!r}", reserved=_OF_RUN)
    check_plan(config, method)
    check_assignment(config, method)
    check_choice(config)
    if config.ratio != "step" and (method.plan != "trajectories" or method.values):
        raise ValueError(
            f"ratio={config.ratio} takes one ratio and one advantage a trajectory, but credit method "
            f"{config.credit.method} gives every step its own: use ratio=step, or credit.method=outcome"
        )
    if config.ratio != "step" and name != "clip":
        raise ValueError(f"ratio={config.ratio} is defined for the clipped surrogate, not for objective {name}")
    if config.ratio != "step" and config.loss_aggregation != "samples":
        raise ValueError(f"ratio={config.ratio} averages over trajectories: set loss_aggregation=samples")
    sources = shared_sources(config, method)
    if sources % config.updates_per_rollout:
        raise ValueError(
            f"credit method {config.credit.method} draws its transitions from {sources} latents a step and process, "
            f"which updates_per_rollout ({config.updates_per_rollout}) must divide: lower it, or raise prompts_per_step"
        )
    if method.plan == "tree" and config.loss_aggregation != "rows":
        raise ValueError(
            f"loss_aggregation={config.loss_aggregation} needs a sample for each transition, and a tree shares them "
            "between samples: use loss_aggregation=rows"
        )
    if name in ("guard",) and config.log_ratio != "mean":
        raise ValueError("objective guard is defined for log-ratios per latent dimension: set log_ratio=mean")


# ---- update ----------------------------------------------------------------------------------------------------------


def rows_of(
    sampled: Sampled, credit: Credit, advantage_M: Tensor, keep_M: Tensor, clip_bounds: tuple[float, float]
) -> Rows:
    """The training table."""
    device, ones = sampled.log_prob.device, torch.ones_like(sampled.log_prob)
    return Rows(
        source=sampled.source, produced=sampled.produced, step=sampled.step, sample=sampled.sample, group=sampled.group,
        old_log_prob=sampled.log_prob, advantage=advantage_M.to(device, ones.dtype),
        weight=ones if credit.weight is None else credit.weight.to(device, ones.dtype),
        clip_low=ones * clip_bounds[0], clip_high=ones * clip_bounds[1], keep=keep_M.to(device),
    )  # fmt: skip


def micro_batches(rows: Rows, size: int, parts: int, *, kept_only: bool = False) -> list[list[Tensor]]:
    """Row indexes of micro-batches for each of `parts` updates, steps ascending.

    A micro-batch holds the transitions of one step that start at `size` latents which stand together in the pool, or at
    fewer where a step has not enough of them for every update. Order and composition are those of the rollout, so that
    equal sizes replay equal batches.
    """
    updates: list[list[Tensor]] = [[] for _ in range(parts)]
    wanted = rows.keep if kept_only else torch.ones_like(rows.keep)
    for step in rows.step.unique(sorted=True):
        index = torch.nonzero((rows.step == step) & wanted).flatten()
        sources, place = rows.source[index].unique(sorted=True, return_inverse=True)
        own = max(1, min(size, -(-len(sources) // parts)))
        for number in range(-(-len(sources) // own)):
            updates[number % parts].append(index[place // own == number])
    return updates


def replay(loop: Loop, batch: Batch, rows: Rows, states: Tensor, schedule: Schedule, kernel: Kernel) -> Transition:
    """The transition that the network's weights give at the stored states of rows that share a step.

    Siblings share their source, so that the network answers once for all of them.
    """
    step = int(rows.step[0])
    sources, place = rows.source.unique(sorted=True, return_inverse=True)
    first = torch.stack([torch.nonzero(place == number)[0, 0] for number in range(len(sources))])
    cond = batch.cond[batch.local(rows.group[first])]
    x, sigma = states[sources], schedule.sigma[step]
    velocity = loop.velocity(cond)(x, sigma, schedule.timestep[step])
    return kernel(states[rows.source], velocity[place], sigma, schedule.sigma[step + 1])


@torch.no_grad()
def rescored(
    loop: Loop, batch: Batch, rows: Rows, sampled: Sampled, blocks: list[Tensor], schedule: Schedule, kernel: Kernel
) -> tuple[Tensor, Tensor | None]:
    """Log-densities `[M]` of the stored transitions under the weights of now, and means `[M, *latent]` where the
    rollout kept them; outside the blocks both stay as they were."""
    log_prob = rows.old_log_prob.clone()
    mean = None if sampled.mean is None else sampled.mean.clone()
    with loop.network.counting("update"):
        for index in blocks:
            transition = replay(loop, batch, rows[index], sampled.states, schedule, kernel)
            log_prob[index] = kernel.log_prob(sampled.states[rows.produced[index]], transition)
            if mean is not None:
                mean[index] = transition.mean
    return log_prob, mean


def scored_again(
    loop: Loop, batch: Batch, rows: Rows, sampled: Sampled, blocks: list[list[Tensor]], schedule: Schedule,
    kernel: Kernel,
) -> tuple[Rows, Sampled]:  # fmt: skip
    """Old log-densities and means as the update's own micro-batches give them.

    Networks answer a little differently at another batch size; the ratio must not see that.
    """
    old, mean = rescored(loop, batch, rows, sampled, [b for part in blocks for b in part], schedule, kernel)
    return Rows(**{**rows.columns(), "old_log_prob": old}), replace(sampled, mean=mean)


def loss_weights(loop: Loop, rows: Rows, blocks: list[Tensor]) -> Tensor | None:
    """[M] weight of each row's loss, so that their sum over all processes is the update's mean; None without rows."""
    mine = torch.zeros_like(rows.keep)
    if blocks:
        mine[torch.cat(blocks)] = True
    run, keep = loop.run, rows.keep & mine
    samples = torch.where(rows.sample >= 0, rows.sample + run.rank * loop.geometry.images_per_process * 1024, -1)
    samples, advantage, keep, group = (run.gather(column) for column in (samples, rows.advantage, keep, rows.group))
    if not bool(keep.any()):
        return None
    weight = aggregation_weights(samples, advantage, keep, kind=loop.config.loss_aggregation, group_M=group)
    return weight[run.rank * len(rows) : (run.rank + 1) * len(rows)].to(rows.advantage)


def whole_paths(
    loop: Loop, batch: Batch, rows: Rows, sampled: Sampled, blocks: list[Tensor], schedule: Schedule, kernel: Kernel,
    *, known_one: bool,
) -> Tensor | None:  # fmt: skip
    """[M] factor of each row's log-ratio that gives the gradient of a loss on whole trajectories; None for `step`."""
    config = loop.config
    if config.ratio == "step":
        return None
    log_ratio = torch.zeros_like(rows.old_log_prob)
    if not known_one:
        log_ratio = rescored(loop, batch, rows, sampled, blocks, schedule, kernel)[0] - rows.old_log_prob
        log_ratio = log_ratio / dims_of(sampled, config)
    mine = torch.cat(blocks) if blocks else rows.source[:0]
    mine = mine[rows.keep[mine]]
    part, factor = rows[mine], torch.zeros_like(log_ratio)
    factor[mine] = sequence_coefficients(
        log_ratio[mine], part.sample, part.advantage, part.clip_low, part.clip_high, kind=config.ratio
    )[0]
    return factor


def dims_of(sampled: Sampled, config: TrainConfig) -> int:
    """What log-ratios are divided by."""
    return sampled.states[0].numel() if config.log_ratio == "mean" else 1


def scored_rows(
    rows: Rows, index: Tensor, sampled: Sampled, new: Transition, schedule: Schedule, kernel: Kernel,
    config: TrainConfig,
) -> Scored:  # fmt: skip
    """A micro-batch as objectives take it."""
    step = int(rows.step[0])
    now, after = schedule.sigma[step], schedule.sigma[step + 1]
    produced = sampled.states[rows.produced]
    return Scored(
        log_ratio=(kernel.log_prob(produced, new) - rows.old_log_prob) / dims_of(sampled, config),
        advantage=rows.advantage, clip_low=rows.clip_low, clip_high=rows.clip_high, new=new,
        old_mean=None if sampled.mean is None else sampled.mean[index], produced=produced,
        step_size=float(now - after), sensitivity=kernel_sensitivity(kernel, now, after),
    )  # fmt: skip


def kl_of(new: Transition, reference: Transition, step_size: float, config: TrainConfig) -> Tensor:
    """KL of each row to the reference, per latent dimension with `log_ratio: mean`."""
    dims = new.mean[0].numel() if config.log_ratio == "mean" else 1
    if config.kl_type == "exact":
        return gaussian_kl(new, reference) / dims
    published_step = None if KERNELS[config.sampler.kernel].full_std else step_size
    return published_kl(new, reference, step_size=published_step) / dims


def note(stats: Statistics, rows: Rows, scored: Scored, loss: Tensor, policy_loss: Tensor) -> None:
    """Adds a micro-batch to the statistics."""
    ratio = scored.log_ratio.exp()
    above = clipped_above(scored.log_ratio, rows.advantage, clip_high=rows.clip_high)
    below = clipped_below(scored.log_ratio, rows.advantage, clip_low=rows.clip_low)
    stats.add(
        rows.keep, loss=loss, policy_loss=policy_loss, ratio_mean=ratio, clip_fraction=(above | below),
        approx_kl=0.5 * scored.log_ratio.square(),
    )  # fmt: skip
    stats.maximum("ratio_max_deviation", (ratio - 1).abs()[rows.keep])


def check_first_ratio(stats: Statistics, run: Run, config: TrainConfig, iteration: int) -> None:
    """Before the first update of an iteration the policy is the one that sampled: its ratio must be 1."""
    deviation = stats.largest("ratio_max_deviation", run)
    stats.note("ratio_first_deviation", torch.tensor(deviation))
    if deviation > min(config.clip_bounds):
        raise ValueError(
            f"iteration {iteration}: before any update the importance ratio differs from 1 by {deviation:.2g}, more "
            f"than clip_range {min(config.clip_bounds):g}: sampling and scoring do not agree (non-deterministic "
            "kernels, dropout, or a dtype too coarse); try pipeline.dtype=float32"
        )


def reward_metrics(loop: Loop, sampled: Sampled, output: RewardOutput, advantage_M: Tensor) -> dict[str, Any]:
    """Means over the images at the ends of paths, of all processes."""
    run, ends = loop.run, sampled.ends.to(output.values.device)
    row = reward_row(
        loop, output.values[ends], output.valid[ends], {name: part[ends] for name, part in output.parts.items()}
    )
    row["advantage_abs"] = float(run.gather(advantage_M.abs().to(run.device)).mean())
    return row | {"num_scored": len(output.values) * run.world}
