"""From a configuration to the parts of a run: pipeline, policy, rewards, sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from flowrl.config import SamplerConfig, TrainConfig, resolve_path
from flowrl.config_rewards import RewardConfig
from flowrl.pipelines import Pipeline, family
from flowrl.pipelines.lora import Policy
from flowrl.prompts import Prompt, read_prompts
from flowrl.rewards.compose import Merge, WeightedSum, build_weighted_sum, weighted_sum
from flowrl.run import Run
from flowrl.samplers import KERNELS, Kernel
from flowrl.trajectory import Schedule

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_parts(config: TrainConfig, run: Run) -> tuple[Pipeline, Policy, WeightedSum]:
    """Pipeline, LoRA policy (with its slots) and rewards."""
    settings = config.pipeline
    pipeline: Pipeline = family(settings.name).load(
        model_location(settings.model), dtype=DTYPES[settings.dtype], device=run.device,
        height=settings.height, width=settings.width, max_sequence_length=settings.max_sequence_length,
        vae_slice=settings.vae_slice, gradient_checkpointing=settings.gradient_checkpointing,
    )  # fmt: skip
    policy = Policy(
        pipeline.transformer, rank=config.policy.lora_rank, alpha=config.policy.alpha,
        targets=config.policy.target_modules or pipeline.lora_targets, seed=config.seed,
    )  # fmt: skip
    if config.policy.init_lora is not None:
        policy.initialise_from(resolve_path(config.policy.init_lora))
    if config.policy.ema_decay > 0:
        policy.add_slot("ema")
    return pipeline, policy, load_rewards(config, run)


def load_rewards(config: TrainConfig, run: Run) -> WeightedSum:
    """The rewards that are trained on, as one."""
    how = config.reward_aggregation
    merge: Merge = how if how in ("geometric", "harmonic") else "sum"
    return build_weighted_sum(
        reward_specs(config.rewards), device=run.device, merge=merge, partial=config.reward_partial
    )  # fmt: skip


def evaluation_rewards(config: TrainConfig, reward: WeightedSum, device: torch.device) -> WeightedSum | None:
    """What evaluations measure: trained rewards that judge an image by itself, and those of `eval.rewards`.

    A reward that compares the images of a group says nothing of a model: its mean is the same for every model.
    """
    more = build_weighted_sum(reward_specs(config.eval.rewards), device=device) if config.eval.rewards else None
    members = [r for r in reward.rewards if r.kind not in ("groupwise", "pairwise")] + list(
        more.rewards if more else ()
    )
    return weighted_sum(members, [1.0] * len(members)) if members else None


def model_location(model: str) -> str:
    """What a family's `load` takes: the path of an asset or of what is written as a path, else the text, a hub id."""
    return str(resolve_path(model)) if model.startswith(("asset:", "/", "./", "../", "~")) else model


def reward_specs(rewards: Sequence[RewardConfig]) -> list[dict[str, Any]]:
    """Configured rewards as plain mappings, the form the reward layer takes."""
    return [{key: value for key, value in asdict(entry).items() if value is not None} for entry in rewards]


def sampler_of(settings: SamplerConfig, pipeline: Pipeline) -> tuple[Kernel, Schedule]:
    """The kernel with its settings bound, and the schedule of a rollout."""
    schedule = pipeline.schedule(settings.num_steps, settings.grid)
    options: dict[str, Any] = {} if settings.noise_level is None else {"noise_level": settings.noise_level}
    return partial(KERNELS[settings.kernel], sigma_max=schedule.sigma_max, **options), schedule


def encode_everything(config: TrainConfig, pipeline: Pipeline, train_prompts: Sequence[Prompt]) -> None:
    """Embeds every prompt the run can meet, then frees the text encoders."""
    rows = list(train_prompts)
    if config.prompts.eval is not None:
        rows += read_prompts(resolve_path(config.prompts.eval))
    pipeline.encode([row.text for row in rows])
    pipeline.free_text_encoders()
