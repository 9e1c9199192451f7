"""A random LTX-2 pipeline of a few thousand parameters: videos with sound, real in every class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from tiny_sana import gemma_tokenizer
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

LTX2Pipeline: Any = pytest.importorskip(
    "diffusers.pipelines.ltx2.pipeline_ltx2", reason="older transformers lack what it imports", exc_type=ImportError
).LTX2Pipeline

OPTIONS: dict[str, Any] = {"height": 64, "width": 64, "num_frames": 9, "fps": 8.0, "max_sequence_length": 24}
CHANNELS, WIDTH, TEXT, RATE = 8, 16, 16, 8000


def save_tiny_ltx2(folder: Path) -> Path:
    """A complete pipeline folder; load it with `OPTIONS`. Its sound is stereo, of 8000 samples a second."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = gemma_tokenizer()
        text = {
            "vocab_size": len(tokenizer), "hidden_size": TEXT, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 2048,
        }  # fmt: skip
        vision = {
            "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
            "image_size": 16, "patch_size": 8,
        }  # fmt: skip
        text_encoder = Gemma3ForConditionalGeneration(
            Gemma3Config(
                text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=3, boi_token_index=3,
                eoi_token_index=3,
            )
        )  # fmt: skip
        own = {
            f"{kind}_connector_{name}": number for kind in ("video", "audio") for name, number in (
                ("num_attention_heads", 2), ("attention_head_dim", TEXT // 2), ("num_layers", 1),
                ("num_learnable_registers", 8),
            )
        }  # fmt: skip
        connectors = LTX2TextConnectors(caption_channels=TEXT, text_proj_in_factor=3, rope_type="split", **own)
        transformer = LTX2VideoTransformer3DModel(
            in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=2, attention_head_dim=WIDTH // 2,
            cross_attention_dim=WIDTH, audio_in_channels=CHANNELS, audio_out_channels=CHANNELS,
            audio_num_attention_heads=2, audio_attention_head_dim=4, audio_cross_attention_dim=8, num_layers=2,
            caption_channels=TEXT, rope_type="split",
        )  # fmt: skip
        for out in (transformer.proj_out, transformer.audio_proj_out):
            torch.nn.init.normal_(out.weight, std=0.3)
        vae = AutoencoderKLLTX2Video(
            latent_channels=CHANNELS, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 16, 32),
            layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 4, decoder_causal=False,
            spatial_compression_ratio=32, temporal_compression_ratio=8,
        )  # fmt: skip
        audio_vae = AutoencoderKLLTX2Audio(
            base_channels=CHANNELS, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_bins=16
        )
        for part in (vae, audio_vae):
            part.latents_mean.copy_(torch.linspace(-0.3, 0.3, CHANNELS))
            part.latents_std.copy_(torch.linspace(0.5, 1.5, CHANNELS))
        vocoder = LTX2Vocoder(
            in_channels=32, hidden_channels=8, upsample_kernel_sizes=[11, 8, 4], upsample_factors=[5, 4, 4],
            resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], output_sampling_rate=RATE,
        )  # fmt: skip
        scheduler = FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024,
            max_image_seq_len=4096, shift_terminal=0.1,
        )  # fmt: skip
    LTX2Pipeline(
        scheduler=scheduler, vae=vae, audio_vae=audio_vae, text_encoder=text_encoder, tokenizer=tokenizer,
        connectors=connectors, transformer=transformer, vocoder=vocoder,
    ).save_pretrained(folder)  # fmt: skip
    return folder
