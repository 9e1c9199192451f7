"""A random Krea 2 pipeline of a few ten thousand weights: every class is the real one."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from tiny_qwen_image import CHANNELS, WIDTH, qwen_tokenizer
from tiny_qwen_image_21 import tiny_qwen3_vl


def save_tiny_krea2(folder: Path, *, distilled: bool = False) -> Path:
    """A complete pipeline folder for images of 16 x 16, latents [4, 8, 8]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = qwen_tokenizer()
        text_encoder = transformers.Qwen3VLModel(tiny_qwen3_vl(tokenizer))
        transformer = Krea2Transformer2DModel(
            in_channels=4 * CHANNELS, num_layers=2, attention_head_dim=8, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=32, timestep_embed_dim=16, text_hidden_dim=WIDTH, num_text_layers=2,
            text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=16,
            num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(2, 4, 2),
        )  # fmt: skip
        for name, parameter in transformer.named_parameters():
            if "scale_shift_table" in name:  # zeros, as of an untrained network, would hide what it scales
                parameter.data.normal_(std=0.5)
            elif parameter.ndim > 1:
                parameter.data.mul_(2.0)
        for parameter in text_encoder.parameters():
            parameter.data.mul_(10.0) if parameter.ndim > 1 else None
        vae = AutoencoderKLQwenImage(
            base_dim=8, z_dim=CHANNELS, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
            latents_mean=[0.1, -0.2, 0.3, -0.4], latents_std=[0.5, 1.5, 2.0, 0.8],
        )  # fmt: skip
    Krea2Pipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=6400, base_shift=0.5, max_shift=1.15
        ),
        text_encoder_select_layers=(1, 2), is_distilled=distilled,
    ).save_pretrained(folder)  # fmt: skip
    return folder
