"""Which prompts an iteration samples, and what is remembered of their success."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowrl.config.train import TrainConfig, resolve_path
from flowrl.prompts.curriculum import (
    ReplayBuffer,
    ReplayEntry,
    draw_prompts,
    gaussian_weights,
    informative_groups,
    replay,
    update_pass_rates,
)
from flowrl.prompts.curriculum import remember as remember_in
from flowrl.prompts.loading import prompts_of_iteration, read_prompts
from flowrl.training.assignment import Ends, success_rates
from flowrl.training.loop import Loop

_OPTIONS = {"shuffled": (), "replay": ("band", "share", "cooldown", "max_reuse"),
            "gaussian": ("centre", "width", "momentum")}  # fmt: skip


def choose_prompts(loop: Loop, iteration: int, round: int) -> list[int] | None:
    """Prompt numbers of an iteration's groups; None for the next ones of the shuffled pass."""
    config, total = loop.config, len(loop.train_prompts)
    count, options = config.prompts_per_step, config.curriculum.options
    if config.curriculum.sampling == "gaussian":
        rates = loop.memory.get("pass_rates", torch.full((total,), 0.5, dtype=torch.float64))
        shape = {key: value for key, value in options.items() if key != "momentum"}
        return list(draw_prompts(gaussian_weights(rates, **shape), count, config.seed, iteration, round))
    if config.curriculum.sampling == "replay" and round == 0:
        again = replay(_buffer(loop), count, iteration)
        fresh = prompts_of_iteration(total, count, config.seed, iteration)
        return [*again, *(number for number in fresh if number not in again)][:count]
    return None


def enough(loop: Loop, ends: list[Ends]) -> bool:
    """Whether the rounds of an iteration hold as many groups that disagree as it trains on."""
    informative = [informative_groups(part.reward, part.group) for part in ends]
    return int(torch.cat(informative).sum()) >= loop.config.prompts_per_step


def remember(loop: Loop, ends: Ends) -> None:
    """Takes the success rates of an iteration's prompts into the run's memory."""
    settings = loop.config.curriculum
    if settings.sampling == "shuffled":
        return
    prompts: list[int] = sorted(set(ends.prompt.tolist()))
    rates = _rates(ends, prompts, settings.sampling)
    if settings.sampling == "gaussian":
        old = loop.memory.get("pass_rates", torch.full((len(loop.train_prompts),), 0.5, dtype=torch.float64))
        momentum = {key: value for key, value in settings.options.items() if key == "momentum"}
        loop.memory["pass_rates"] = update_pass_rates(old, prompts, rates, **momentum)
        return
    buffer = remember_in(_buffer(loop), prompts, rates, loop.iteration)
    loop.memory["replay"] = [[e.prompt, e.pass_rate, e.last_used, e.reuses] for e in buffer.entries]


def _rates(ends: Ends, prompts: list[int], sampling: str) -> list[float]:
    by_prompt, known = Ends(ends.reward, ends.prompt, ends.prompt), set(ends.prompt[~ends.reward.isnan()].tolist())
    rates: Tensor = success_rates(by_prompt, torch.tensor(prompts), f"curriculum.sampling={sampling}")
    return [float(rate) if prompt in known else math.nan for prompt, rate in zip(prompts, rates, strict=True)]


def _buffer(loop: Loop) -> ReplayBuffer:
    options = dict(loop.config.curriculum.options)
    if "band" in options:
        options["band"] = tuple(options["band"])
    entries = tuple(ReplayEntry(int(p), float(r), int(used), int(n)) for p, r, used, n in loop.memory.get("replay", []))
    return ReplayBuffer(**options, entries=entries)


def check_choice(config: TrainConfig) -> None:
    """Refuses options that the way of choosing prompts does not have.

    Raises:
        ValueError: with the options that there are, or what is wrong with a value.
    """
    sampling, options = config.curriculum.sampling, config.curriculum.options
    unknown = sorted(set(options) - set(_OPTIONS[sampling]))
    if unknown:
        allowed = ", ".join(_OPTIONS[sampling]) or "none"
        raise ValueError(f"curriculum.options: {sampling} has no {', '.join(unknown)}; allowed: {allowed}")
    if sampling == "replay":
        band = options.get("band", (0.25, 0.75))
        ReplayBuffer(**{**options, "band": tuple(band)})
    if sampling == "gaussian":
        shape = {key: value for key, value in options.items() if key != "momentum"}
        gaussian_weights(torch.full((1,), 0.5), **shape)
        update_pass_rates(torch.full((1,), 0.5), [], [], momentum=options.get("momentum", 0.9))
        total = len(read_prompts(resolve_path(config.prompts.train)))
        if total < config.prompts_per_step:
            raise ValueError(
                f"curriculum.sampling=gaussian draws prompts_per_step ({config.prompts_per_step}) different prompts, "
                f"but {config.prompts.train} holds {total}: lower prompts_per_step or add prompts"
            )
