"""The largest number that each key takes: far beyond any use, and small enough to catch a slip at once."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

from flowrl.config.strict_yaml import ConfigError

STEPS = 10_000
"""Denoising steps."""
IMAGES = 100_000
"""Images of one iteration, or of a batch."""
SIDE = 16_384
"""Pixels of a side."""
GUIDANCE = 1_000.0
"""Guidance scale."""
THREADS = 1_024
"""CPU threads; a hundred times as many end a process without a message."""
GRACE = 86_400.0
"""Seconds to finish accepted requests: a day."""
PROCESSES = 100_000
"""Processes, workers, GPUs."""
_EVER = 1_000_000_000  # iterations

MOST: dict[str, float] = {
    "seed": 2**63 - 1, "num_iterations": _EVER, "prompts_per_step": IMAGES, "group_size": IMAGES,
    "updates_per_rollout": IMAGES, "micro_batch_size": IMAGES, "rollout_batch_size": IMAGES, "clip_range": 1e6,
    "adv_clip_range": 1e9, "adv_eps": 1e9, "adv_min_std": 1e9, "adv_correction": 1, "adv_virtual_max": 1e9,
    "max_invalid_ratio": 1,
    "best_of": IMAGES, "kl_coef": 1e9, "kl_reference": _EVER, "same_latent": IMAGES,
    "eval_every": _EVER, "checkpoint_every": _EVER, "keep_checkpoints": _EVER,
    "threads": THREADS,
    "pipeline.height": SIDE, "pipeline.width": SIDE, "pipeline.num_frames": 10_000, "pipeline.fps": 1_000,
    "pipeline.max_sequence_length": 100_000, "pipeline.vae_slice": IMAGES,
    "policy.lora_rank": 16_384, "policy.lora_alpha": 1_000_000, "policy.ema_decay": 1, "policy.ema_every": _EVER,
    "sampler.noise_level": 100, "sampler.noise_levels": 100, "sampler.num_steps": STEPS,
    "sampler.guidance_scale": GUIDANCE, "sampler.shift": 1_000, "sampler.sde_window_size": STEPS,
    "sampler.sde_window_range": STEPS, "sampler.sde_window_interval": _EVER, "sampler.sde_window_stride": STEPS,
    "sampler.flash_tail": 1, "sampler.trained_fraction": 1, "sampler.first_block_cache": 1,
    "sampler.calibration.iterations": _EVER, "sampler.calibration.tolerance": 1e9, "sampler.calibration.step": 100,
    "optim.lr": 1e6, "optim.warmup": _EVER,
    "optim.betas": 1, "optim.eps": 1e3, "optim.weight_decay": 1e3, "optim.max_grad_norm": 1e30,
    "credit.completion": STEPS, "credit.branches": IMAGES, "credit.strides": STEPS, "credit.splits": STEPS,
    "credit.children": 1_000, "credit.split_noise": 1e3,
    "curriculum.max_rounds": 1_000, "times.count": STEPS, "times.fraction": 1, "times.shift": 1_000,
    "dmd.weight": 1e9, "dmd.guidance_scale": GUIDANCE, "dmd.fake_lr": 1e6, "dmd.fake_updates": 10_000,
    "slots.old_decay_value": 1, "budget.nfe": 2**63 - 1, "budget.seconds": 1e12, "budget.images": 2**63 - 1,
    "budget.evals": 1_000_000,
    "parallel.shard": PROCESSES, "parallel.replicate": PROCESSES, "parallel.context": PROCESSES,
    "workers.rollouts": PROCESSES, "workers.shard": PROCESSES, "workers.rewards": PROCESSES,
    "workers.staleness": 100, "workers.importance_cap": 1e9,
    "workers.rollout_gpus": PROCESSES, "workers.reward_gpus": PROCESSES,
    "eval.num_steps": STEPS, "eval.guidance_scale": GUIDANCE, "eval.samples_per_prompt": IMAGES,
    "eval.batch_size": IMAGES, "eval.num_prompts": _EVER, "eval.num_images": IMAGES, "eval.height": SIDE,
    "eval.width": SIDE, "eval.shift": 1_000, "eval.seed": 2**63 - 1,
}  # fmt: skip
"""Dotted key -> the largest absolute value, for each member of a list."""


def check_counts(most: int = 1_000_000, **values: int | None) -> None:
    """Refuses parameters, by name, that are not whole numbers from 1 to `most`; None passes."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, Integral) and value is not True and 1 <= value <= most):
            raise ValueError(f"`{name}` must be a whole number from 1 to {most:,}, got {value!r}")


def check_most(value_of: Callable[[str], Any]) -> None:
    """Refuses numbers beyond `MOST` among the values of its keys."""
    found = []
    for dotted, most in MOST.items():
        value = value_of(dotted)
        numbers = (one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, int | float))
        found += [
            f"{dotted} must be at most {_write(most)}, got {_write(number)}: lower it"
            for number in numbers
            if abs(number) > most
        ]
    if found:
        raise ConfigError(*found)


def _write(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"
