"""Which prompts an iteration samples, and the memory of their success."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.config.options import build_options
from flowrl.prompts.curriculum import CURRICULA, Gaussian, Replay, Shuffled, informative_groups
from flowrl.training.assignment import Ends, success_rates
from flowrl.training.loop import Loop


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
