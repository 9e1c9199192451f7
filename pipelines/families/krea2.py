"""Krea 2: any checkpoint that stock `Krea2Pipeline` loads, such as Krea 2 Raw and the distilled Krea 2 Turbo.

Velocity network `Krea2Transformer2DModel`, fed sigma and 2 x 2 packed latents of Qwen-Image's autoencoder. One Qwen3-VL
gives, for every token of a prompt, the states of twelve of its layers, which the network fuses: 60 KiB per token in
bfloat16. Stock pads a prompt in the middle and masks that; positions of text are all 0, so that what is read does not
depend on the order of tokens. Here padding stands behind; columns that are padding in all rows of a call are left out.

The guidance scale counts from 0, as in stock and in Z-Image: `positive + scale * (positive - negative)`, and 0 is no
guidance, one pass. A checkpoint that says `is_distilled` has none; its levels are shifted by exp(1.15) always.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Krea2Transformer2DModel
from torch import Tensor

from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.families.flux import packed_grid, read
from flowrl.pipelines.families.qwen_image import decode, encode, factors, pad_embeddings, padded_meta
from flowrl.pipelines.families.z_image import guided_from_zero
from flowrl.pipelines.shared import common, stock_schedules
from flowrl.pipelines.shared.cards import Size, embedding, refusing
from flowrl.pipelines.shared.common import pack
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.samplers.guidance_rules import linear_cfg
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_gate", "attn.to_out.0", "ff.gate", "ff.up", "ff.down")
"""Attention with its gate and MLP of every block, those that fuse the text among them."""

LONGEST_SHIFT = {"max_image_seq_len": 6400}
"""What stock takes where the scheduler does not say it."""

DISTILLED_MU = 1.15
"""Logarithm of the shift of distilled checkpoints, as in stock."""


_embed = embedding("embeds", "mask")


def _arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    """Text up to the call's longest prompt, and no mask where all are that long."""
    lengths = cond.tensors["length_on_host"].tolist()
    longest, (height, width) = max(lengths), x.shape[-2:]
    mask = None if min(lengths) == longest else cond.tensors["mask"][:, :longest]
    rows, columns = (torch.arange(side // 2, device=x.device) for side in (height, width))
    places = torch.cartesian_prod(rows.new_zeros(1), rows, columns).float()
    return {
        "hidden_states": pack(x),
        "timestep": timestep / 1000,
        "encoder_hidden_states": cond.tensors["embeds"][:, :longest],
        "encoder_attention_mask": mask,
        "position_ids": torch.cat([places.new_zeros(longest, 3), places]),
    }


def _schedule(p: FamilyPipeline, num_steps: int, grid: str, shift: float | None) -> Schedule:
    config = {**LONGEST_SHIFT, **p.pipe.scheduler.config}
    own = stock_schedules.own_mu(config, stock_schedules.squares(p))
    mu = DISTILLED_MU if p.card.index.get("is_distilled") else own
    return stock_schedules.stock_schedule(config, num_steps, grid, mu, shift)


FAMILY = Family(
    name="krea2", title="Krea 2", network=Krea2Transformer2DModel, lora_targets=LORA_TARGETS,
    encoders=("text_encoder",), own_size=lambda card: Size(height=1024, width=1024), grid=packed_grid, factors=factors,
    constants=common.latent_statistics, arguments=_arguments, read=read,
    embed=lambda p, prompt, sources: pad_embeddings(
        (found := _embed(p, prompt, sources))["embeds"][:, found["mask"][0]], p.max_sequence_length
    ),
    conditioning=lambda p, tokens: padded_meta(tokens, p.card.network.num_text_layers, p.card.network.text_hidden_dim),
    guided=lambda p, asked: guided_from_zero(
        p, asked, distilled=bool(p.card.index.get("is_distilled")), apart=True,
        rule=lambda no, yes, w: linear_cfg(no, yes, 1 + w),
    ),
    passes=lambda card, scale: 1 if scale == 0 else 2, schedule=_schedule, decode=decode, encode=encode,
    refuse=refusing((
        lambda card: card.index.get("patch_size", 2) != 2,
        "{card.model} packs patches of {card.index[patch_size]}, and only 2 x 2 is loaded here",
    )),
    attention=Attends(mask="keys"),
)  # fmt: skip
