"""A random Z-Image pipeline of some hundred thousand weights: every class is the real one."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from tiny_qwen_image import WIDTH, qwen_tokenizer, text_config

CHANNELS = 4
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_z_image(folder: Path, *, dynamic: bool = False) -> Path:
    """A complete pipeline folder for images of 16 x 16, latents [4, 8, 8], with a static shift or a dynamic one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = qwen_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        text_encoder = transformers.Qwen3Model(transformers.Qwen3Config(**text_config(tokenizer), head_dim=8))
        transformer = ZImageTransformer2DModel(
            in_channels=CHANNELS, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=WIDTH,
            axes_dims=[4, 6, 6], axes_lens=[256, 32, 32],
        )  # fmt: skip
        for parameter in text_encoder.parameters():
            parameter.data.mul_(10.0) if parameter.ndim > 1 else None
        vae = AutoencoderKL(
            block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=CHANNELS,
            up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, sample_size=16, scaling_factor=0.3611,
            shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
        )  # fmt: skip
    ZImagePipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic),
    ).save_pretrained(folder)  # fmt: skip
    return folder
