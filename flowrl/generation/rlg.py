"""Reinforcement learning guidance from a base to tuned models: its options, adapters and velocity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.generation.models import several
from flowrl.pipelines import Pipeline
from flowrl.pipelines.rlg_network import adapter_layers, adapter_network, add_adapter
from flowrl.pipelines.weights.lora_names import Stock
from flowrl.prompts.loading import Prompt
from flowrl.samplers.guidance import Scale, Velocity, by_step, network_rows, rl_first, rl_outside, rlg_experts
from flowrl.training.prompting import encode_prompts, guided
from flowrl.trajectory import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class RLG:
    """The tuned models that guide, their scales, and when they guide."""

    loras: tuple[Path, ...]
    """Folders of the tuned models' LoRAs."""
    scales: tuple[float, ...]
    """One for each; 1 is the tuned model."""
    first_steps: int = 0
    """Number of first steps with one tuned model alone."""
    interval: tuple[float, float] | None = None
    """Range of noise levels; outside it, one tuned model runs alone."""
    base_guidance_scale: float | None = None
    """Classifier-free guidance scale of the base; None takes that of the tuned models."""

    def __post_init__(self) -> None:
        if not self.loras:
            raise ValueError("`rlg` guides by tuned models and none was given: sample a run, or add `lora` FOLDER")
        if len(self.loras) != len(self.scales):
            raise ValueError(
                f"`rlg` needs one scale for each LoRA, got {len(self.scales)} for {len(self.loras)}: "
                f"separate them by commas, `rlg` {','.join(['1'] * len(self.loras))}"
            )
        if self.first_steps and self.interval is not None:
            raise ValueError("`rlg_from` and `rlg_interval` both say when `rlg` acts: give one of them")
        if len(self.loras) > 1 and (self.first_steps or self.interval is not None):
            raise ValueError(
                "`rlg_from` and `rlg_interval` leave steps to the tuned model alone, and there are "
                f"{len(self.loras)}: give one `lora`"
            )

    def check(self, num_steps: int) -> None:
        """Refuses first steps that leave none to guidance. Raises ValueError: they are as many as all steps."""
        if self.first_steps >= num_steps:
            raise ValueError(f"`rlg_from` {self.first_steps} leaves no step to `rlg`: there are {num_steps} steps")

    def schedules(self, schedule: Schedule) -> list[Scale]:
        """The scales, as functions of sigma if they are not constant."""
        if self.first_steps:
            return [by_step(rl_first(scale, self.first_steps), schedule.sigma) for scale in self.scales]
        if self.interval is not None:
            return [rl_outside(scale, *self.interval) for scale in self.scales]
        return list(self.scales)

    def describe(self, schedule: Schedule, guidance_scale: float) -> str:
        """A line for the terminal: scales, and what they cost."""
        base = guidance_scale if self.base_guidance_scale is None else self.base_guidance_scale
        rows = network_rows(self.scales, base_guidance_scale=base, rl_guidance_scale=guidance_scale)
        alone = 1 if guidance_scale == 1 else 2
        scales = ", ".join(f"{scale:g}" for scale in self.scales)
        when = f" after {self.first_steps} of {schedule.num_steps} steps" if self.first_steps else ""
        when = when or ("" if self.interval is None else " at sigma {:g} to {:g}".format(*self.interval))
        return f"RLG {scales}{when}: {rows} network rows per image and step, {alone} for the tuned model alone"


Numbers = str | float | Sequence[float]
"""Numbers, or a text that lists them with commas."""


def rlg_settings(
    loras: Sequence[Path],
    scales: Numbers | None,
    *,
    first_steps: int | None = None,
    interval: Numbers | None = None,
    base_guidance: float | None = None,
    before_training: bool = False,
) -> RLG | None:
    """Reads options of guidance between models; None if no scales are given. Raises ValueError: a value that is not a
    number, or options that contradict each other."""
    if scales is None:
        said = {"rlg_from": first_steps, "rlg_interval": interval, "base_guidance": base_guidance}
        if extra := [name for name, value in said.items() if value is not None]:
            raise ValueError(f"`{extra[0]}` says how `rlg` acts, and there is no `rlg`: add one")
        if len(loras) > 1:
            raise ValueError(
                f"{len(loras)} LoRAs were given: add `rlg` with a scale for each, such as "
                f"`rlg` {','.join([f'{1 / len(loras):.2g}'] * len(loras))}"
            )
        return None
    if before_training:
        raise ValueError("`before_training` samples the model before training, as `rlg` 0 does: give one of them")
    first = first_steps or 0
    if first < 0:
        raise ValueError(f"`rlg_from` counts steps and must not be negative, got {first}")
    ends = () if interval is None else numbers(interval, "`rlg_interval`", "0.2,0.8")
    if len(ends) not in (0, 2):
        raise ValueError(f"`rlg_interval` takes two noise levels LOW,HIGH such as 0.2,0.8, got {interval!r}")
    settings = RLG(
        loras=tuple(loras),
        scales=numbers(scales, "`rlg`", "1.6"),
        first_steps=first,
        interval=(ends[0], ends[1]) if ends else None,
        base_guidance_scale=base_guidance,
    )
    if settings.interval is not None:
        rl_outside(1.0, *settings.interval)  # refuses what it cannot use, before weights load
    return settings


def numbers(given: Numbers, option: str, example: str) -> tuple[float, ...]:
    """Finite numbers of a list separated by commas. Raises ValueError: anything else; names option and example."""
    try:
        values = [float(part) for part in (given.split(",") if isinstance(given, str) else several(given))]
    except (ValueError, TypeError):
        values = [math.nan]
    if not values or not all(math.isfinite(value) for value in values):
        said = repr(given) if not isinstance(given, str) or given.strip() else "nothing"
        raise ValueError(f"{option} takes finite numbers separated by commas, such as {example}, got {said}.")
    return tuple(values)


def add_experts(pipeline: Pipeline, loras: Sequence[Path], stock: Stock | None = None) -> list[str]:
    """Loads LoRAs side by side into a pipeline without one; returns their adapters' names.

    `stock` is as `flowrl.pipelines.weights.lora_files.read_lora` takes it.

    Raises ValueError: one is not there or does not fit.
    """
    names = [f"tuned_{number}" for number in range(len(loras))]
    for place, name in zip(loras, names, strict=True):
        add_adapter(pipeline.denoiser, place, name, stock)
    return names


def rlg_velocity(
    pipeline: Pipeline,
    names: Sequence[str],
    prompts: Sequence[Prompt | str],
    scales: Sequence[Scale],
    *,
    guidance_scale: float,
    base_guidance_scale: float | None = None,
) -> Velocity:
    """The guided velocity of prompts: classifier-free guidance of each network, then RLG by adapters of these names."""
    layers = adapter_layers(pipeline.denoiser)
    cond = encode_prompts(pipeline, prompts)
    base_scale = guidance_scale if base_guidance_scale is None else base_guidance_scale

    def velocity(adapters: Sequence[str], scale: float) -> Velocity:
        return guided(pipeline, adapter_network(pipeline.network, layers, adapters), cond, scale)

    return rlg_experts(velocity([], base_scale), [velocity([name], guidance_scale) for name in names], scales)
