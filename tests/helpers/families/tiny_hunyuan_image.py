"""A random HunyuanImage pipeline of some ten thousand weights, or its distilled form: every class is the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AdaptiveProjectedMixGuidance,
    AutoencoderKLHunyuanImage,
    FlowMatchEulerDiscreteScheduler,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
)
from tiny_qwen_image import WIDTH, qwen_tokenizer, vision_language_model
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

OPTIONS: dict[str, Any] = {"height": 32, "width": 48, "max_sequence_length": 32}
CHANNELS, GLYPH_WIDTH, FIRST, FIRST_OF_LETTERS = 4, 16, 1, 2


def save_tiny_hunyuan_image(folder: Path, distilled: bool = False) -> Path:
    """A complete pipeline folder; load it with `OPTIONS`. Guided by projections after step `FIRST`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = qwen_tokenizer()
        text_encoder_2 = T5EncoderModel(
            T5Config(
                vocab_size=384,
                d_model=GLYPH_WIDTH,
                d_kv=8,
                d_ff=16,
                num_layers=1,
                num_heads=2,
                feed_forward_proj="gated-gelu",
            )
        )
        transformer = HunyuanImageTransformer2DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=WIDTH,
            text_embed_2_dim=GLYPH_WIDTH,
            rope_axes_dim=(4, 4),
            guidance_embeds=distilled,
            use_meanflow=distilled,
        )
        for parameter in transformer.parameters():  # so that text and attention matter
            parameter.data.mul_(2.0) if parameter.ndim > 1 else None
        vae = AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=CHANNELS,
            block_out_channels=(32, 32, 32, 32),
            layers_per_block=1,
            scaling_factor=0.75289,
            spatial_compression_ratio=8,
            sample_size=128,
        )
        guiders = [
            None
            if distilled
            else AdaptiveProjectedMixGuidance(
                adaptive_projected_guidance_start_step=step, adaptive_projected_guidance_scale=4.0
            )
            for step in (FIRST, FIRST_OF_LETTERS)
        ]
        HunyuanImagePipeline(
            text_encoder=vision_language_model(tokenizer),
            tokenizer=tokenizer,
            transformer=transformer,
            vae=vae,
            text_encoder_2=text_encoder_2,
            tokenizer_2=ByT5Tokenizer(),
            guider=guiders[0],
            ocr_guider=guiders[1],
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        ).save_pretrained(folder)
    return folder
