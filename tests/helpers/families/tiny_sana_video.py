"""A random SANA-Video pipeline of a few thousand parameters, with the autoencoder of Wan 2.1 or of LTX-2."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import (
    AutoencoderKLLTX2Video,
    AutoencoderKLWan,
    DPMSolverMultistepScheduler,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)
from tiny_sana import PUBLISHED as SANA
from tiny_sana import gemma

PUBLISHED = SANA | {"flow_shift": 8.0}
"""What the published checkpoint's scheduler sets."""
OPTIONS: dict[str, Any] = {"height": 32, "width": 64, "num_frames": 5, "max_sequence_length": 40}
CHANNELS = 4


def save_tiny_sana_video(folder: Path, vae: Literal["wan", "ltx2"] = "wan") -> Path:
    """A complete pipeline folder like the published one of 480p, or of 720p; load it with `OPTIONS`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if vae == "wan":
            autoencoder: Any = AutoencoderKLWan(
                base_dim=4, z_dim=CHANNELS, dim_mult=[1, 1, 2], num_res_blocks=1, temperal_downsample=[True, True],
                in_channels=12, out_channels=12, patch_size=2, latents_mean=[0.1, -0.2, 0.3, 0.0],
                latents_std=[1.5, 0.5, 2.0, 1.0], scale_factor_temporal=4, scale_factor_spatial=8,
            )  # fmt: skip
        else:
            autoencoder = AutoencoderKLLTX2Video(
                latent_channels=CHANNELS, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 16, 32),
                layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 4, decoder_causal=False,
                spatial_compression_ratio=32, temporal_compression_ratio=8,
            )  # fmt: skip
            autoencoder.latents_mean.copy_(torch.linspace(-0.3, 0.3, CHANNELS))
            autoencoder.latents_std.copy_(torch.linspace(0.5, 1.5, CHANNELS))
        pipe = SanaVideoPipeline(
            **gemma(), vae=autoencoder, scheduler=DPMSolverMultistepScheduler(**PUBLISHED),
            transformer=SanaVideoTransformer3DModel(
                in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=2, attention_head_dim=12,
                num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24,
                caption_channels=16, mlp_ratio=2.0, rope_max_seq_len=32,
                **({} if vae == "wan" else {"sample_size": 22, "patch_size": (1, 1, 1)}),
            ),
        )  # fmt: skip
    pipe.save_pretrained(folder)
    return folder
