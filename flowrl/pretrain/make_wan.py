"""Makes the embedded video model: `flowrl pretrain wan [key=value ...]`.

Three stages, each resumable, on clips of one shape that moves in one of four directions (`flowrl.world.clips`):

1. an `AutoencoderKLWan` learns to reconstruct clips (absolute error, shapes weighted up, and a small KL term);
2. a fixed set of clips is drawn and encoded once;
3. transformer and text encoder learn the flow-matching velocity, `|| v(x_sigma, sigma, prompt) - (noise - clean) ||^2`
   with `sigma = shift(u)`, `u` uniform (Esser et al., arXiv 2403.03206, section 3), a tenth of the prompts empty.

All combinations of shape, colour and direction are drawn: what is held out from reinforcement learning is known here.
Three captions of ten name another direction than the clip shows, as captions written by machines do; a model that
learned from them goes the asked way only most of the time, which reinforcement learning can correct.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import WanPipeline
from torch import Tensor, nn

from flowrl.pipelines.families.wan import FAMILY
from flowrl.pretrain.making import describe, encode_once, prepare, write_asset
from flowrl.pretrain.network_training import (
    Making,
    Noised,
    in_low_precision,
    reconstructed,
    train_autoencoder,
    train_denoiser,
    velocity_error,
)
from flowrl.pretrain.tiny_families import build_tiny_wan
from flowrl.pretrain.tiny_sd3 import CONTEXT
from flowrl.randomness import counter_seed
from flowrl.rewards import build_reward
from flowrl.world.clips import DIRECTIONS, FPS, FRAMES, WORDS, draw_clip, motion_records
from flowrl.world.scenes import BACKGROUND

NUM_STEPS, GUIDANCE_SCALE = 10, 3.0
"""Default sampling settings of this model."""

HELD_OUT_IMAGES = 96
"""Clips that its score is measured on."""

_MEASURED = 256  # clips that latents are measured on
_GROUND = BACKGROUND[0] / 127.5 - 1.0  # of all three channels


@dataclass(frozen=True, kw_only=True, slots=True)
class WanConfig(Making):
    """Settings of this pre-training."""

    out: str = "runs/pretrain-wan"
    vae_steps: int = 2400
    """Updates of the autoencoder."""
    vae_batch_size: int = 8
    """Clips per autoencoder update."""
    vae_lr: float = 2e-3
    """Peak learning rate of the autoencoder."""
    kl_weight: float = 1e-4
    """Weight of the autoencoder's mean KL term."""
    shape_weight: float = 6.0
    """How much more the pixels of a shape and about it count in the autoencoder's error; without it neither colours
    nor corners are learned."""
    num_clips: int = 12_288
    """Clips encoded once for stage 3."""
    wrong_direction: float = 0.3
    """Share of the clips whose caption names another direction, as captions written by machines do: to be unlearned."""
    steps: int = 3000
    lr_steps: int = 6000
    """Updates over which the learning rate falls; training stops before, so that there is something left to learn."""
    batch_size: int = 32
    shift: float = 3.0
    """Shift of the training noise levels."""


def clip_batch(numbers: range, seed: int, stage: str) -> tuple[Tensor, list[str]]:
    """Draws clips by number: float32 `[n, 3, 9, 64, 64]` in [-1, 1], and their prompts."""
    train, held_out = motion_records()
    records = train + held_out
    clips, prompts = [], []
    for number in numbers:
        rng = np.random.default_rng(counter_seed(seed, "clip", stage, number))
        record = records[int(rng.integers(len(records)))]
        clips.append(draw_clip(record, rng))
        prompts.append(str(record["prompt"]))
    stack = torch.from_numpy(np.stack(clips)).permute(0, 4, 1, 2, 3).float()
    return stack / 127.5 - 1.0, prompts


def reconstruction_loss(pipe: WanPipeline, config: WanConfig, step: int) -> Tensor:
    """Absolute error of reconstructed clips, shapes weighted up, plus the weighted KL of their posteriors."""
    first = step * config.vae_batch_size
    clips, _ = clip_batch(range(first, first + config.vae_batch_size), config.seed, "vae")
    decoded, kl = reconstructed(pipe.vae, clips, config.seed, step)
    shown = ((clips - _GROUND).abs().amax(1, keepdim=True) > 0.1).float()  # a tenth of the pixels
    near = nn.functional.max_pool3d(shown, (1, 5, 5), stride=1, padding=(0, 2, 2))  # a corner is rounded on both sides
    error = (decoded - clips).abs() * (1 + config.shape_weight * near)
    return error.mean() + config.kl_weight * kl


@torch.no_grad()
def set_latent_statistics(pipe: WanPipeline, seed: int) -> None:
    """Writes mean and deviation of every latent channel, over some clips, into the autoencoder's configuration."""
    latents = torch.cat([
        pipe.vae.encode(clip_batch(range(first, first + 32), seed, "latent statistics")[0]).latent_dist.mean
        for first in range(0, _MEASURED, 32)
    ])  # fmt: skip
    channels = latents.transpose(0, 1).flatten(1).double()
    pipe.vae.register_to_config(
        latents_mean=[round(float(value), 4) for value in channels.mean(1)],
        latents_std=[round(float(value), 4) for value in channels.std(1)],
    )


def encode_clips(pipe: WanPipeline, config: WanConfig, path: Path) -> tuple[Tensor, list[str]]:
    """Latents `[num_clips, 16, 3, 8, 8]` in float16, scaled as the transformer sees them, and their prompts."""
    mean, std = (torch.tensor(values)[:, None, None, None] for values in
                 (pipe.vae.config.latents_mean, pipe.vae.config.latents_std))  # fmt: skip

    def encode(numbers: range) -> tuple[dict[str, Tensor], list[str]]:
        clips, prompts = clip_batch(numbers, config.seed, "denoiser")
        with in_low_precision():
            encoded = pipe.vae.encode(clips).latent_dist.mean.float()
        return {"latents": (encoded - mean) / std}, prompts

    latents, prompts = encode_once("clips", path, config.num_clips, 32, encode)
    return latents["latents"], prompts


def captions(prompts: list[str], config: WanConfig) -> list[str]:
    """The prompts of the clips, some of which name another direction than the clip shows."""
    written = []
    for number, prompt in enumerate(prompts):
        rng = np.random.default_rng(counter_seed(config.seed, "caption", number))
        *words, direction = prompt.split()
        others = [name for name in DIRECTIONS if name != direction]
        other = others[int(rng.integers(len(others)))]
        written.append(" ".join([*words, other if rng.random() < config.wrong_direction else direction]))
    return written


def velocity_loss(pipe: WanPipeline, clean: Tensor, prompts: list[str], config: WanConfig, step: int) -> Tensor:
    """Mean squared error of the transformer's velocity."""

    def predict(batch: Noised) -> Tensor:
        embeds, _ = pipe.encode_prompt(
            batch.prompts, do_classifier_free_guidance=False, max_sequence_length=CONTEXT, device=torch.device("cpu")
        )
        velocity: Tensor = pipe.transformer(batch.x, 1000 * batch.sigma, embeds, return_dict=False)[0]
        return velocity

    return velocity_error(clean, prompts, config, step, predict)


def main(config: WanConfig) -> Path:
    """Runs all stages and returns the folder of the finished pipeline."""
    out = prepare(config.out, config.threads)
    pipe = build_tiny_wan(WORDS, config.seed)
    train_autoencoder(pipe.vae, lambda step: reconstruction_loss(pipe, config, step), config, out)
    set_latent_statistics(pipe, config.seed)
    latents, prompts = encode_clips(pipe, config, out / "latents.pt")
    prompts = captions(prompts, config)
    seconds = train_denoiser(
        pipe, ("transformer", "text_encoder"), velocity_loss, [latents], prompts, config, out, lr_steps=config.lr_steps
    )
    folder = write_asset(pipe, out / "tiny-wan")
    pipeline = FAMILY.load(
        str(folder), dtype=torch.float32, max_sequence_length=CONTEXT, height=64, width=64, num_frames=FRAMES, fps=FPS
    )
    return describe(
        folder, config, seconds, pipeline=pipeline, prompts="asset:prompts/motion_heldout.jsonl",
        count=HELD_OUT_IMAGES, reward=build_reward("motion_verdict", options={"credit": "strict"}),
        num_steps=NUM_STEPS, guidance_scale=GUIDANCE_SCALE,
    )  # fmt: skip
