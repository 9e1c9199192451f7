"""Stable Diffusion XL: any checkpoint that stock `StableDiffusionXLPipeline` loads.

A `UNet2DConditionModel` that predicts noise or v, in flow coordinates as `flowrl.pipelines.families.sd` says, and two
CLIP encoders. The network is told the size that is drawn as original and as target size, without crop. Guidance is
two-pass classifier-free guidance. Left out: guidance rescale, clip skip, the watermark and the refiner.

The empty prompt is stock's missing negative prompt: all zeros where the checkpoint says so
(`force_zeros_for_empty_prompt`, which the published ones do). Any other text is embedded, also as a negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.pipelines.families import sd
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline


def _embed(p: FamilyPipeline, prompt: str, _: Sequence[Tensor]) -> dict[str, Tensor]:
    embeds, _none, pooled, _none = p.pipe.encode_prompt([prompt], device=p.device, do_classifier_free_guidance=False)
    if not prompt and p.pipe.config.force_zeros_for_empty_prompt:
        embeds, pooled = torch.zeros_like(embeds), torch.zeros_like(pooled)
    return {"embeds": embeds.to(p.dtype), "pooled": pooled.to(p.dtype)}


FAMILY = replace(
    sd.FAMILY, name="sdxl", title="Stable Diffusion XL", encoders=("text_encoder", "text_encoder_2"), embed=_embed,
    arguments=lambda p, x, timestep, cond: sd.arguments(p, x, timestep, cond) | {
        "added_cond_kwargs": {
            "text_embeds": cond.tensors["pooled"], "time_ids": p.positions["time_ids"].expand(len(x), -1),
        }
    },
    conditioning=lambda p, tokens: sd.FAMILY.conditioning(p, tokens) | {
        "pooled": common.meta(
            1, p.card.network.projection_class_embeddings_input_dim - 6 * p.card.network.addition_time_embed_dim
        )
    },
    # Original size, crop, target size; on the device, so that no network call waits
    positions=lambda p: {
        "time_ids": torch.tensor([*p.image_shape[1:], 0, 0, *p.image_shape[1:]], dtype=p.dtype, device=p.device)
    },
    stock_options={"add_watermarker": False, "feature_extractor": None, "image_encoder": None},
)  # fmt: skip
