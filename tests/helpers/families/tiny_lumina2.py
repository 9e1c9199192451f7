"""A random Lumina Image 2.0 pipeline of some ten thousand weights: every class is the real one."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel
from tiny_sana import gemma_tokenizer
from transformers import Gemma2Config, Gemma2Model

CHANNELS, WIDTH = 4, 16


def save_tiny_lumina2(folder: Path) -> Path:
    """A complete pipeline folder for images of 64 x 64, latents [4, 8, 8], with the published scheduler."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = gemma_tokenizer()
        text_encoder = Gemma2Model(
            Gemma2Config(
                vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=2048,
            )
        )  # fmt: skip
        transformer = Lumina2Transformer2DModel(
            sample_size=8, in_channels=CHANNELS, hidden_size=48, num_layers=2, num_refiner_layers=1,
            num_attention_heads=2, num_kv_heads=1, multiple_of=16, axes_dim_rope=(8, 8, 8), axes_lens=(300, 32, 32),
            cap_feat_dim=WIDTH,
        )  # fmt: skip
        vae = AutoencoderKL(
            block_out_channels=(8, 8, 8, 8), down_block_types=("DownEncoderBlock2D",) * 4, latent_channels=CHANNELS,
            up_block_types=("UpDecoderBlock2D",) * 4, norm_num_groups=4, sample_size=64, scaling_factor=0.3611,
            shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
        )  # fmt: skip
    Lumina2Pipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
    ).save_pretrained(folder)  # fmt: skip
    return folder
