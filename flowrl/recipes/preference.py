"""Preference optimisation on pairs of images: `flowrl train tiny_dpo [key=value ...]`

| objective | pairs | compared |
|---|---|---|
| dpo | best and worst of each group sampled by the ODE | errors of the velocity at noised images (Diffusion-DPO) |
| dpo_offline | read from files, nothing is sampled in training | the same |
| d3po | best and worst of each group sampled with noise from one start | log-densities of their steps (D3PO) |

The policy is compared with a frozen copy, the slot "old": the start of the run, copied again from the policy every
`ref_update_every` iterations (online DPO; with `behaviour: old` it samples too). Guidance is `sampler.guidance_scale`
for sampling, policy and reference alike; 1 is conditional training. Groups whose rewards are all equal have no pair.

Letters: P prompts, G images per prompt, n images of this process, p pairs, r rows (pair, draw) of a micro-batch.

Deviations from the published code: the loss is the mean over all pairs and draws of an update, on all processes, where
D3PO takes an optimizer step every few denoising steps; Flow-GRPO's DPO keeps pairs without a difference, and draws the
levels of a pair independently, where most kinds of `times` stratify them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.config.train import resolve_path
from flowrl.objectives.forward_losses import noised
from flowrl.objectives.preference_losses import PairLoss, d3po, diffusion_dpo, pairs_of_groups
from flowrl.prompts.loading import Prompt, prompts_of_iteration
from flowrl.prompts.pairs import Pair, load_images, read_pairs
from flowrl.recipes.counting import trained_scale
from flowrl.recipes.preference_settings import Offline, Steps, check, counts, objective_of, only_here
from flowrl.runtime.placement import sent, taken
from flowrl.runtime.randomness import sample_normals
from flowrl.samplers import Kernel
from flowrl.samplers.guidance import uncounted
from flowrl.samplers.times import training_times
from flowrl.training.learner import GradientSum, Statistics, total_of
from flowrl.training.loop import Loop
from flowrl.training.parts import Ready, sampler_of
from flowrl.training.paths import Paths, sample, sampler_at
from flowrl.training.processes.mesh import in_step
from flowrl.training.prompting import encode_prompts
from flowrl.training.run import Run
from flowrl.trajectory import Conditioning, Schedule, Trajectory

__all__ = ["REGRESSES", "THROUGH_REWARDS", "check", "counts", "main", "objective_of", "only_here", "trained_scale"]

REGRESSES, THROUGH_REWARDS = True, False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pairs:
    """This process's pairs of an iteration."""

    pool: Tensor
    """[n, ...] finished latents, or the states of trajectories."""
    winner: Tensor
    loser: Tensor
    """[p] rows of the pool."""
    group: Tensor
    """[p] prompt group, numbered over all processes."""
    cond: Conditioning
    """[p] prompts."""


def main(ready: Ready, run: Run) -> bool:
    """Trains to the end or to an interrupt; returns whether it finished. Writes only into the run folder."""
    config, options = ready.config, ready.objective
    records = read_pairs(resolve_path(options.pairs)) if isinstance(options, Offline) else []
    more = tuple(prompt_of(pair, config.prompts.negative) for pair in records)
    loop = Loop(replace(ready, prompts=replace(ready.prompts, more=more)), run, slots=("old",))
    for iteration in loop:
        iterate(loop, records, iteration)
    return loop.finished


def iterate(loop: Loop, records: list[Pair], iteration: int) -> None:
    """One iteration; frees its memory before the next one samples."""
    run, config, options = loop.run, loop.config, loop.ready.objective
    row: dict[str, Any] = {}
    kernel, schedule = sampler_of(config.sampler, loop.pipeline, kernel=loop.ready.kernel)
    steps: tuple[int, ...] = ()

    # 1. Pairs: from files; or sample groups, score them, and take the best and the worst of each.
    if isinstance(options, Offline):
        with loop.clock("pairs"):
            pairs = idle = pairs_of_files(loop, records, iteration)
    else:
        batch = loop.batch(iteration)
        if isinstance(options, Steps):
            kernel, schedule, steps = sampler_at(loop, iteration)
        with loop.clock("rollout"), torch.no_grad(), loop.policy.under(options.behaviour):
            trajectory = sample(loop, batch, Paths(kernel=kernel, schedule=schedule, steps=steps), None)
        with loop.clock("reward"), torch.no_grad(), loop.scorer.start(batch) as scoring:
            scoring.add(sent(trajectory.final, loop.device), batch.group, batch.own)
            output = scoring.result()
        loop.rewards_of_all(output, compared=True)
        # Best and worst image of every group with a difference; those without a valid reward are no candidates.
        winner, loser = pairs_of_groups(output.values.cpu(), batch.group, valid=output.valid.cpu())
        group, pool = batch.group[winner], trajectory.states if steps else trajectory.final
        pairs = Pairs(pool=pool, winner=winner, loser=loser, group=group, cond=batch.asked.cond_of(group))
        group = batch.group[:1]
        one: dict[str, Any] = {"winner": torch.arange(1), "loser": torch.arange(1)}
        idle = replace(pairs, **one, group=group, cond=batch.asked.cond_of(group))
        row, count = loop.scorer.row(output, batch.group), total_of(run, len(pairs.winner))
        row |= {"pairs": count, "zero_std_ratio": 1 - count / config.prompts_per_step}
        if not loop.trains_policy(iteration):  # only a jointly trained reward learns
            loop.log(iteration, row)
            return

    # 2. The loss of rows (pair, draw): a draw is a noise level, or a stochastic step.
    if isinstance(options, Steps):
        draws = len(steps)
        loss_of = partial(step_loss, loop, trajectory, kernel, schedule, options)
    else:
        draws = config.times.count
        loss_of = partial(noised_loss, loop, schedule, iteration, options.beta)

    # 3. Update.
    with loop.clock("update"):
        stats = Statistics("margin", "implicit_accuracy", "winner_reward", "loser_reward")
        for part in range(config.updates_per_rollout):
            pair_r, draw_r = rows_of(loop, pairs, draws, part)
            live = total_of(run, len(pair_r))
            if live == 0:
                continue
            gradient = loop.gradient()
            how = partial(descend, loop, loss_of, (pairs, idle), pair_r, draw_r, live)
            how(gradient, stats)
            loop.update(gradient, stats, again=how)

    # 4. The reference may follow; log.
    every = None if isinstance(options, Offline) else options.ref_update_every
    if every is not None and (iteration + 1) % every == 0:
        loop.policy.blend("old", 0.0)
    loop.log(iteration, row | stats.row(run) | {"live_rows": stats.rows(run)})


LossOf = Callable[[Pairs, Tensor, Tensor], PairLoss]
"""From pairs, and a pair and a draw of each row, to the loss of the rows."""


def descend(
    loop: Loop,
    loss_of: LossOf,
    pairs: tuple[Pairs, Pairs],
    pair_r: Tensor,
    draw_r: Tensor,
    live: int,
    gradient: GradientSum,
    stats: Statistics,
) -> None:
    """Adds up the gradient of an update's rows, `live` on all processes; the second of `pairs` is for idle turns."""
    size = max(1, loop.geometry.micro_batch_size // 2)
    blocks = [block for block in torch.arange(len(pair_r)).split(size) if len(block)]
    for block, own in in_step(loop.shards, blocks, idle=lambda _: torch.arange(0)):
        if own:
            loss_p, metrics = loss_of(pairs[0], pair_r[block], draw_r[block])
            metrics["implicit_accuracy"] = metrics.pop("accuracy")
            stats.mean(None, loss=loss_p, **metrics)
            gradient.add(loss_p.sum() / live)
        else:
            with uncounted():
                gradient.add(loss_of(pairs[1], torch.arange(1), torch.zeros(1, dtype=torch.long))[0][:0].sum())


# ---- pairs -----------------------------------------------------------------------------------------------------------


def pairs_of_files(loop: Loop, records: list[Pair], iteration: int) -> Pairs:
    """This process's pairs of an iteration, encoded: shuffled passes over the file, as for prompts."""
    count = loop.config.prompts_per_step // loop.run.world
    chosen = prompts_of_iteration(len(records), loop.config.prompts_per_step, loop.config.seed, iteration)
    group = torch.arange(loop.run.rank * count, (loop.run.rank + 1) * count)
    own, negative = [records[chosen[int(number)]] for number in group], loop.config.prompts.negative
    images = load_images([pair.winner for pair in own] + [pair.loser for pair in own])
    return Pairs(
        pool=loop.pipeline.encode_images(images),
        winner=torch.arange(count),
        loser=torch.arange(count) + count,
        group=group,
        cond=encode_prompts(loop.pipeline, [prompt_of(pair, negative) for pair in own]),
    )


def prompt_of(pair: Pair, negative: str) -> Prompt:
    """The prompt of both images of a pair."""
    return Prompt(text=pair.prompt, metadata={}, negative=negative)


# ---- update ----------------------------------------------------------------------------------------------------------


def rows_of(loop: Loop, pairs: Pairs, draws: int, part: int) -> tuple[Tensor, Tensor]:
    """Pair `[r]` and draw `[r]` of every row of one of the updates; each update has its own groups."""
    updates, groups = loop.config.updates_per_rollout, loop.config.prompts_per_step // loop.run.world
    own = torch.nonzero((pairs.group - loop.run.rank * groups) * updates // groups == part).flatten()
    return own.repeat(draws), torch.arange(draws).repeat_interleave(len(own))


def noised_loss(
    loop: Loop, schedule: Schedule, iteration: int, beta: float, pairs: Pairs, pair: Tensor, draw: Tensor
) -> PairLoss:
    """Diffusion-DPO on rows: both images of a pair get the same noise at the same level."""
    config, times = loop.config, loop.config.times
    keys = [(config.seed, "pair", iteration, int(pairs.group[i])) for i in pair]
    drawn = training_times(times.kind, schedule, keys, count=times.count, fraction=times.fraction, shift=times.shift)
    place, twice = torch.arange(len(pair)), torch.arange(len(pair)).repeat(2)
    sigma, timestep = drawn.sigma[place, draw][twice], drawn.timestep[place, draw][twice]
    numbers = [(*key, int(number)) for key, number in zip(keys, draw, strict=True)]
    clean = taken(pairs.pool, torch.cat([pairs.winner[pair], pairs.loser[pair]]), loop.device)
    noise = sent(sample_normals(loop.pipeline.latent_shape, numbers)[twice], clean.device)
    x, velocity = noised(clean, noise, sigma), loop.velocity(pairs.cond[pair[twice]])
    with torch.no_grad(), loop.policy.under("old"), loop.network.counting("reference"):
        reference = velocity(x, sigma, timestep)
    with loop.network.counting("update"):
        predicted = velocity(x, sigma, timestep)
    winner, loser = (sent(rows, clean.device) for rows in (place, place + len(pair)))
    return diffusion_dpo(predicted, reference, noise - clean, winner, loser, beta=beta)


def step_loss(
    loop: Loop,
    trajectory: Trajectory,
    kernel: Kernel,
    schedule: Schedule,
    options: Steps,
    pairs: Pairs,
    pair: Tensor,
    draw: Tensor,
) -> PairLoss:
    """D3PO on rows: the stored transitions of both images at one step, under policy and reference."""
    place, twice = torch.arange(len(pair)), torch.arange(len(pair)).repeat(2)
    step = torch.tensor(trajectory.steps)[draw][twice]
    slot = torch.tensor([trajectory.kept.index(number) for number in trajectory.steps])[draw][twice]
    both, device = torch.cat([pairs.winner[pair], pairs.loser[pair]]), loop.device
    # Kept states ascend and hold step and step + 1.
    x, produced = (sent(pairs.pool[both, after], device) for after in (slot, slot + 1))
    now, after, velocity = schedule.sigma[step], schedule.sigma[step + 1], loop.velocity(pairs.cond[pair[twice]])

    def log_prob() -> Tensor:
        return kernel.log_prob(produced, kernel(x, velocity(x, now, schedule.timestep[step]), now, after))

    with torch.no_grad(), loop.policy.under("old"), loop.network.counting("reference"):
        reference = log_prob()
    with loop.network.counting("update"):
        log_ratio = log_prob() - reference
    dims = x[0].numel() if loop.config.log_ratio == "mean" else 1
    winner, loser = (sent(rows, device) for rows in (place, place + len(pair)))
    return d3po(log_ratio / dims, winner, loser, beta=options.beta, clip=options.clip)
