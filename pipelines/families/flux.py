"""FLUX.1: any checkpoint that stock `FluxPipeline` loads, such as FLUX.1-dev and FLUX.1-schnell.

Velocity network `FluxTransformer2DModel`, fed sigma and tokens of 2 x 2 latent pixels; a CLIP and a T5 encoder. Grids
are the stock pipeline's `linspace(1, 1/T, T)`, shifted by resolution (dev) or statically (schnell). Guidance is an
input of the network (dev), or there is none (schnell).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from flowrl.pipelines.shared import common, stock_schedules
from flowrl.pipelines.shared.cards import Card, Grid, embedding, given, refusing, square
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.weights.lora import JOINT_ATTENTION
from flowrl.trajectory import Conditioning

LORA_TARGETS = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
"""Attention of all blocks and the feed-forward layers of the double-stream ones, as Flow-GRPO trains FLUX."""

LENGTH, LENGTH_SCHNELL = 512, 256
"""T5 tokens that models with guidance as an input (dev), and those without (schnell), were released for."""


def packed_grid(config: Any) -> Grid:
    """Latents whose tokens are 2 x 2 pixels, folded into the network's channels."""
    return Grid(channels=config.in_channels // 4, patch=2)


def token_ids(shape: Sequence[int], image: int = 0) -> Tensor:
    """Position of every token `[n, 3]`: (image, row, column); image 0 is the drawn one."""
    rows, columns = shape[1] // 2, shape[2] // 2
    return torch.cartesian_prod(torch.tensor([image]), torch.arange(rows), torch.arange(columns)).float()


def arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    """Arguments of a `FluxTransformer2DModel`; a source image's tokens follow the drawn one's."""
    embeds, ids, source = cond.tensors["embeds"], p.positions["ids"], cond.tensors.get("image_latents")
    tokens = common.pack(x)
    return {
        "hidden_states": tokens if source is None else torch.cat([tokens, common.pack(source)], dim=1),
        "timestep": timestep / 1000,
        "guidance": cond.tensors.get("guidance"),
        "pooled_projections": cond.tensors["pooled"],
        "encoder_hidden_states": embeds,
        "txt_ids": ids.new_zeros(embeds.shape[1], 3),
        "img_ids": ids,
    }


def read(p: FamilyPipeline, output: Tensor, x: Tensor) -> Tensor:
    """The drawn image's tokens as latents."""
    return common.unpack(output[:, : x.shape[-2] * x.shape[-1] // 4], x.shape[1:])


refuse = refusing(
    (
        lambda card: (wanted := 4 * card.vae.get("latent_channels", 16)) != card.network.in_channels and wanted,
        "the network of {card.model} takes {card.network.in_channels} channels per token, and latents of its VAE have "
        "{wanted}: it is a fill or control model; pipeline.name=flux_fill loads FLUX.1 Fill, and no pipeline.name the "
        "others",
    )
)
"""Refuses networks that take more than latents."""


def _tokens(card: Card, options: Any) -> int:
    """T5 tokens of a prompt: the configured number, or the model's own, 512 with guidance and 256 without."""
    embeds, asked = card.network.guidance_embeds, options.max_sequence_length
    own = LENGTH if embeds else LENGTH_SCHNELL
    if asked is not None and not embeds and asked > own:
        raise ValueError(
            f"pipeline.max_sequence_length ({asked}) must be at most {own} for {card.model}, a distilled model without "
            "guidance: null takes that"
        )
    return own if asked is None else int(asked)


FAMILY = Family(
    name="flux", title="FLUX.1", network=FluxTransformer2DModel, lora_targets=LORA_TARGETS,
    encoders=("text_encoder", "text_encoder_2"), own_size=square(128), grid=packed_grid,
    embed=embedding("embeds", "pooled"), arguments=arguments, read=read,
    conditioning=given("joint_attention_dim", pooled="pooled_projection_dim"), schedule=stock_schedules.by_image_size,
    guided=common.guide_by_input, passes=lambda card, scale: 1, refuse=refuse, tokens=_tokens,
    positions=lambda p: {"ids": token_ids(p.latent_shape).to(p.device)},
)  # fmt: skip
