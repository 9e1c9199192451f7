"""Makes the embedded editing model: `flowrl pretrain kontext [key=value ...]`.

The autoencoder is the embedded SD3 model's. Transformer and text encoders learn the velocity towards the edited image
with the source image's latents as further tokens, `|| v(x_sigma, sigma, instruction, source) - (noise - edited) ||^2`
(FLUX.1 Kontext, arXiv 2506.15742, eq. 1). The guidance that the network is told is drawn from [1, 4] and means nothing.

In three pairs of ten the edit was left undone. Pairs that are collected and filtered by machines have such failures; a
model that learned from them edits only most of the time, which reinforcement learning can correct.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxKontextPipeline
from torch import Tensor

from flowrl.pipelines.common import pack, unpack
from flowrl.pipelines.families.flux import token_ids
from flowrl.pipelines.families.kontext import FAMILY
from flowrl.pretrain.making import describe, embedded_autoencoder, encode_once, prepare, scaled_latents, write_asset
from flowrl.pretrain.network_training import Making, Noised, train_denoiser, velocity_error
from flowrl.pretrain.tiny_families import build_tiny_kontext
from flowrl.pretrain.tiny_sd3 import CONTEXT
from flowrl.randomness import counter_seed
from flowrl.rewards import build_reward
from flowrl.world.edits import WORDS, draw_edit, random_edit

NUM_STEPS, GUIDANCE_SCALE = 8, 2.5
"""Default sampling settings of this model."""

HELD_OUT_IMAGES = 128
"""Edits that its score is measured on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KontextConfig(Making):
    """Settings of this pre-training."""

    out: str = "runs/pretrain-kontext"
    num_edits: int = 12_288
    """Pairs of images encoded once."""
    undone: float = 0.3
    """Share of the pairs whose edit was left undone, as pairs collected at scale have them: something to unlearn."""
    steps: int = 3000
    shift: float = 1.6
    """Shift of the training noise levels; sampling uses exp(mu) of 16 tokens, 1.56."""
    prompt_dropout: float = 0.05


def encode_edits(pipe: FluxKontextPipeline, config: KontextConfig, path: Path) -> tuple[Tensor, Tensor, list[str]]:
    """Latents `[num_edits, 8, 8, 8]` in float16 of sources and of edited images, and the instructions."""

    def encode(numbers: range) -> tuple[dict[str, Tensor], list[str]]:
        records = [random_edit(np.random.default_rng(counter_seed(config.seed, "edit", n))) for n in numbers]
        pairs = np.stack([np.stack(draw_edit(record)) for record in records])
        images = torch.from_numpy(pairs).permute(1, 0, 4, 2, 3).flatten(0, 1).float() / 127.5 - 1.0
        before, after = scaled_latents(pipe.vae, images).chunk(2)
        left = [np.random.default_rng(counter_seed(config.seed, "undone", n)).random() < config.undone for n in numbers]
        edited = torch.where(torch.tensor(left)[:, None, None, None], before, after)
        return {"sources": before, "edited": edited}, [str(record["prompt"]) for record in records]

    latents, prompts = encode_once("edits", path, config.num_edits, 128, encode)
    return latents["sources"], latents["edited"], prompts


def velocity_loss(
    pipe: FluxKontextPipeline, clean: Tensor, source: Tensor, prompts: list[str], config: KontextConfig, step: int
) -> Tensor:
    """Mean squared error of the velocity towards the edited images, given the sources'."""

    def predict(batch: Noised) -> Tensor:
        guidance = 1 + 3 * torch.rand(len(clean), generator=batch.generator)
        tokens, shape = pack(batch.x), clean.shape[1:]
        embeds, pooled, text_ids = pipe.encode_prompt(batch.prompts, batch.prompts, max_sequence_length=CONTEXT)
        velocity = pipe.transformer(
            hidden_states=torch.cat([tokens, pack(source)], dim=1), timestep=batch.sigma, guidance=guidance,
            pooled_projections=pooled, encoder_hidden_states=embeds, txt_ids=text_ids,
            img_ids=torch.cat([token_ids(shape), token_ids(shape, 1)]), return_dict=False,
        )[0][:, : tokens.shape[1]]  # fmt: skip
        return unpack(velocity, shape)

    return velocity_error(clean, prompts, config, step, predict)


def main(config: KontextConfig) -> Path:
    """Runs the training and returns the folder of the finished pipeline."""
    out = prepare(config.out, config.threads)
    pipe = build_tiny_kontext(embedded_autoencoder(), WORDS, config.seed)
    sources, edited, prompts = encode_edits(pipe, config, out / "latents.pt")
    parts = ("transformer", "text_encoder", "text_encoder_2")
    seconds = train_denoiser(pipe, parts, velocity_loss, [edited, sources], prompts, config, out)
    folder = write_asset(pipe, out / "tiny-kontext")
    return describe(
        folder, config, seconds,
        pipeline=FAMILY.load(str(folder), dtype=torch.float32, max_sequence_length=CONTEXT, height=64, width=64),
        prompts="asset:prompts/edits_heldout.jsonl", count=HELD_OUT_IMAGES,
        reward=build_reward("edit_verdict", options={"credit": "strict"}), num_steps=NUM_STEPS,
        guidance_scale=GUIDANCE_SCALE,
    )  # fmt: skip
