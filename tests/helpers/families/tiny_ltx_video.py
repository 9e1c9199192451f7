"""A random LTX-Video pipeline of a few thousand parameters: quick, and real in every class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from transformers import T5Config, T5EncoderModel

from flowrl.pretraining.tiny_sd3 import CONTEXT, t5_settings, t5_tokenizer

OPTIONS: dict[str, Any] = {"height": 64, "width": 32, "num_frames": 9, "fps": 8.0, "max_sequence_length": CONTEXT}
WIDTH, CHANNELS = 32, 8


def save_tiny_ltx_video(folder: Path, *, timestep_conditioning: bool = False) -> Path:
    """A complete pipeline folder like 0.9.0's, or with a decoder that reads a timestep; load it with `OPTIONS`."""
    LTXPipeline(**tiny_ltx_parts(timestep_conditioning=timestep_conditioning)).save_pretrained(folder)
    return folder


def tiny_ltx_parts(*, timestep_conditioning: bool = False) -> dict[str, Any]:
    """The parts of such a folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = t5_tokenizer()
        text_encoder = T5EncoderModel(T5Config(**t5_settings(tokenizer, WIDTH)))
        transformer = LTXVideoTransformer3DModel(
            in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=2, attention_head_dim=WIDTH // 2,
            cross_attention_dim=WIDTH, num_layers=2, caption_channels=WIDTH,
        )  # fmt: skip
        torch.nn.init.normal_(transformer.proj_out.weight, std=0.3)
        decoder: dict[str, Any] = {}
        if timestep_conditioning:
            decoder = {
                "timestep_conditioning": True, "upsample_residual": (True,) * 3, "upsample_factor": (2,) * 3,
                "decoder_block_out_channels": (8, 16, 32), "decoder_layers_per_block": (1,) * 4,
                "decoder_spatio_temporal_scaling": (True,) * 3, "decoder_inject_noise": (False,) * 4,
            }  # fmt: skip
        vae = AutoencoderKLLTXVideo(
            latent_channels=CHANNELS, block_out_channels=(8, 8, 8, 8), layers_per_block=(1,) * 5, **{
                "decoder_block_out_channels": (8, 8, 8, 8), "decoder_layers_per_block": (1,) * 5, **decoder,
            },
        )  # fmt: skip
        vae.latents_mean.copy_(torch.linspace(-0.3, 0.3, CHANNELS))
        vae.latents_std.copy_(torch.linspace(0.5, 1.5, CHANNELS))
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096,
        shift_terminal=0.1,
    )  # fmt: skip
    return {
        "scheduler": scheduler,
        "vae": vae,
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "transformer": transformer,
    }
