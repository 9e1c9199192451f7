"""FLUX.1 Kontext, edits of one source image: any checkpoint that stock `FluxKontextPipeline` loads.

The network is FLUX.1's; it reads the source's latents as further tokens, whose positions differ in the first
coordinate. Sources are brought to the size that is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.pipelines.families import flux
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline

LORA_TARGETS = (*flux.LORA_TARGETS, "proj_mlp")
"""FLUX.1's, and the feed-forward input of the single-stream blocks, as Flow-GRPO trains Kontext."""


def _embed_sources(p: FamilyPipeline, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    (source,) = sources
    latents = p.encode_images(common.covering(source.float(), *p.image_shape[1:])[None])
    return {"image_latents": latents.to(p.dtype)}


FAMILY = replace(
    flux.FAMILY, name="kontext", title="FLUX.1 Kontext", lora_targets=LORA_TARGETS, num_sources=(1, 1),
    source_size=lambda card, options, drawn: (drawn.height, drawn.width), embed_sources=_embed_sources,
    positions=lambda p: {"ids": torch.cat([flux.token_ids(p.latent_shape, image) for image in (0, 1)]).to(p.device)},
    conditioning=lambda p, tokens: {
        **flux.FAMILY.conditioning(p, tokens), "image_latents": common.meta(1, *p.latent_shape)
    },
    tokens=None,
)  # fmt: skip
