"""From scored images to the advantage of every transition: reward map, credit, normalisation, shaping, selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.advantages.normalise import Aggregation, aggregate, combine
from flowrl.advantages.reward_maps import MAPS, log_tame
from flowrl.advantages.shaping import RewardHistory, a_grae, dcpo, select_best, set_means, update_history
from flowrl.config.options import check_options
from flowrl.config.train import TrainConfig
from flowrl.credit import Method
from flowrl.prompts.curriculum import accuracy_scaled_kl
from flowrl.randomness import counter_choice
from flowrl.rewards import RewardOutput
from flowrl.samplers import Kernel
from flowrl.training.loop import Batch, Loop
from flowrl.training.scoring import MERGED, trained_channels
from flowrl.trajectory import Credit, Sampled, Schedule


def credit_of(
    loop: Loop, method: Method, sampled: Sampled, output: RewardOutput, kernel: Kernel, schedule: Schedule
) -> Credit:
    """Credit of every transition: a channel a reward, or one channel of the weighted sum."""
    config, (channels, channel_weights) = loop.config, trained_channels(loop, output)
    reward_KF = torch.stack(channels)
    if config.reward_map.name != "none":
        reward_KF = MAPS[config.reward_map.name](reward_KF, **config.reward_map.options)
    reward_KF = torch.where(output.valid, reward_KF, torch.nan).to(sampled.states.device)
    if config.reward_aggregation == "log_tame":  # of rewards: what credit makes of them may have any sign
        tamed, first = log_tame(loop.run.gather(reward_KF.T).T), loop.run.rank * len(sampled.finished)
        weights = torch.tensor(channel_weights)
        reward_KF = combine(tamed[:, first : first + len(sampled.finished)], weights)[None]
    options: dict[str, Any] = dict(config.credit.options)
    if method.needs_step_std:
        options["step_std"] = step_stds(kernel, schedule)
    if method.needs_dims:  # a softmax over summed log-densities would pick one child
        options["per_dim"] = sampled.states[0].numel()
    if method.needs_everyone:
        options |= {"gather": lambda rows: loop.run.gather(rows.to(loop.run.device)).to(rows.device),
                    "rank": loop.run.rank}  # fmt: skip
    return method.credit(sampled, reward_KF, **options)


def step_stds(kernel: Kernel, schedule: Schedule) -> Tensor:
    """[T] standard deviation of the kernel at every step."""
    zero = torch.zeros(1, 1)
    levels = zip(schedule.sigma[:-1], schedule.sigma[1:], strict=True)
    return torch.stack([kernel(zero, zero, now, after).std.reshape(()) for now, after in levels])


def advantages(
    loop: Loop, method: Method, batch: Batch, sampled: Sampled, credit: Credit, output: RewardOutput, ends: Ends
) -> tuple[Tensor, Tensor, float]:
    """Advantage `[M]` of each transition, which of them teach something `[M]`, and the share of sets that do not.

    A set of equal credit is masked where it stands: its rows would only dilute the loss.
    """
    config, run = loop.config, loop.run
    advantage = _normalised(loop, sampled, credit)
    if method.back_up is not None:
        advantage = method.back_up(sampled, advantage, per_dim=sampled.states[0].numel())
    if credit.offset is not None:
        advantage = advantage + credit.offset
    if credit.scale is not None:
        advantage = advantage * credit.scale
    advantage = shaped(loop, batch, sampled, advantage, output, ends)
    known = advantage.isfinite()
    advantage = torch.where(known, advantage, 0.0).clamp(-config.adv_clip_range, config.adv_clip_range).float()
    # A set may be spread over processes.
    _, place = run.gather(credit.norm.to(run.device)).unique(return_inverse=True)
    moved = torch.zeros(int(place.max()) + 1, device=run.device)
    moved = moved.scatter_reduce(0, place, run.gather(advantage.abs().to(run.device)), "amax")
    own = place[run.rank * len(sampled) : (run.rank + 1) * len(sampled)]
    keep = known if credit.keep is None else known & credit.keep
    teaches = (moved > 0)[own].to(keep.device)
    return advantage, keep & teaches & trained_steps(loop, sampled), float((moved == 0).double().mean())


def _normalised(loop: Loop, sampled: Sampled, credit: Credit) -> Tensor:
    """[M] advantages before anything else, from the credit of all processes."""
    config, run, channels = loop.config, loop.run, len(credit.raw)
    one = config.reward_aggregation in (*MERGED, "log_tame")
    now = zip(loop.reward.terms, loop.reward.weights_at(loop.iteration), strict=True)
    weights = [1.0] if one else [weight for term, weight in now if term.weight]
    how = cast(Aggregation, "sum" if one else config.reward_aggregation)
    if how == "sum" and channels > 1:
        how = "each"  # granularities of one reward: each is normalised, then they add up
    everything = aggregate(
        run.gather(credit.raw.T.to(run.device)).T.contiguous().cpu().double(),
        run.gather(credit.norm.to(run.device)).cpu(),
        torch.tensor(weights, dtype=torch.float64).repeat_interleave(channels // len(weights)), how=how,
        scope=config.adv_std, eps=config.adv_eps, correction=config.adv_correction, baseline=config.adv_baseline,
        virtual_max=config.adv_virtual_max,
    )  # fmt: skip
    first = run.rank * len(sampled)
    return everything[first : first + len(sampled)].to(sampled.log_prob.device)


def trained_steps(loop: Loop, sampled: Sampled) -> Tensor:
    """[M] transitions whose step is trained: all, the leading share of the steps, or a share drawn for each image."""
    settings = loop.config.sampler
    steps = sampled.step.unique(sorted=True)
    count = int(len(steps) * settings.trained_fraction)
    if settings.trained_fraction == 1:
        return torch.ones_like(sampled.step, dtype=torch.bool)
    if settings.trained_steps == "leading":
        return torch.isin(sampled.step, steps[:count])
    size, iteration = loop.geometry.images_per_process, loop.iteration
    keep = torch.zeros(len(sampled), dtype=torch.bool)
    for sample in sampled.sample.unique(sorted=True).tolist():
        rows = torch.nonzero(sampled.sample == sample).flatten()
        image = sample // size * loop.config.num_images + loop.run.rank * size + sample % size  # whichever process
        chosen = counter_choice(len(steps), count, loop.config.seed, "trained steps", iteration, image)
        keep[rows[list(chosen)]] = True
    return keep.to(sampled.step.device)


def end_rewards(sampled: Sampled, output: RewardOutput) -> Tensor:
    """Rewards of the images at the ends of paths, NaN where invalid."""
    return torch.where(output.valid, output.values, torch.nan)[sampled.ends.to(output.values.device)]


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """The images at the ends of paths, of all processes: reward (NaN where invalid), group and prompt number, `[E]`."""

    reward: Tensor
    group: Tensor
    prompt: Tensor

    @staticmethod
    def cat(parts: Sequence[Ends]) -> Ends:
        """Joins the rounds of an iteration."""
        return Ends(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Ends)))


def all_ends(loop: Loop, batch: Batch, sampled: Sampled, output: RewardOutput) -> Ends:
    """Gathers the ends of all processes, in rank order."""
    run, group = loop.run, sampled.finished_group[sampled.ends].cpu()
    prompt = torch.tensor(batch.prompt_ids)[batch.local(group)]
    columns = (end_rewards(sampled, output), group, prompt)
    return Ends(*(run.gather(column.to(run.device)).cpu() for column in columns))


def success_rates(ends: Ends, group: Tensor, owner: str) -> Tensor:
    """Mean reward in [0, 1] of each group, looked up for group numbers; 0 where no reward is valid.

    Raises:
        ValueError: a reward lies outside [0, 1], so that it is no success.
    """
    known = ends.reward[~ends.reward.isnan()]
    if bool(((known < 0) | (known > 1)).any()):
        raise ValueError(
            f"{owner} reads rewards as success rates, which lie in [0, 1], but there are rewards from "
            f"{float(known.min()):g} to {float(known.max()):g}: choose a reward of that range, or scale it"
        )
    found, place = ends.group.unique(return_inverse=True)
    means = set_means(ends.reward, place)
    rates = torch.zeros(len(found)).scatter(0, place, means.float())
    return rates[torch.searchsorted(found, group.cpu())]


def shaped(loop: Loop, batch: Batch, sampled: Sampled, advantage_M: Tensor, output: RewardOutput, ends: Ends) -> Tensor:
    """Advantages after the configured change of shape."""
    settings = loop.config.shaping
    if settings.name == "none":
        return advantage_M
    if settings.name == "a_grae":
        success = success_rates(ends, sampled.group, "shaping a_grae").to(advantage_M.device)
        return a_grae(advantage_M, success.to(advantage_M), float(ends.reward.nanmean()), **settings.options)
    merge = settings.options.get("merge", "pooled")
    stored = loop.memory.get("reward_history")
    history = RewardHistory.start(len(loop.train_prompts), merge) if stored is None else RewardHistory(**stored)
    history = update_history(history, ends.reward, ends.prompt)
    loop.memory["reward_history"] = {f.name: getattr(history, f.name) for f in fields(history)}
    own_reward, sample = end_rewards(sampled, output).to(advantage_M.device), sampled.sample
    prompt = torch.tensor(batch.prompt_ids)[batch.local(sampled.group)]
    return dcpo(own_reward[sample].to(advantage_M), advantage_M, prompt, history, eps=loop.config.adv_eps)


def best_samples(loop: Loop, sampled: Sampled, ends: Ends) -> Tensor:
    """[M] transitions of the images that `best_of` selects: all without it."""
    if loop.config.best_of is None:
        return torch.ones_like(sampled.step, dtype=torch.bool)
    chosen = select_best(ends.reward, ends.group, loop.config.best_of)
    own = int(sampled.ends.sum())
    return chosen[loop.run.rank * own : (loop.run.rank + 1) * own].to(sampled.step.device)[sampled.sample]


def accuracy_scale(loop: Loop, sampled: Sampled, ends: Ends) -> Tensor:
    """[M] factor of the KL coefficient: 1, or by the success rate of the row's group (FG-ExPO)."""
    ones = torch.ones_like(sampled.log_prob)
    if not loop.config.curriculum.accuracy_scaled_kl:
        return ones
    rates = success_rates(ends, sampled.group, "curriculum.accuracy_scaled_kl")
    return torch.tensor([accuracy_scaled_kl(1.0, float(rate)) for rate in rates]).to(ones)


def check_assignment(config: TrainConfig, method: Method) -> None:
    """Refuses settings between reward and advantage that cannot work together.

    Raises:
        ValueError: names the setting and what to change.
    """
    credit, shaping, maps = config.credit.method, config.shaping, config.reward_map
    if maps.name != "none":
        check_options(MAPS[maps.name], maps.options, owner=f"reward_map {maps.name!r}")
    elif maps.options:
        raise ValueError("reward_map.options are set, but reward_map.name is none: name a map or remove them")
    if shaping.name == "a_grae":
        check_options(a_grae, shaping.options, owner="shaping 'a_grae'")
    elif shaping.name == "dcpo":
        if set(shaping.options) - {"merge"} or shaping.options.get("merge", "pooled") not in ("pooled", "release"):
            raise ValueError(f"shaping 'dcpo' has one option, merge (pooled or release), got {shaping.options}")
        if credit != "outcome" or config.curriculum.max_rounds > 1:
            raise ValueError(
                f"shaping dcpo compares a prompt's finished images over visits: it goes with credit.method=outcome "
                f"(got {credit}) and curriculum.max_rounds=1"
            )
    elif shaping.options:
        raise ValueError("shaping.options are set, but shaping.name is none: name one or remove them")
    if config.reward_aggregation in ("each", "gdpo") and method.merged:
        raise ValueError(
            f"credit method {credit} takes one reward, the weighted sum, so reward_aggregation="
            f"{config.reward_aggregation} has nothing to aggregate: set it to sum or log_tame"
        )
    if config.reward_aggregation != "sum" and len([r for r in config.rewards if r.weight]) < 2:
        raise ValueError(
            f"reward_aggregation={config.reward_aggregation} needs two rewards of nonzero weight, there is one: add "
            "another, or set it to sum"
        )
    if config.best_of is not None and config.curriculum.max_rounds > 1:
        raise ValueError("best_of and curriculum.max_rounds above 1 both leave images out: use one of them")
    if config.adv_virtual_max is not None and config.adv_std == "global":
        raise ValueError(
            "adv_virtual_max is one more member of every group, and adv_std=global divides by the std of all images: "
            "set adv_std to group or none"
        )
    if config.curriculum.accuracy_scaled_kl and not config.kl_coef:
        raise ValueError("curriculum.accuracy_scaled_kl scales kl_coef, which is 0: raise it, or leave the scaling out")
    if config.adv_virtual_max is not None and (method.plan != "trajectories" or method.values):
        raise ValueError(
            f"adv_virtual_max is the highest reward of a finished image, but credit method {credit} compares changes "
            "of reward or averages: use credit.method=outcome"
        )
