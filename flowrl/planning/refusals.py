"""Finds the obstacles of a run: settings that cannot work, and things still missing on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from flowrl.config.prompt_sets import advice_on
from flowrl.config.train import TrainConfig, is_here
from flowrl.pipelines import ModelFamily
from flowrl.rewards import aspects_of
from flowrl.runtime.failures import found_by
from flowrl.session.preflight import check_arithmetic, look
from flowrl.training.parts import check_attention
from flowrl.training.processes.devices import check_device


@dataclass(frozen=True, slots=True)
class Obstacles:
    """Settings to change (`refused`), what you have to put in place (`absent`), what this machine lacks (`device`);
    `of_prompts` are those of the first two that concern prompt files."""

    refused: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    device: list[str] = field(default_factory=list)
    of_prompts: list[str] = field(default_factory=list)


def obstacles(config: TrainConfig, family: ModelFamily, processes: int) -> Obstacles:
    """All that `flowrl train` would refuse, also what it could refuse only after weights are loaded."""
    found = Obstacles()
    for key, value in (("prompts.train", config.prompts.train), ("prompts.eval", config.prompts.eval)):
        if value is not None and not is_here(value):
            way = advice_on(value).partition(" (")[0] or "its contents were not checked"
            found.absent.append(f"{key}: {value} is not here; {way}")
    found.of_prompts.extend(found.absent)
    # As the first process of a launcher would see it.
    with patch.dict(os.environ, WORLD_SIZE=str(processes), RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"):
        looked = look(config, here=False, only_here=True)
        found.of_prompts.extend(looked.of_prompts)
        scored = (*config.rewards, *config.eval.rewards)
        named = [*_strings([*(one.options for one in scored), config.objective.options, config.policy.init_lora])]
        named += [teacher.lora for teacher in config.policy.teachers if teacher.lora is not None]
        named += [one.file for one in scored if one.file is not None]
        for fault in looked.faults:
            missing = [value for value in named if value in fault and not is_here(value)]
            (found.absent if missing else found.refused).append(fault)
        found.device.extend(
            found_by(
                lambda: check_device(config.pipeline.device),
                lambda: check_attention(config.pipeline, family),
                lambda: check_arithmetic(config),
            )
        )
    found.refused.extend(one for one in _found_late(config, family, processes) if one not in found.refused)
    return found


def _found_late(config: TrainConfig, family: ModelFamily, processes: int) -> Iterator[str]:
    """Bad combinations that a run meets only after its model and rewards are loaded."""
    ranks = processes // config.parallel.context  # those that share an image's tokens draw it together
    share = config.num_images // ranks
    for place, reward in enumerate((*config.rewards, *config.eval.rewards)):
        key = f"rewards.{place}" if place < len(config.rewards) else f"eval.rewards.{place - len(config.rewards)}"
        judged = aspects_of(reward.name)
        if share % config.group_size and ("groups" in judged or reward.gate is not None):
            why = "has a gate, which looks at" if reward.gate is not None else "compares"
            yield (
                f"{key} ({reward.name or reward.function}) {why} the images of a group, but {share} images per process "
                f"are not whole groups of {config.group_size}: make prompts_per_step a multiple of {ranks}, the number "
                "of processes that draw images of their own"
            )
        if "videos" in judged and not family.videos:
            yield f"{key} ({reward.name}) judges videos, and the family {family.name} draws images: change one of them"
        if "sounds" in judged and family.sound is None:
            yield (
                f"{key} ({reward.name}) judges sounds, and what the family {family.name} draws is silent: take another "
                "reward, or a model whose videos have sound, such as Lightricks/LTX-2"
            )
        if "edits" in judged and family.num_sources == (0, 0):
            yield (
                f"{key} ({reward.name}) judges edits of a source image, and the family {family.name} takes none: "
                "change one of them"
            )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _strings(entry)
    elif isinstance(value, Sequence):
        for entry in value:
            yield from _strings(entry)
