"""FLUX.1 Fill, a part of an image drawn new from a prompt: any checkpoint that stock `FluxFillPipeline` loads.

A prompt has two source images: the image, and a mask that is white where it is drawn new and black where it stays.
Both are brought to the size that is drawn in the same way; the mask is made black and white at half grey.

The network is FLUX.1's with more channels per token: beside the noisy latents it reads those of the image, grey where
it is drawn new, and the mask at full resolution, its pixels of a latent folded into channels. Start noise is noise
alone, as in stock at strength 1. The image's latents are the mode of the autoencoder's posterior; stock draws from it.
Guidance is an input of the network, made for scales about 30.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from flowrl.pipelines.families import flux
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Grid, check_channels
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline

_GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601, by which stock's image library turns colours to grey


def mark_drawn(mask: Tensor) -> Tensor:
    """A mask `[3, h, w]` in [0, 1] as `[1, h, w]`: 1 where the image is drawn new, at half grey and above, else 0."""
    grey = (mask * torch.tensor(_GREY, device=mask.device).view(3, 1, 1)).sum(0, keepdim=True)
    return (grey >= 0.5).float()


def _embed_sources(p: FamilyPipeline, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    """Tokens `[1, n, 4c + 4 f^2]` of the image and the mask, f pixels to a latent's side."""
    common.check_mask(sources[0], sources[1], "a source image")
    image, mask = (common.covering(source.float(), *p.image_shape[1:]).to(p.device) for source in sources)
    new = mark_drawn(mask)
    latents = p.encode_images((image * (1 - new) + 0.5 * new)[None])
    folded = nn.functional.pixel_unshuffle(new[None], p.card.factors[0])
    return {"kept": torch.cat([common.pack(latents), common.pack(folded)], dim=2).to(p.dtype)}


FAMILY = replace(
    flux.FAMILY, name="flux_fill", title="FLUX.1 Fill", num_sources=(2, 2),
    grid=lambda config: Grid(channels=(config.out_channels or config.in_channels) // 4, patch=2),
    embed_sources=_embed_sources, refuse=lambda card: check_channels(
        card, "to fill images of its VAE", out_channels=4 * card.vae.get("latent_channels", 16),
        in_channels=8 * card.vae.get("latent_channels", 16) + 4 * card.factors[0] ** 2,
    ),
    arguments=lambda p, x, timestep, cond: (given := flux.arguments(p, x, timestep, cond)) | {
        "hidden_states": torch.cat([given["hidden_states"], cond.tensors["kept"]], dim=2)
    },
    conditioning=lambda p, tokens: {
        **flux.FAMILY.conditioning(p, tokens),
        "kept": common.meta(1, math.prod(p.latent_shape[1:]) // 4, 4 * (p.latent_shape[0] + p.card.factors[0] ** 2)),
    },
)  # fmt: skip
