"""Makes the embedded video model: `flowrl pretrain wan [key=value ...]`.

Stages, each resumable, on clips of one shape that moves in one of four directions (`flowrl.world.clips`):

1. an `AutoencoderKLWan` learns to reconstruct clips (absolute error, shapes weighted up, and a small KL term), or is
   taken from a model;
2. fixed sets of clips are drawn and encoded once;
3. transformer and text encoder learn the flow-matching velocity, `|| v(x_sigma, sigma, prompt) - (noise - clean) ||^2`
   with `sigma = shift(u)`, `u` uniform (Esser et al., arXiv 2403.03206, section 3), a tenth of the prompts empty; a
   head on the third block's tokens learns what each shows (`label_head.py`);
4. they learn on from clips of which a share moves the opposite way to what its caption says, as captions written by
   machines do; the model then goes the asked way only sometimes, which reinforcement learning can correct.

All combinations of shape, colour and direction are drawn: what is held out from reinforcement learning is known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from torch import Tensor, nn

from flowrl.config.train import resolve_path
from flowrl.pipelines.families.wan import FAMILY
from flowrl.pretraining.label_head import LabelHead, label_map
from flowrl.pretraining.making import describe, learn, prepare, write_asset
from flowrl.pretraining.network_training import (
    Noised,
    OwnAutoencoder,
    in_low_precision,
    reconstruct,
    train_autoencoder,
    velocity_error,
)
from flowrl.pretraining.tiny_families import build_tiny_wan
from flowrl.pretraining.tiny_sd3 import CONTEXT
from flowrl.rewards import build_reward
from flowrl.runtime.randomness import counter_seed
from flowrl.world.clips import FPS, FRAMES, OPPOSITE_WAY, WORDS, clip_shapes, draw_clip, motion_records
from flowrl.world.scenes import BACKGROUND, SIZE

NUM_STEPS, GUIDANCE_SCALE = 10, 3.0
"""Default sampling settings of this model."""

_MEASURED = 256  # clips that latents are measured on
_GROUND = BACKGROUND[0] / 127.5 - 1.0  # of all three channels


@dataclass(frozen=True, kw_only=True, slots=True)
class WanConfig(OwnAutoencoder):
    """Settings of this pre-training."""

    out: str = "runs/pretrain-wan"
    vae_steps: int = 2400
    vae_batch_size: int = 8
    kl_weight: float = 1e-4
    shape_weight: float = 6.0
    """How much more the pixels of a shape and about it count in the autoencoder's error; without it neither colours
    nor corners are learned."""
    num_right: int = 12_288
    steps: int = 4000
    lr: float = 4e-3
    batch_size: int = 32
    num_wrong: int = 4096


def clip_batch(numbers: range, seed: int, stage: str, wrong: float = 0.0) -> tuple[Tensor, Tensor, list[str]]:
    """Draws clips by number, float32 `[n, 3, 9, 64, 64]` in [-1, 1], a share of them `wrong`: they go the opposite way
    to what their prompt says. With labels, uint8 `[n, 3, 8, 8]`, what each patch shows in the last frame of each latent
    one, and prompts, what their captions say."""
    train, held_out = motion_records()
    records = train + held_out
    clips, labels, prompts = [], [], []
    for number in numbers:
        rng = np.random.default_rng(counter_seed(seed, "clip", stage, number))
        record = records[int(rng.integers(len(records)))]
        way = OPPOSITE_WAY[record["direction"]] if rng.random() < wrong else record["direction"]
        shapes = clip_shapes({**record, "direction": way}, rng)
        clips.append(draw_clip(shapes))
        labels.append(np.stack([label_map([shape]) for shape in shapes[::4]]))
        prompts.append(str(record["prompt"]))
    stack = torch.from_numpy(np.stack(clips)).permute(0, 4, 1, 2, 3).float()
    return stack / 127.5 - 1.0, torch.from_numpy(np.stack(labels)), prompts


def reconstruction_loss(pipe: WanPipeline, config: WanConfig, step: int) -> Tensor:
    """Absolute error of reconstructed clips, shapes weighted up, plus the weighted KL of their posteriors."""
    first = step * config.vae_batch_size
    clips = clip_batch(range(first, first + config.vae_batch_size), config.seed, "vae")[0]
    decoded, kl = reconstruct(pipe.vae, clips, config.seed, step)
    shown = ((clips - _GROUND).abs().amax(1, keepdim=True) > 0.1).float()  # a tenth of the pixels
    near = nn.functional.max_pool3d(shown, (1, 5, 5), stride=1, padding=(0, 2, 2))  # a corner is rounded on both sides
    error = (decoded - clips).abs() * (1 + config.shape_weight * near)
    return error.mean() + config.kl_weight * kl


@torch.no_grad()
def set_latent_statistics(pipe: WanPipeline, seed: int) -> None:
    """Writes mean and deviation of every latent channel, over some clips, into the autoencoder's configuration."""
    latents = torch.cat(
        [
            pipe.vae.encode(clip_batch(range(first, first + 32), seed, "latent statistics")[0]).latent_dist.mean
            for first in range(0, _MEASURED, 32)
        ]
    )
    channels = latents.transpose(0, 1).flatten(1).double()
    pipe.vae.register_to_config(
        latents_mean=[round(float(value), 4) for value in channels.mean(1)],
        latents_std=[round(float(value), 4) for value in channels.std(1)],
    )


def encoded_clips(
    vae: Any, config: WanConfig, course: str, numbers: range, wrong: float
) -> tuple[dict[str, Tensor], list[str]]:
    """For `making.learn`: latents [16, 3, 8, 8] in float16, as the transformer sees them, labels of the last frame of
    each latent one, and prompts, of which a share names the opposite of the clip's way."""
    mean, std = (
        torch.tensor(values)[:, None, None, None] for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    clips, labels, prompts = clip_batch(numbers, config.seed, course, wrong)
    with in_low_precision():
        encoded = vae.encode(clips).latent_dist.mean.float()
    return {"latents": ((encoded - mean) / std).half(), "labels": labels}, prompts


def velocity_loss(pipe: WanPipeline, clean: Tensor, prompts: list[str], config: WanConfig, step: int) -> Tensor:
    """Mean squared error of the transformer's velocity."""

    def predict(batch: Noised) -> Tensor:
        embeds, _ = pipe.encode_prompt(
            batch.prompts, do_classifier_free_guidance=False, max_sequence_length=CONTEXT, device=torch.device("cpu")
        )
        return pipe.transformer(batch.x, 1000 * batch.sigma, embeds, return_dict=False)[0]

    return velocity_error(clean, prompts, config, step, predict)


def main(config: WanConfig) -> Path:
    """Runs all stages and returns the folder of the finished pipeline."""
    out = prepare(config.out)
    pipe = build_tiny_wan(WORDS, config.seed)
    if config.vae:
        pipe.vae = AutoencoderKLWan.from_pretrained(resolve_path(config.vae) / "vae").requires_grad_(False)
    else:
        train_autoencoder(pipe.vae, lambda step: reconstruction_loss(pipe, config, step), config, out)
        set_latent_statistics(pipe, config.seed)
    width = pipe.transformer.config.num_attention_heads * pipe.transformer.config.attention_head_dim
    head = LabelHead(pipe.transformer.blocks[2], width, lambda tokens: tokens, side=2)
    parts = ("transformer", "text_encoder")
    seconds = learn(pipe, parts, velocity_loss, head, "clips", encoded_clips, config, out, at_once=32)
    load = partial(
        FAMILY.load, dtype=torch.float32, max_sequence_length=CONTEXT, height=SIZE, width=SIZE, num_frames=FRAMES,
        fps=FPS,
    )  # fmt: skip
    return describe(
        out, write_asset(pipe, out / "tiny-wan"), config, seconds, load=load,
        prompts="asset:prompts/motion_heldout.jsonl", num_steps=NUM_STEPS, guidance_scale=GUIDANCE_SCALE,
        reward=build_reward("motion_verdict", options={"credit": "strict"}), wrongs={"motion": "the opposite way"},
    )  # fmt: skip
