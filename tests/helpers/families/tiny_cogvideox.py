"""A random CogVideoX pipeline of a few thousand parameters: quick, and real in every class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel
from transformers import T5Config, T5EncoderModel

from flowrl.pretraining.tiny_sd3 import CONTEXT, t5_settings, t5_tokenizer

OPTIONS: dict[str, Any] = {"height": 16, "width": 32, "num_frames": 9, "max_sequence_length": CONTEXT}
WIDTH = 32


def save_tiny_cogvideox(folder: Path, *, rotary: bool = True) -> Path:
    """A complete pipeline folder like that of 5b, or without rotary positions like 2b; load it with `OPTIONS`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = t5_tokenizer()
        text_encoder = T5EncoderModel(T5Config(**t5_settings(tokenizer, WIDTH)))
        transformer = CogVideoXTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
            text_embed_dim=WIDTH, num_layers=2, sample_width=4, sample_height=2, sample_frames=9,
            max_text_seq_length=CONTEXT, use_rotary_positional_embeddings=rotary,
        )  # fmt: skip
        torch.nn.init.normal_(transformer.proj_out.weight, std=0.3)
        vae = AutoencoderKLCogVideoX(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2,
            scaling_factor=0.7, down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
        )  # fmt: skip
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_shift_scale=1.0 if rotary else 3.0,
        timestep_spacing="trailing", clip_sample=False,
    )  # fmt: skip
    CogVideoXPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer, scheduler=scheduler
    ).save_pretrained(folder)
    return folder
