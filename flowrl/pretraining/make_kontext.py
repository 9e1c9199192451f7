"""Makes the embedded editing model: `flowrl pretrain kontext [key=value ...]`.

The autoencoder is the embedded SD3 model's. Transformer and text encoders learn the velocity towards the edited image
with the source image's latents as further tokens, `|| v(x_sigma, sigma, instruction, source) - (noise - edited) ||^2`
(FLUX.1 Kontext, arXiv 2506.15742, eq. 1). The guidance that the network is told is drawn from [1, 4] and means nothing.

First it learns from edits that are all right, and a head on the tokens of the second double block learns what each
shows (`label_head.py`). Then a share of the edits failed (`flowrl.world.edits.failed_scene`), as in pairs that machines
collect and filter; a model that learned from them edits only sometimes, which reinforcement learning can correct.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxKontextPipeline
from torch import Tensor

from flowrl.pipelines.families.flux import token_ids
from flowrl.pipelines.families.kontext import FAMILY
from flowrl.pipelines.shared.common import pack, unpack
from flowrl.pretraining.label_head import LabelHead, label_map
from flowrl.pretraining.making import autoencoder_of, describe, learn, prepare, scaled_latents, write_asset
from flowrl.pretraining.network_training import Noised, WrongCaptions, velocity_error
from flowrl.pretraining.tiny_families import build_tiny_kontext
from flowrl.pretraining.tiny_sd3 import CONTEXT
from flowrl.rewards import build_reward
from flowrl.runtime.randomness import counter_seed
from flowrl.world.edits import FAILED, WORDS, edited_scene, failed_scene, random_edit, source_scene
from flowrl.world.scene_prompts import Record
from flowrl.world.scenes import SIZE, Shape, draw_scene

NUM_STEPS, GUIDANCE_SCALE = 8, 2.5
"""Default sampling settings of this model."""

_TOKENS = 16  # of the edited image; the source's follow


@dataclass(frozen=True, kw_only=True, slots=True)
class KontextConfig(WrongCaptions):
    """Settings of this pre-training."""

    out: str = "runs/pretrain-kontext"
    num_right: int = 16_384
    steps: int = 4000
    lr: float = 4e-3
    num_wrong: int = 6144
    shift: float = 1.6
    """Shift of the training noise levels; sampling uses exp(mu) of 16 tokens, 1.56."""
    prompt_dropout: float = 0.05


def edit_row(config: KontextConfig, stage: str, number: int, wrong: float) -> tuple[Record, tuple[Shape, ...]]:
    """A random edit by its number, and what is shown after it: with probability `wrong` one that failed."""
    rng = np.random.default_rng(counter_seed(config.seed, "edit", stage, number))
    record = random_edit(rng)
    return record, failed_scene(record, rng) if rng.random() < wrong else edited_scene(record)


def encoded_edits(
    vae: Any, config: KontextConfig, course: str, numbers: range, wrong: float
) -> tuple[dict[str, Tensor], list[str]]:
    """For `making.learn`: float16 latents [8, 8, 8] of edits and sources, the edits' labels, and instructions."""
    rows = [edit_row(config, course, number, wrong) for number in numbers]
    pairs = np.stack([[draw_scene(shown), draw_scene(source_scene(record))] for record, shown in rows], axis=1)
    images = torch.from_numpy(pairs).permute(0, 1, 4, 2, 3).flatten(0, 1).float() / 127.5 - 1.0
    after, before = scaled_latents(vae, images).half().chunk(2)
    labels = torch.from_numpy(np.stack([label_map(shown) for _, shown in rows]))
    return {"edited": after, "sources": before, "labels": labels}, [str(record["prompt"]) for record, _ in rows]


def velocity_loss(
    pipe: FluxKontextPipeline, clean: Tensor, source: Tensor, prompts: list[str], config: KontextConfig, step: int
) -> Tensor:
    """Mean squared error of the velocity towards the edited images, given the sources'."""

    def predict(batch: Noised) -> Tensor:
        guidance = 1 + 3 * torch.rand(len(clean), generator=batch.generator)
        tokens, shape = pack(batch.x), clean.shape[1:]
        embeds, pooled, text_ids = pipe.encode_prompt(batch.prompts, batch.prompts, max_sequence_length=CONTEXT)
        velocity = pipe.transformer(
            hidden_states=torch.cat([tokens, pack(source)], dim=1),
            timestep=batch.sigma,
            guidance=guidance,
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=text_ids,
            img_ids=torch.cat([token_ids(shape), token_ids(shape, 1)]),
            return_dict=False,
        )[0][:, : tokens.shape[1]]
        return unpack(velocity, shape)

    return velocity_error(clean, prompts, config, step, predict)


def main(config: KontextConfig) -> Path:
    """Runs the training and returns the folder of the finished pipeline."""
    out = prepare(config.out)
    pipe = build_tiny_kontext(autoencoder_of("asset:tiny-sd3"), WORDS, config.seed)
    transformer = pipe.transformer
    head = LabelHead(
        transformer.transformer_blocks[1], transformer.inner_dim, lambda blocks: blocks[1][:, :_TOKENS], side=2
    )
    parts = ("transformer", "text_encoder", "text_encoder_2")
    seconds = learn(pipe, parts, velocity_loss, head, "edits", encoded_edits, config, out)
    load = partial(FAMILY.load, dtype=torch.float32, max_sequence_length=CONTEXT, height=SIZE, width=SIZE)
    return describe(
        out, write_asset(pipe, out / "tiny-kontext"), config, seconds, load=load,
        prompts="asset:prompts/edits_heldout.jsonl", num_steps=NUM_STEPS, guidance_scale=GUIDANCE_SCALE,
        reward=build_reward("edit_verdict", options={"credit": "strict"}), wrongs=FAILED,
    )  # fmt: skip
