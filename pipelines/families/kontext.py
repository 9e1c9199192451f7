"""FLUX.1 Kontext, edits of one source image: any checkpoint that stock `FluxKontextPipeline` loads.

The network is FLUX.1's; it reads the source's latents as further tokens, whose positions differ in the first
coordinate. Sources are brought to the size that is drawn.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flowrl.pipelines.families import flux
from flowrl.pipelines.shared import common

LORA_TARGETS = (*flux.LORA_TARGETS, "proj_mlp")
"""FLUX.1's, and the feed-forward input of the single-stream blocks, as Flow-GRPO trains Kontext."""


FAMILY = replace(
    flux.FAMILY,
    name="kontext",
    title="FLUX.1 Kontext",
    lora_targets=LORA_TARGETS,
    num_sources=(1, 1),
    source_size=lambda card, options, drawn: (drawn.height, drawn.width),
    embed_sources=lambda p, sources: {
        "image_latents": p.encode_images(common.covering(sources[0].float(), *p.image_shape[1:])[None]).to(p.dtype)
    },
    positions=lambda p: {"ids": torch.cat([flux.token_ids(p.latent_shape, image) for image in (0, 1)]).to(p.device)},
    conditioning=lambda p, tokens: {
        **flux.FAMILY.conditioning(p, tokens),
        "image_latents": common.meta(1, *p.latent_shape),
    },
    tokens=None,
)
