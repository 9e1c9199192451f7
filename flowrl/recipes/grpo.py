"""Policy gradient on sampled paths: `flowrl train tiny_grpo_geneval [key=value ...]`

An iteration samples paths of G images for each of P prompts with a stochastic kernel, scores images, assigns credit to
every stochastic step, turns it into group-relative advantages, and updates the LoRA with a clipped surrogate
(Flow-GRPO, arXiv 2505.05470). Methods differ in one function each: which steps are stochastic (`sampler`), which images
are scored and what each step gets of their rewards (`credit`), how rewards become advantages (`adv_*`,
`reward_aggregation`, `shaping`), and the loss of a scored transition (`objective`).

Letters: P prompts, G images per prompt, B = P * G, b rows of a micro-batch, M transitions, F finished latents.

Deviations from the published code: the KL is exact (`kl_type: no_dt` is the published one); the last step is an ODE
step (there too it is never trained); groups of equal rewards are masked in place rather than re-packed; the loss is
divided by the number of live rows of the whole update (`loss_denominator: all` for methods that count dead ones too),
on all processes; gradients are summed in float64 over micro-batches and processes, whose number changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.advantages.routing import means_of_parts, regions_of, with_parts
from flowrl.advantages.shaping import aggregation_weights
from flowrl.config.options import build_options, entry_of
from flowrl.config.readers import refuse_unread
from flowrl.config.train import TrainConfig
from flowrl.credit import CREDIT
from flowrl.objectives.policy_gradient import OBJECTIVES, Scored
from flowrl.objectives.terms import approx_kl
from flowrl.recipes.counting import only_here, trained_scale
from flowrl.recipes.fake_score import check_dmd, learn, match, matched_images
from flowrl.recipes.grpo_counts import counts, keeps_pieces, needs_means
from flowrl.rewards import RewardOutput
from flowrl.rewards.base.outputs import join_outputs
from flowrl.runs.vital_signs import DISAGREE, FAULT
from flowrl.runtime.placement import sent, taken
from flowrl.samplers import Transition, Velocity
from flowrl.samplers.guidance import uncounted
from flowrl.training.assignment import (
    Ends,
    accuracy_scale,
    advantages,
    all_compared,
    all_ends,
    best_samples,
    calibrate,
    check_assignment,
    choose_prompts,
    clip_ranges,
    credit_of,
    curriculum_of,
    enough,
    part_row,
    remember,
)
from flowrl.training.draws import AskedPrompts
from flowrl.training.kept_graphs import KeptGradients, KeptGraphs, kl_of
from flowrl.training.learner import GradientSum, Statistics
from flowrl.training.loop import Loop
from flowrl.training.parts import Ready, check_density
from flowrl.training.paths import Paths, check_engine, check_plan, readers_of, sample_paths, sampler_at, shared_sources
from flowrl.training.record import Recording
from flowrl.training.run import Run
from flowrl.trajectory import Credit, Rows, Sampled

__all__ = ["REGRESSES", "THROUGH_REWARDS", "check", "counts", "main", "objective_of", "only_here", "trained_scale"]

REGRESSES, THROUGH_REWARDS = False, False

_MEANS = ("policy_loss", "ratio_mean", "approx_kl", "kl", "stale_weight", "dmd_loss", "fake_error")


def main(ready: Ready, run: Run) -> bool:
    """Trains to the end or to an interrupt; returns whether it finished. Writes only into the run folder."""
    loop = Loop(ready, run)
    graphs = kept_of(loop)
    for iteration in loop:
        iterate(loop, iteration, graphs)
    return loop.finished


def iterate(loop: Loop, iteration: int, graphs: KeptGraphs | KeptGradients | None) -> None:
    """One iteration; frees its memory before the next one samples."""
    run, config, method, (objective, loss_of) = loop.run, loop.config, loop.ready.method, loop.ready.objective
    kernel, schedule, steps = sampler_at(loop, iteration)
    if not steps:  # the last window of a round, with sampler.published_window
        loop.log(iteration, {"live_rows": 0})
        return

    # 1. Rollout: sample paths with the current policy, score the images they lead to.
    trains = loop.trains_policy(iteration) and iteration >= config.sampler.calibration.iterations
    means, kept = needs_means(config), graphs if trains else None
    how = Paths(kernel=kernel, schedule=schedule, steps=steps, keep_means=means, graphs=kept)
    record, output, ends = sample_rounds(loop, how)
    loop.stop_on_dead_reward(ends.reward, all_compared(loop, record.sampled, output, ends))
    if not loop.trains_policy(iteration):  # only a jointly trained reward learns
        loop.log(iteration, reward_metrics(loop, record.sampled, output) | {"live_rows": 0})
        return

    if iteration < config.sampler.calibration.iterations:  # DenseGRPO: only calibrates noise levels
        row = reward_metrics(loop, record.sampled, output) | calibrate(loop, record.sampled, output)
        loop.log(iteration, row | {"live_rows": 0})
        return

    # 2. Credit and group-relative advantages, over the images of all processes.
    sampled = record.sampled
    credit = credit_of(loop, sampled, output, kernel, schedule)
    advantage_PM, may_M, signal_M, dead = advantages(loop, method, record.asked, sampled, credit, output, ends)
    may_M, clip_range_M = may_M & best_samples(loop, sampled, ends), clip_ranges(loop, sampled, kernel, schedule)
    rows = rows_of(sampled, credit, advantage_PM, may_M & signal_M, clip_range_M)
    counted_M = rows.keep if config.loss_denominator == "live" else may_M.to(rows.keep.device)

    # 3. Update: score the stored transitions again under the policy that changes.
    with loop.clock("update"):
        stats = Statistics(*with_parts(loop.routes, [*_MEANS, *filter(None, [objective.cut])]))
        update(record, rows, counted_M, loss_of, objective.cut, accuracy_scale(loop, sampled, ends), stats)

    # 4. What a method remembers, and the log.
    remember(loop, ends)
    row = reward_metrics(loop, sampled, output, advantage_PM) | part_row(loop, advantage_PM) | stats.row(run)
    loop.log(iteration, row | {"zero_std_ratio": dead, "live_rows": stats.rows(run)})


def objective_of(config: TrainConfig) -> tuple[Any, Any]:
    """The entry of `OBJECTIVES` to train with, and its loss with the configured options. Raises ValueError: an
    unknown objective or option, or a bad value."""
    name = config.objective.name or "clip"
    objective = entry_of(OBJECTIVES, name, "objective of recipe grpo", owner="objective.name")
    return objective, build_options(objective.options, config.objective.options, owner=f"objective {name!r}")


def check(config: TrainConfig) -> None:
    """Refuses settings of this recipe that cannot work, before a model loads. Raises ValueError: an unknown method or
    option, or a combination without meaning, with what to change."""
    objective, name = objective_of(config)[0], config.objective.name or "clip"
    method = entry_of(CREDIT, config.credit.method, "credit method", owner="credit.method")
    check_density(config.sampler, "recipe grpo")
    refuse_unread(config, ("paths", "rollout", *readers_of(config)), f"credit method {config.credit.method}")
    check_plan(config, method)
    check_dmd(config)
    check_assignment(config, method)
    curriculum_of(config.curriculum.sampling, config.curriculum.options)
    if config.ratio != "step" and not method.of_outcomes:
        raise ValueError(
            f"ratio={config.ratio} takes one ratio and one advantage per trajectory, but credit method "
            f"{config.credit.method} gives every step its own: use ratio=step, or credit.method=outcome"
        )
    if config.ratio != "step" and not objective.of_whole_paths:
        raise ValueError(f"ratio={config.ratio} is defined for the clipped surrogate, not for objective {name}")
    check_engine(config, method, means=objective.needs_old_mean)
    if config.ratio != "step" and config.workers.weight_cap:
        raise ValueError(
            f"ratio={config.ratio} takes one ratio per trajectory, and a weight of stale rollouts (workers.staleness, "
            "workers.importance_cap) is of one transition: set ratio=step, or workers.importance_cap=0"
        )
    if config.ratio != "step" and config.loss_aggregation != "samples":
        raise ValueError(f"ratio={config.ratio} averages over trajectories: set loss_aggregation=samples")
    sources = shared_sources(config, method)
    if sources % config.updates_per_rollout:
        raise ValueError(
            f"credit method {config.credit.method} draws its transitions from {sources} latents per step and process, "
            f"which updates_per_rollout ({config.updates_per_rollout}) must divide: lower it, or raise prompts_per_step"
        )
    if method.plan == "tree" and config.loss_aggregation != "rows":
        raise ValueError(
            f"loss_aggregation={config.loss_aggregation} needs a sample for each transition, and a tree shares them "
            "between samples: use loss_aggregation=rows"
        )
    if objective.needs_mean_log_ratio and config.log_ratio != "mean":
        raise ValueError(f"objective {name} is defined for log-ratios per latent dimension: set log_ratio=mean")


# ---- rollout ---------------------------------------------------------------------------------------------------------


def kept_of(loop: Loop) -> KeptGraphs | KeptGradients | None:
    """What keeps the rollout's own evaluations."""
    config = loop.config
    if config.keep_graphs != "gradients":
        return KeptGraphs(loop.network) if config.keep_graphs else None
    from flowrl.pipelines.arithmetic.sample_gradients import SampleGradients  # imports PEFT

    def reference(velocity: Velocity, *given: Tensor) -> Tensor:
        with loop.policy.under(loop.reference_slot), loop.network.counting("reference"):
            return velocity(*given)

    def agreed(flags: list[bool]) -> list[bool]:
        return [any(found) for found in zip(*loop.run.of_all(flags), strict=True)]

    apart = SampleGradients(loop.pipeline.denoiser, loop.policy.trained, agreed)
    return KeptGradients(config, loop.network, apart, loop.ready.objective[1], reference)


def sample_rounds(loop: Loop, how: Paths) -> tuple[Recording, RewardOutput, Ends]:
    """Samples and scores an iteration's images, in more rounds if a method needs groups that disagree."""
    rounds: list[tuple[AskedPrompts, Sampled, RewardOutput, Ends]] = []
    iteration, method = loop.iteration, loop.ready.method
    while not rounds or (len(rounds) < loop.config.curriculum.max_rounds and not enough(loop, [r[3] for r in rounds])):
        batch = loop.batch(iteration, round=len(rounds), prompt_ids=choose_prompts(loop, iteration, len(rounds)))
        with loop.scorer.start(batch) as scoring:
            with loop.clock("rollout"), torch.no_grad():
                sampled = sample_paths(loop, batch, method, how, scoring)
            sampled = sampled.on_host()
            with loop.clock("reward"):
                output = scoring.result()
        rounds.append((batch.asked, sampled, output, all_ends(loop, batch, sampled, output)))
    asked, table, outputs, ends = zip(*rounds, strict=True)
    record = Recording(loop, AskedPrompts.cat(asked), Sampled.cat(table), how.kernel, how.schedule, how.graphs)
    return record, join_outputs(list(outputs)), Ends.cat(ends)


# ---- update ----------------------------------------------------------------------------------------------------------


def update(
    record: Recording, rows: Rows, counted_M: Tensor, loss_of: Any, cut_name: str, kl_scale_M: Tensor, stats: Statistics
) -> None:
    """All optimizer updates of an iteration: on the kept rows, in means over the counted ones. Notes the share of rows
    whose gradient the objective cuts as `cut_name`."""
    loop, config = record.loop, record.loop.config
    micro = loop.geometry.micro_batch_size
    subset = config.sampler.trained_fraction < 1 and config.sampler.trained_steps == "random"
    blocks = micro_batches(rows, micro, config.updates_per_rollout, wanted_M=counted_M if subset else None)
    pieces = keeps_pieces(config, loop.geometry)
    first_update = True
    for number, own_blocks in enumerate(blocks):
        weight_M, images = loss_weights(loop, rows, counted_M, own_blocks), matched_images(record, number)
        if weight_M is None and not len(images):
            continue
        scales_M = torch.zeros_like(kl_scale_M) if weight_M is None else weight_M, kl_scale_M
        learn(record, images, stats)
        gradient = loop.gradient()
        whole = record.whole_paths(rows, own_blocks, known_one=first_update)
        # Of graphs that the rollout kept the processes of a copy have equally many, and walk all of them back together.
        all_walked = record.graphs is not None and loop.shards is not None
        kept = [index for index in own_blocks if all_walked or bool(rows.keep[index].any())]
        how = partial(descend, record, rows, kept, whole, loss_of, cut_name, scales_M, images, anchored=first_update)
        how(gradient, stats)
        if first_update:
            deviation = first_deviation(loop, stats)
            if len(blocks) > number + 1 and (not pieces or deviation > 0):
                rows = record.with_old_of_updates(rows, blocks[number + 1 :])
            first_update = False
        # Graphs that the rollout kept have been walked back.
        again = partial(descend, replace(record, graphs=None), *how.args[1:], **how.keywords)
        loop.update(gradient, stats, again=again)
    if record.graphs is not None:
        record.graphs.clear()


def descend(
    record: Recording,
    rows: Rows,
    blocks: list[Tensor],
    whole: tuple[Tensor, ...] | None,
    loss_of: Any,
    cut_name: str,
    scales_M: tuple[Tensor, Tensor],
    images: Tensor,
    gradient: GradientSum,
    stats: Statistics,
    *,
    anchored: bool,
) -> None:
    """Adds up the gradient of an update, micro-batch by micro-batch.

    Args:
        blocks: its rows of each micro-batch.
        whole: `Recording.whole_paths` of them.
        scales_M: weights of the losses, and of the KL within them.
        images: those whose distribution is matched.
        anchored: the policy has not moved since the rollout, so the ratio is 1 by construction. The distance between
        stored log-densities and those of the update is only logged.
    """
    loop, config, kl_coef = record.loop, record.loop.config, record.loop.config.kl_coef
    if len(images):
        match(record, images, gradient, stats)
    for index, live in record.in_step(rows, blocks):
        part = rows[index]
        keep = part.keep & live
        with uncounted(not bool(keep.any())):
            reference = record.reference(part) if kl_coef > 0 else None
            with loop.network.counting("update"):
                new = record.transition(part)
        scored = record.scored_rows(part, index, new)
        stale = record.stale_weight(part, index, scored, anchored=anchored)
        if anchored and config.workers.engine is None:
            deviation = scored.log_ratio.detach().abs() * (record.dims / new.mean[0].numel())
            stats.largest(keep, ratio_first_deviation=deviation)
        if anchored:
            scored = scored.anchored()
        device = new.mean.device
        noted = losses_of(record, part, scored, reference, loss_of, cut_name)
        policy_loss = descended = noted["policy_loss"]
        if whole is not None:  # what is descended has the gradient of the loss, not its value
            policy_loss, factor = (sent(column[index], device) for column in (whole[1], whole[0]))
            descended = factor * scored.log_ratio
            noted |= {"policy_loss": policy_loss, cut_name: whole[2][index]}
        if stale is not None:
            noted |= {name: stale * value for name, value in noted.items() if name.endswith("policy_loss")}
            policy_loss = descended = noted["policy_loss"]
            stats.mean(keep, stale_weight=stale)
        weight_b, kl_scale_b = (sent(column[index], device) for column in scales_M)
        penalty = torch.zeros_like(descended)
        if reference is not None:
            penalty = kl_coef * kl_scale_b * noted["kl"]
        ratio, loss = scored.log_ratio.exp(), policy_loss + penalty
        stats.mean(keep, **noted, loss=loss, ratio_mean=ratio, approx_kl=approx_kl(scored.log_ratio))
        stats.largest(keep, ratio_max_deviation=(ratio - 1).abs())
        if isinstance(record.graphs, KeptGradients):
            record.graphs.weigh(part, keep, part.weight * scales_M[0][index], kl_coef * scales_M[1][index])
            continue
        loss_b = (descended + penalty) * sent(part.weight, device) * weight_b
        gradient.add(taken(loss_b, torch.nonzero(keep).flatten()).sum())
    if isinstance(record.graphs, KeptGradients):
        record.graphs.add_to(gradient)


def losses_of(
    record: Recording, rows: Rows, scored: Scored, reference: Transition | None, loss_of: Any, cut_name: str
) -> dict[str, Tensor]:
    """Losses [b] of a micro-batch, the mean over parts of a state that have their own, with the KL and what is cut."""
    found = list[dict[str, Tensor]]()
    for region, one in zip(regions_of(record.loop.routes), record.by_part(rows, scored), strict=True):
        noted = {"policy_loss": loss_of(one)}
        if reference is not None:
            others = one.new, reference.part(region)
            noted["kl"] = kl_of(record.loop.config, record.kernel, *others, *record.levels(rows))
        if cut_name:
            noted[cut_name] = loss_of.cut(one).to(one.log_ratio.dtype)
        found.append(noted)
    return means_of_parts(record.loop.routes, found)


def rows_of(
    sampled: Sampled,
    credit: Credit,
    advantage_PM: Tensor,
    keep_M: Tensor,
    clip_range_M: tuple[Tensor | float, Tensor | float],
) -> Rows:
    """The training table."""
    ones = torch.ones_like(sampled.log_prob)
    return Rows(
        source=sampled.source,
        produced=sampled.produced,
        step=sampled.step,
        sample=sampled.sample,
        group=sampled.group,
        old_log_prob=sampled.log_prob,
        advantage=advantage_PM.to(ones.dtype).mean(0),
        of_parts=advantage_PM.to(ones.dtype).T if len(advantage_PM) > 1 else None,
        weight=ones if credit.weight is None else credit.weight.to(ones.dtype),
        clip_low=ones * clip_range_M[0],
        clip_high=ones * clip_range_M[1],
        keep=keep_M,
    )


def micro_batches(rows: Rows, size: int, parts: int, *, wanted_M: Tensor | None = None) -> list[list[Tensor]]:
    """Row indexes of micro-batches for each of `parts` updates, steps ascending; of the wanted rows, or of all.

    A micro-batch holds the transitions of one step that start at `size` neighbouring latents of the pool, or at fewer
    if a step does not have enough of them for every update. Order and composition are those of the rollout, so that
    equal sizes replay equal batches.
    """
    updates: list[list[Tensor]] = [[] for _ in range(parts)]
    wanted = torch.ones_like(rows.keep) if wanted_M is None else wanted_M
    for step in rows.step.unique(sorted=True):
        index = torch.nonzero((rows.step == step) & wanted).flatten()
        sources, place = rows.source[index].unique(sorted=True, return_inverse=True)
        own = max(1, min(size, -(-len(sources) // parts)))
        for number in range(-(-len(sources) // own)):
            updates[number % parts].append(index[place // own == number])
    return updates


def loss_weights(loop: Loop, rows: Rows, counted_M: Tensor, blocks: list[Tensor]) -> Tensor | None:
    """[M] weight of each row's loss, so that their sum over all processes is the update's mean over counted rows; None
    if no row is kept."""
    mine = torch.zeros_like(rows.keep)
    if blocks:
        mine[torch.cat(blocks)] = True
    run = loop.run
    if not bool(run.gather(rows.keep & mine).any()):
        return None
    # Each process counts its samples from 0, and has no more of them than rows.
    samples = torch.where(rows.sample >= 0, rows.sample + run.rank * len(rows), -1)
    columns = (samples, rows.advantage, counted_M & mine, rows.group)
    samples, advantage, counted, group = (run.gather(column) for column in columns)
    weight = aggregation_weights(samples, advantage, counted, kind=loop.config.loss_aggregation, group_M=group)
    return weight[run.rank * len(rows) : (run.rank + 1) * len(rows)].to(rows.advantage)


def first_deviation(loop: Loop, stats: Statistics) -> float:
    """Largest distance, in nats per latent dimension, between the log-densities that the rollout stored and those that
    the update computes with the same weights, or with later ones if the rollout is stale. Other batches, kernels and
    graphs may round differently: without that it is 0. It is infinite if an engine drew, whose densities are unknown.
    Raises ValueError: it is more than rounding can be."""
    if loop.config.workers.engine is not None:
        return math.inf
    # A process without a trained row has neither.
    deviation = stats.largest_of_all("ratio_first_deviation", loop.run, "ratio_max_deviation")
    if deviation > FAULT and not loop.config.workers.staleness:
        raise ValueError(
            f"iteration {loop.iteration}: before any update, rollout and update give log-densities that differ by "
            f"{deviation:.2g} nats per latent dimension, and rounding gives less than {FAULT:g}: they do not compute "
            f"the same policy; {DISAGREE}"
        )
    return deviation


def reward_metrics(
    loop: Loop, sampled: Sampled, output: RewardOutput, advantage_PM: Tensor | None = None
) -> dict[str, Any]:
    """Means over the images at the ends of paths, of all processes."""
    run, ends = loop.run, sampled.ends.to(output.values.device)
    at_ends = {name: part[ends] for name, part in output.parts.items()}
    reached = RewardOutput(values=output.values[ends], valid=output.valid[ends], parts=at_ends)
    row = loop.scorer.row(reached, sampled.finished_group[sampled.ends])
    advantage_PM = torch.zeros(1, len(sampled)) if advantage_PM is None else advantage_PM
    row["advantage_abs"] = float(run.gather(advantage_PM.abs().T).mean())
    return row | {"num_scored": len(output.values) * run.world}
