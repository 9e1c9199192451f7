"""Helpers around a random SD3 pipeline of 77 thousand parameters: quick, and real in every class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import family_sampling
import torch
from family_sampling import sample, start_noise
from torch import Tensor

from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.lora import Policy
from flowrl.pretraining.tiny_sd3 import CONTEXT, build_tiny_sd3
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, Kernel, Velocity, rollout
from flowrl.samplers.guidance import classifier_free_guidance
from flowrl.trajectory import Schedule, Trajectory

PROMPTS = ["a photo of a red circle", "two blue squares", "a green star left of a black triangle", "three stars"]
RANK, ALPHA = 2, 4


def save_tiny_sd3(folder: Path) -> Path:
    """A complete pipeline folder whose attention tells prompts and positions apart, although nothing is trained."""
    build_tiny_sd3(0, width=32, num_layers=2, vae_channels=(8, 8, 16, 16)).save_pretrained(folder)
    return folder


def load_tiny(
    folder: Path, dtype: torch.dtype = torch.float32, *, gradient_checkpointing: bool = False
) -> FamilyPipeline:
    """The folder as flowrl loads it."""
    return FAMILY.load(
        str(folder), dtype=dtype, max_sequence_length=CONTEXT, gradient_checkpointing=gradient_checkpointing
    )


def adapted(
    folder: Path, dtype: torch.dtype = torch.float32, *, gradient_checkpointing: bool = False
) -> tuple[FamilyPipeline, Policy]:
    """A pipeline with a LoRA on the published targets that does something."""
    pipeline = load_tiny(folder, dtype, gradient_checkpointing=gradient_checkpointing)
    return pipeline, family_sampling.adapted(pipeline, rank=RANK, alpha=ALPHA)


def probe(pipeline: FamilyPipeline) -> Tensor:
    """One network evaluation of two prompts, without gradient: a fingerprint of the weights that are at work."""
    with torch.no_grad():
        return pipeline.network(start_noise(pipeline, 2), torch.tensor([700.0, 300.0]), pipeline.encode(PROMPTS[:2]))


def guided(pipeline: FamilyPipeline, prompts: list[str], scale: float) -> Velocity:
    """The velocity of some prompts, guided away from the empty one."""
    return classifier_free_guidance(pipeline.network, pipeline.encode(prompts), pipeline.encode([""]), scale)


def bound(kernel: str, schedule: Schedule) -> Kernel:
    """A kernel at its default noise level."""
    return replace(KERNELS[kernel], sigma_max=schedule.sigma_max)


@torch.no_grad()
def sample_sde(
    pipeline: FamilyPipeline, prompts: list[str], scale: float, schedule: Schedule, kernel: Kernel
) -> Trajectory:
    """A rollout whose steps are all stochastic except the last."""
    x = start_noise(pipeline, len(prompts))
    return rollout(
        guided(pipeline, prompts, scale), x, schedule, kernel, lambda step: counter_normal(x.shape, "step", step),
        stochastic=range(schedule.num_steps - 1),
    )  # fmt: skip


def sample_ode(
    pipeline: FamilyPipeline, prompts: list[str], scale: float, num_steps: int, grid: str = "diffusers"
) -> Tensor:
    """Finished latents without any noise on the way."""
    velocity = guided(pipeline, prompts, scale)
    return sample(pipeline, velocity, pipeline.schedule(num_steps, grid), len(prompts))
