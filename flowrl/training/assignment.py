"""From scored images to the advantage of every transition: reward map, credit, normalisation, shaping, selection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.advantages.normalise import Aggregation, aggregate, combine
from flowrl.advantages.reward_maps import MAPS, log_tame
from flowrl.advantages.routing import by_part
from flowrl.advantages.shaping import (
    SHAPINGS,
    AGrae,
    Dcpo,
    Real,
    RewardHistory,
    dcpo,
    dcpo_clip,
    select_best,
    set_means,
    update_history,
)
from flowrl.config.methods import RewardMapConfig, ShapingConfig
from flowrl.config.options import build_options
from flowrl.config.readers import keys_of
from flowrl.config.train import TrainConfig
from flowrl.credit import CREDIT, Method
from flowrl.credit.dense import calibrate_noise
from flowrl.credit.values import Context, gains_of, steps_of
from flowrl.prompts.curriculum import CURRICULA, Gaussian, Replay, Shuffled, accuracy_scaled_kl, informative_groups
from flowrl.rewards import RewardOutput
from flowrl.runtime.randomness import counter_choice
from flowrl.samplers import Kernel
from flowrl.training.draws import AskedPrompts, Batch
from flowrl.training.loop import Loop
from flowrl.training.reward_watch import Compared
from flowrl.training.scoring import MERGED, trained_channels
from flowrl.trajectory import Credit, Sampled, Schedule


def credit_of(loop: Loop, sampled: Sampled, output: RewardOutput, kernel: Kernel, schedule: Schedule) -> Credit:
    """Credit of every transition: a channel per reward, or one channel of the weighted sum."""
    config, run = loop.config, loop.run
    reward_KF, weights = reward_channels(loop, output)
    if (mapped := reward_map(config)) is not None:
        reward_KF = mapped(reward_KF)
    reward_KF = torch.where(output.valid, reward_KF, torch.nan).cpu()
    if config.reward_aggregation == "log_tame":  # of rewards: credit may have any sign
        tamed, first = log_tame(run.gather(reward_KF.T).T), run.rank * len(sampled.finished)
        reward_KF = combine(tamed[:, first : first + len(sampled.finished)], weights.float())[None]
    std, size, now = step_stds(kernel, schedule), sampled.states[0].numel(), loop.iteration
    context = Context(step_std=std, per_dim=size, rank=run.rank, gather=run.gather, iteration=now)
    return credit_options(config)(sampled, reward_KF, context)


def calibrate(loop: Loop, sampled: Sampled, output: RewardOutput) -> dict[str, float]:
    """Moves the noise level of each step by how often it gained, in the run's memory; returns levels for the log."""
    settings, run = loop.config.sampler, loop.run
    reward = torch.where(output.valid, output.values, torch.nan).cpu()
    gains, steps = gains_of(sampled, reward[None])[0], steps_of(sampled)[0].tolist()
    levels = loop.memory.get("noise_levels") or settings.noise_levels or (settings.noise_level,) * settings.num_steps
    table, calibration = torch.tensor(levels, dtype=torch.float64), settings.calibration
    table[steps] = calibrate_noise(table[steps], run.gather(gains), eps1=calibration.tolerance, eps2=calibration.step)
    loop.memory["noise_levels"] = table.tolist()
    return {f"noise_level/{step}": float(table[step]) for step in steps}


def reward_channels(loop: Loop, output: RewardOutput) -> tuple[Tensor, Tensor]:
    """[K, F] rewards as advantages take them, and their weights [K] now; separate rewards if parts have their own."""
    how = loop.config.reward_aggregation if loop.routes is None else "each"
    channels, weights = trained_channels(how, loop.scorer.reward, loop.iteration, output)
    return torch.stack(channels), torch.tensor(weights, dtype=torch.float64)


def step_stds(kernel: Kernel, schedule: Schedule) -> Tensor:
    """[T] standard deviation of the kernel at every step."""
    zero = torch.zeros(1, 1)
    levels = zip(schedule.sigma[:-1], schedule.sigma[1:], strict=True)
    return torch.stack([kernel(zero, zero, now, after).std.reshape(()) for now, after in levels])


def advantages(
    loop: Loop, method: Method, asked: AskedPrompts, sampled: Sampled, credit: Credit, output: RewardOutput, ends: Ends
) -> tuple[Tensor, Tensor, Tensor, float]:
    """For each transition: its advantages for the parts of a state `[P, M]`, whether it may be trained and whether its
    set carries a learning signal `[M]`; and the share of sets without one. A set of equal credit in every part is
    masked: its rows would only dilute the loss."""
    config, run, first = loop.config, loop.run, loop.run.rank * len(sampled)
    raw_KM, norm_M = run.gather(credit.raw.T).T.contiguous(), run.gather(credit.norm)
    weights = reward_channels(loop, output)[1]
    if config.reward_aggregation == "log_tame":
        weights = weights.new_ones(1)  # credit was assigned to the sum of tamed rewards
    advantage = by_part(loop.routes, raw_KM, weights, partial(normalise, config, raw_KM.double(), norm_M))
    advantage = advantage[:, first : first + len(sampled)]
    if method.back_up is not None:
        backed = [method.back_up(sampled, own, per_dim=sampled.states[0].numel()) for own in advantage]
        advantage = torch.stack(backed)
    if credit.offset is not None:
        advantage = advantage + credit.offset
    if credit.scale is not None:
        advantage = advantage * credit.scale
    if loop.routes is None:
        advantage = shape_advantages(loop, asked, sampled, advantage[0], output, ends)[None]
    known = advantage.isfinite().all(0)
    advantage = torch.where(known, advantage, 0.0).clamp(-config.adv_clip_range, config.adv_clip_range).float()
    # A set may spread over processes.
    _, place = norm_M.unique(return_inverse=True)
    moved = torch.zeros(int(place.max()) + 1).scatter_reduce(0, place, run.gather(advantage.abs().amax(0)), "amax")
    keep = known if credit.keep is None else known & credit.keep
    signal = (moved > 0)[place[first : first + len(sampled)]]
    return advantage, keep & trained_steps(loop, sampled), signal, float((moved == 0).double().mean())


def normalise(config: TrainConfig, raw_KM: Tensor, norm_M: Tensor, weights_K: Tensor) -> Tensor:
    """[M] advantages of the credit of all processes, as the run's settings normalise and aggregate it."""
    how = config.reward_aggregation
    if how in (*MERGED, "log_tame"):  # one reward; its granularities are normalised each, then added up
        how = "sum" if len(raw_KM) == 1 else "each"
    return aggregate(
        raw_KM,
        norm_M,
        weights_K,
        how=cast(Aggregation, how),
        scope=config.adv_std,
        eps=config.adv_eps,
        correction=config.adv_correction,
        baseline=config.adv_baseline,
        virtual_max=config.adv_virtual_max,
        min_std=config.adv_min_std,
    )


def trained_steps(loop: Loop, sampled: Sampled) -> Tensor:
    """[M] transitions whose step trains: all, the leading share of the steps, or a share drawn for each image."""
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
    return keep


def clip_ranges(loop: Loop, sampled: Sampled, kernel: Kernel, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """[M] distances below and above 1 at which to clip the ratio of each transition."""
    (low, high), ones = loop.config.clip_bounds, torch.ones_like(sampled.log_prob)
    shaping = shaping_options(loop.config)
    if not isinstance(shaping, Dcpo) or shaping.clip == "fixed":
        return ones * low, ones * high
    # The density over that at the mean, per dimension: exp(-mean(xi^2) / 2), xi the normal that was drawn.
    std = step_stds(kernel, schedule)[sampled.step].to(sampled.log_prob)
    highest = -std.log() - 0.5 * math.log(2 * math.pi)
    share = (sampled.log_prob / sampled.states[0].numel() - highest).exp().clamp(max=1.0)
    lowest_ratio, highest_ratio = dcpo_clip(share, eps_low=low, eps_high=high)
    return 1 - lowest_ratio, highest_ratio - 1


def end_rewards(sampled: Sampled, output: RewardOutput) -> Tensor:
    """Rewards of the images at the ends of paths, NaN where invalid."""
    return torch.where(output.valid, output.values, torch.nan).cpu()[sampled.ends]


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
    group, reward = sampled.finished_group[sampled.ends], end_rewards(sampled, output)
    return Ends(*(loop.run.gather(column) for column in (reward, group, batch.asked.prompt_ids_of(group))))


def all_compared(loop: Loop, sampled: Sampled, output: RewardOutput, ends: Ends) -> Compared | None:
    """All scores of all processes, completions included, which advantages compare within groups; per reward if rewards
    judge parts of a state. None if groups have a virtual member, from which equal rewards differ too, and if groups of
    one label teach."""
    if loop.config.adv_virtual_max is not None or loop.config.shaping.name == "real":
        return None
    if loop.routes is not None:
        of_each = torch.where(output.valid, reward_channels(loop, output)[0], torch.nan).cpu()
        return loop.run.gather(of_each.T).T, loop.run.gather(sampled.finished_group.cpu())
    if len(sampled.finished_group[sampled.ends]) == len(sampled.finished_group):  # already on the host: no second wait
        return ends.reward, ends.group
    reward = torch.where(output.valid, output.values, torch.nan).cpu()
    return loop.run.gather(reward), loop.run.gather(sampled.finished_group.cpu())


def success_rates(ends: Ends, group: Tensor, owner: str) -> Tensor:
    """Mean reward in [0, 1] of each group, by group number; 0 if no reward is valid. Raises ValueError: a reward lies
    outside [0, 1], so it is not a success rate."""
    known = ends.reward[~ends.reward.isnan()]
    if bool(((known < 0) | (known > 1)).any()):
        raise ValueError(
            f"{owner} reads rewards as success rates, which lie in [0, 1], but there are rewards from "
            f"{float(known.min()):g} to {float(known.max()):g}: choose a reward of that range, or scale it"
        )
    found, place = ends.group.unique(return_inverse=True)
    means = set_means(ends.reward, place)
    rates = torch.zeros(len(found)).scatter(0, place, means.float())
    return rates[torch.searchsorted(found, group)]


def shape_advantages(
    loop: Loop, asked: AskedPrompts, sampled: Sampled, advantage_M: Tensor, output: RewardOutput, ends: Ends
) -> Tensor:
    """Advantages after the configured change of shape."""
    shaping = shaping_options(loop.config)
    if shaping is None:
        return advantage_M
    if isinstance(shaping, AGrae):
        success = success_rates(ends, sampled.group, "shaping a_grae")
        return shaping(advantage_M, success.to(advantage_M), float(ends.reward.nanmean()))
    if isinstance(shaping, Real):
        return of_rows(loop, sampled, shaping(ends.reward, ends.group)).to(advantage_M)
    stored = loop.memory.get("reward_history")
    total = len(loop.prompts.train)
    history = RewardHistory.start(total, shaping.merge) if stored is None else RewardHistory(**stored)
    history = update_history(history, ends.reward, ends.prompt)
    loop.memory["reward_history"] = {f.name: getattr(history, f.name) for f in fields(history)}
    own_reward, prompt = end_rewards(sampled, output)[sampled.sample], asked.prompt_ids_of(sampled.group)
    return dcpo(own_reward.to(advantage_M), advantage_M, prompt, history, eps=loop.config.adv_eps)


def best_samples(loop: Loop, sampled: Sampled, ends: Ends) -> Tensor:
    """[M] transitions of the images that `best_of` selects: all without it."""
    if loop.config.best_of is None:
        return torch.ones_like(sampled.step, dtype=torch.bool)
    return of_rows(loop, sampled, select_best(ends.reward, ends.group, loop.config.best_of))


def of_rows(loop: Loop, sampled: Sampled, of_all: Tensor) -> Tensor:
    """[M] facts about all finished images of all processes, for the transitions of this one."""
    own = int(sampled.ends.sum())
    return of_all[loop.run.rank * own : (loop.run.rank + 1) * own][sampled.sample]


def accuracy_scale(loop: Loop, sampled: Sampled, ends: Ends) -> Tensor:
    """[M] factor of the KL coefficient: 1, or by the success rate of the row's group (FG-ExPO)."""
    ones = torch.ones_like(sampled.log_prob)
    if not loop.config.curriculum.accuracy_scaled_kl:
        return ones
    rates = success_rates(ends, sampled.group, "curriculum.accuracy_scaled_kl")
    return torch.tensor([accuracy_scaled_kl(1.0, float(rate)) for rate in rates]).to(ones)


# ---- options ---------------------------------------------------------------------------------------------------------


def credit_options(config: TrainConfig) -> Callable[..., Credit]:
    """The credit method with its options."""
    name = config.credit.method
    made: Callable[..., Credit] = build_options(CREDIT[name].options, config.credit.options, owner=f"credit {name!r}")
    return made


def shaping_options(config: TrainConfig) -> Dcpo | AGrae | Real | None:
    """The change of shape with its options; None without one."""
    made: Dcpo | AGrae | Real | None = _chosen("shaping", config.shaping, SHAPINGS)
    return made


def reward_map(config: TrainConfig) -> Callable[[Tensor], Tensor] | None:
    """The map of rewards with its options; None without one."""
    made: Callable[[Tensor], Tensor] | None = _chosen("reward_map", config.reward_map, MAPS)
    return made


def _chosen(key: str, section: ShapingConfig | RewardMapConfig, table: Mapping[str, type[Any]]) -> Any:
    """The entry of a table that a section names, with its options; None without one."""
    if section.name != "none":
        return build_options(table[section.name], section.options, owner=f"{key} {section.name!r}")
    if section.options:
        raise ValueError(f"{key}.options are set, but {key}.name is none: name one or remove them")
    return None


def check_advantages(config: TrainConfig) -> None:
    """Refuses ways of comparing rewards that cannot work together, in any recipe."""
    if config.reward_aggregation != "sum" and len([reward for reward in config.rewards if reward.weight]) < 2:
        raise ValueError(
            f"reward_aggregation={config.reward_aggregation} needs two rewards of nonzero weight, there is one: add "
            "another, or set it to sum"
        )
    if config.adv_virtual_max is not None and config.adv_std == "global":
        raise ValueError(
            "adv_virtual_max is one more member of every group, and adv_std=global divides by the std of all images: "
            "set adv_std to group or none"
        )


def part_row(loop: Loop, advantage_PM: Tensor) -> dict[str, float]:
    """Mean absolute advantage of each part of a state, for the log; nothing if rewards judge the whole."""
    if loop.routes is None:
        return {}
    means = loop.run.gather(advantage_PM.abs().T).nanmean(0).tolist()
    return {f"part/{name}/advantage_abs": mean for name, mean in zip(loop.routes.parts, means, strict=True)}


def check_routed(config: TrainConfig, *, by_parts: bool = True, compares: bool = True) -> None:
    """Refuses routes of rewards if parts of a state cannot have losses (`by_parts`) or, where losses compare images
    (`compares`), advantages."""
    if any(config.routes) and not by_parts:
        raise ValueError(
            f"rewards have routes, but objective {config.objective.name} compares whole images, or takes them from a "
            "file: set objective.name to nft, awm or rwr, or remove routes"
        )
    if any(config.routes) and compares and config.reward_aggregation not in ("each", "gdpo"):
        raise ValueError(
            "advantages of a part of a state are sums of those of the rewards with routes to it, but "
            f"reward_aggregation={config.reward_aggregation} makes one number of all rewards before: set it to each or "
            "gdpo, or remove routes"
        )


def check_labels(config: TrainConfig, shaping: Real) -> None:
    """Refuses what shaping real cannot do, or what its advantages, which use only verdicts, would not read."""
    largest, weights = config.group_size / (2 * shaping.tau), [one.weight for one in config.rewards if one.weight]
    if config.updates_per_rollout > 1:
        raise ValueError(
            "shaping real weighs images as a rollout's first update does, but updates_per_rollout is "
            f"{config.updates_per_rollout}: set it to 1"
        )
    if config.adv_clip_range < largest:
        raise ValueError(
            f"advantages of shaping real reach group_size / (2 tau) = {largest:g}, but adv_clip_range is "
            f"{config.adv_clip_range:g}: set it to {largest:g} or more"
        )
    if weights != [1] or config.reward_aggregation != "sum":
        raise ValueError(
            "shaping real takes the verdicts of one reward of weight 1, and here are rewards of weights "
            f"{', '.join(f'{weight:g}' for weight in weights)}: give one, and measure others with weight 0"
        )
    first = {one.name: one.default for one in fields(TrainConfig)}
    keys = [key for key in keys_of("advantages") if key not in ("adv_clip_range", "reward_aggregation")]
    if unread := [key for key in keys if getattr(config, key) != first[key]]:
        raise ValueError(f"shaping real makes advantages of verdicts alone and does not read {', '.join(unread)}")


def check_assignment(config: TrainConfig, method: Method) -> None:
    """Refuses settings between reward and advantage that cannot work together."""
    credit = config.credit.method
    credit_options(config)
    reward_map(config)
    if isinstance(shaping := shaping_options(config), Dcpo | Real) and (
        credit != "outcome" or config.curriculum.max_rounds > 1
    ):
        raise ValueError(
            f"shaping {config.shaping.name} compares a prompt's finished images: it goes with credit.method=outcome "
            f"(got {credit}) and curriculum.max_rounds=1"
        )
    if isinstance(shaping, Real):
        check_labels(config, shaping)
    if config.reward_aggregation in ("each", "gdpo") and method.merged:
        raise ValueError(
            f"credit method {credit} takes one reward, the weighted sum, so reward_aggregation="
            f"{config.reward_aggregation} has nothing to aggregate: set it to sum or log_tame"
        )
    if config.best_of is not None and config.curriculum.max_rounds > 1:
        raise ValueError("best_of and curriculum.max_rounds above 1 both leave images out: use one of them")
    check_advantages(config)
    check_routed(config)
    if config.curriculum.accuracy_scaled_kl and not config.kl_coef:
        raise ValueError("curriculum.accuracy_scaled_kl scales kl_coef, which is 0: raise it, or leave the scaling out")
    if config.adv_virtual_max is not None and not method.of_outcomes:
        raise ValueError(
            f"adv_virtual_max is the highest reward of a finished image, but credit method {credit} compares changes "
            "of reward or averages: use credit.method=outcome"
        )


def curriculum_of(sampling: str, options: Mapping[str, Any]) -> Shuffled | Replay | Gaussian:
    """The way of choosing prompts, with its options. Raises ValueError: an unknown option or a bad value."""
    return build_options(CURRICULA[sampling], options, owner=f"curriculum {sampling!r}")


def choose_prompts(loop: Loop, iteration: int, round: int) -> Sequence[int] | None:
    """Prompt numbers of an iteration's groups; None for the next ones of the shuffled pass."""
    config = loop.config
    curriculum = curriculum_of(config.curriculum.sampling, config.curriculum.options)
    return curriculum.choose(
        loop.memory.get(curriculum.memory),
        total=len(loop.prompts.train),
        count=config.prompts_per_step,
        seed=config.seed,
        iteration=iteration,
        round=round,
    )


def enough(loop: Loop, ends: list[Ends]) -> bool:
    """Whether the rounds of an iteration hold enough groups that disagree to train on."""
    informative = [informative_groups(part.reward, part.group) for part in ends]
    return int(torch.cat(informative).sum()) >= loop.config.prompts_per_step


def remember(loop: Loop, ends: Ends) -> None:
    """Takes the success rates of an iteration's prompts into the run's memory."""
    settings = loop.config.curriculum
    curriculum = curriculum_of(settings.sampling, settings.options)
    if curriculum.memory:
        prompts: list[int] = sorted(set(ends.prompt.tolist()))
        known = set(ends.prompt[~ends.reward.isnan()].tolist())
        by_prompt = Ends(ends.reward, ends.prompt, ends.prompt)
        found: Tensor = success_rates(by_prompt, torch.tensor(prompts), f"curriculum.sampling={settings.sampling}")
        rates = [float(rate) if prompt in known else math.nan for prompt, rate in zip(prompts, found, strict=True)]
        loop.memory[curriculum.memory] = curriculum.remembered(
            loop.memory.get(curriculum.memory), prompts, rates, iteration=loop.iteration, total=len(loop.prompts.train)
        )
