"""Reinforcement learning guidance for `flowrl sample`: its options, its adapters and its images."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flowrl.pipelines import Pipeline
from flowrl.pipelines.rlg_network import adapter_layers, adapter_network, add_adapter
from flowrl.prompts.loading import Prompt
from flowrl.samplers import ode_rollout
from flowrl.samplers.guidance import Scale, Velocity, by_step, network_rows, rl_first, rl_outside, rlg_experts
from flowrl.training.prompting import device_of, encode_prompts, guided
from flowrl.trajectory import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class RLG:
    """Which tuned models guide, how strongly, and when.

    Attributes:
        loras: Folders of the tuned models' LoRAs.
        scales: One for each; 1 is the tuned model.
        first_steps: Steps at the start that one tuned model takes alone.
        interval: Noise levels outside of which one tuned model runs alone.
        base_guidance_scale: Classifier-free guidance of the base; None takes that of the tuned models.
    """

    loras: tuple[Path, ...]
    scales: tuple[float, ...]
    first_steps: int = 0
    interval: tuple[float, float] | None = None
    base_guidance_scale: float | None = None

    def __post_init__(self) -> None:
        if not self.loras:
            raise ValueError("--rlg guides by tuned models and none was given: sample a run, or add --lora FOLDER")
        if len(self.loras) != len(self.scales):
            raise ValueError(
                f"--rlg needs one scale for each LoRA, got {len(self.scales)} for {len(self.loras)}: "
                f"separate them by commas, --rlg {','.join(['1'] * len(self.loras))}"
            )
        if self.first_steps and self.interval is not None:
            raise ValueError("--rlg-from and --rlg-interval both say when --rlg acts: give one of them")
        if len(self.loras) > 1 and (self.first_steps or self.interval is not None):
            raise ValueError(
                "--rlg-from and --rlg-interval leave steps to the tuned model alone, and there are "
                f"{len(self.loras)}: give one --lora"
            )

    def check(self, num_steps: int) -> None:
        """Refuses a number of first steps that leaves no step to guidance.

        Raises:
            ValueError: it is as large as the number of steps.
        """
        if self.first_steps >= num_steps:
            raise ValueError(f"--rlg-from {self.first_steps} leaves no step to --rlg: there are {num_steps} steps")

    def schedules(self, schedule: Schedule) -> list[Scale]:
        """The scales as functions of sigma where they are not constant."""
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
        return f"RLG {scales}{when}: {rows} network rows an image and step, {alone} for the tuned model alone"


def rlg_settings(options: argparse.Namespace, loras: Sequence[Path]) -> RLG | None:
    """Reads `--rlg` and what belongs to it; None where it was not given.

    Raises:
        ValueError: a value that is no number, or options that contradict each other.
    """
    given = vars(options)
    if given.get("rlg") is None:
        extra = [name for name in ("rlg_from", "rlg_interval", "base_guidance_scale") if given.get(name) is not None]
        if extra:
            raise ValueError(f"--{extra[0].replace('_', '-')} says how --rlg acts, and there is no --rlg: add one")
        if len(loras) > 1:
            raise ValueError(
                f"{len(loras)} LoRAs were given: add --rlg with a scale for each, such as "
                f"--rlg {','.join([f'{1 / len(loras):.2g}'] * len(loras))}"
            )
        return None
    if options.base:
        raise ValueError("--base samples the model before training, and --rlg 0 is the same: give one of them")
    first = given.get("rlg_from") or 0
    if first < 0:
        raise ValueError(f"--rlg-from counts steps and must not be negative, got {first}")
    text = given.get("rlg_interval")
    ends = None if text is None else _numbers(text, "--rlg-interval")
    if ends is not None and len(ends) != 2:
        raise ValueError(f"--rlg-interval takes two noise levels LOW,HIGH such as 0.2,0.8, got {text!r}")
    interval = None if ends is None else (ends[0], ends[1])
    settings = RLG(
        loras=tuple(loras), scales=_numbers(str(options.rlg), "--rlg"), first_steps=first, interval=interval,
        base_guidance_scale=given.get("base_guidance_scale"),
    )  # fmt: skip
    for scale in settings.scales:  # both refuse what they cannot use, before weights load
        rl_outside(scale, *(interval or (0.0, 1.0)))
    return settings


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} takes numbers separated by commas, got {text!r}") from None


def add_experts(pipeline: Pipeline, loras: Sequence[Path]) -> list[str]:
    """Loads LoRAs beside each other into a pipeline that has none; returns their adapters' names.

    Raises:
        ValueError: one is not there or does not fit.
    """
    names = [f"tuned_{number}" for number in range(len(loras))]
    for folder, name in zip(loras, names, strict=True):
        add_adapter(pipeline.denoiser, folder, name)
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


@torch.no_grad()
def generate_rlg(
    pipeline: Pipeline,
    names: Sequence[str],
    prompts: Sequence[Prompt | str],
    x: Tensor,
    schedule: Schedule,
    settings: RLG,
    *,
    guidance_scale: float,
) -> Tensor:
    """Images float32 `[b, 3, H, W]` of prompts from start noise `x` `[b, *latent]` by the ODE sampler under RLG.

    The noise may lie on any device.
    """
    x = x.to(device_of(pipeline))
    velocity = rlg_velocity(
        pipeline, names, prompts, settings.schedules(schedule),
        guidance_scale=guidance_scale, base_guidance_scale=settings.base_guidance_scale,
    )  # fmt: skip
    return pipeline.decode(ode_rollout(velocity, x, schedule))
