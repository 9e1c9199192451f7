"""A random Motif-Video pipeline of a few thousand parameters: quick, and real in every class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AdaptiveProjectedGuidance,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    MotifVideoPipeline,
    MotifVideoTransformer3DModel,
)
from transformers import T5Gemma2Encoder, T5Gemma2EncoderConfig, T5Gemma2TextConfig

from flowrl.pretraining.tiny_sd3 import CONTEXT, t5_tokenizer

OPTIONS: dict[str, Any] = {
    "height": 32, "width": 48, "num_frames": 5, "fps": 8.0, "max_sequence_length": CONTEXT, "device": "cpu",
}  # fmt: skip
CHANNELS, WIDTH = 4, 24


def save_tiny_motif_video(folder: Path) -> Path:
    """A complete pipeline folder; the last of its three single blocks is a decoder's. Load it with `OPTIONS`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = t5_tokenizer()
        text = T5Gemma2TextConfig(
            vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, head_dim=12, max_position_embeddings=128, dropout_rate=0.0,
        )  # fmt: skip
        seen = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
        text_encoder = T5Gemma2Encoder(
            T5Gemma2EncoderConfig(
                text_config=text, vision_config={**seen, "hidden_size": 16, "patch_size": 8}, mm_tokens_per_image=4
            )
        )
        transformer = MotifVideoTransformer3DModel(
            in_channels=2 * CHANNELS + 1, out_channels=CHANNELS, num_attention_heads=2, attention_head_dim=12,
            num_layers=1, num_single_layers=3, num_decoder_layers=1, mlp_ratio=2.0, text_embed_dim=WIDTH,
            image_embed_dim=16, rope_axes_dim=(4, 4, 4), enable_text_cross_attention_single=True,
        )  # fmt: skip
        for part in (
            transformer.context_embedder,
            *transformer.transformer_blocks,
            *transformer.single_transformer_blocks,
        ):
            for layer in part.modules():  # so that what a prompt says is seen in a clip
                if isinstance(layer, torch.nn.Linear):
                    torch.nn.init.normal_(layer.weight, std=0.3)
        torch.nn.init.normal_(transformer.proj_out.weight, std=0.5)
        torch.nn.init.normal_(transformer.norm_out.linear.weight, std=0.3)
        vae = AutoencoderKLWan(
            base_dim=4, z_dim=CHANNELS, num_res_blocks=1, latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.5, 2.0, 1.0], dim_mult=[1, 1, 1, 2], temperal_downsample=[False, True, True],
        )  # fmt: skip
    MotifVideoPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, vae=vae, feature_extractor=None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=2.5), guider=AdaptiveProjectedGuidance(),
    ).save_pretrained(folder)  # fmt: skip
    return folder
