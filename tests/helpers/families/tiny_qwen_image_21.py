"""A random Qwen-Image-2.1 pipeline of a few ten thousand weights: every class is the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from tiny_qwen_image import WIDTH, qwen_tokenizer, text_config

CHANNELS, SIZE = 4, 64
TURBO = (1.0, 0.9, 0.7, 0.4)
"""Noise levels of a distilled checkpoint."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{{ c.text }}{% endfor %}<|im_end|>\n"
    "{% endfor %}"
)


def tiny_qwen3_vl(tokenizer: Any, layers: int = 2) -> Any:
    """A Qwen3-VL of so many layers."""
    token, text = tokenizer.convert_tokens_to_ids, text_config(tokenizer)
    return transformers.Qwen3VLConfig(
        text_config={
            **text, "num_hidden_layers": layers, "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH,
            "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
        },
        image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
    )  # fmt: skip


def save_tiny_qwen_image_21(folder: Path, *, turbo: bool = False) -> Path:
    """A complete pipeline folder for images of 64 x 64, latents [4, 4, 4], or one that is distilled to four levels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = qwen_tokenizer()
        text_encoder = transformers.Qwen3VLForConditionalGeneration(tiny_qwen3_vl(tokenizer))
        transformer = QwenImage21Transformer2DModel(
            in_channels=CHANNELS, out_channels=CHANNELS, num_layers=2, attention_head_dim=8, num_attention_heads=2,
            context_in_dim=WIDTH, axes_dims_rope=(2, 4, 2),
        )  # fmt: skip
        for part, factor in ((text_encoder, 10.0), (transformer, 2.0)):
            for parameter in part.parameters():
                parameter.data.mul_(factor) if parameter.ndim > 1 else None
        vae = AutoencoderKLQwenImage21(
            base_dim=4, decoder_base_dim=4, z_dim=CHANNELS, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1,
            latents_mean=[0.1, -0.2, 0.3, -0.4], latents_std=[0.5, 1.5, 2.0, 0.8],
        )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=not turbo, base_image_seq_len=256, max_image_seq_len=8192, base_shift=0.5, max_shift=0.9,
        shift=1.0, shift_terminal=None if turbo else 0.02,
    )  # fmt: skip
    processor = transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(), tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(), chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
    QwenImage21Pipeline(
        scheduler=scheduler, vae=vae, text_encoder=text_encoder, processor=processor, transformer=transformer,
        sample_sigmas=list(TURBO) if turbo else None,
    ).save_pretrained(folder)  # fmt: skip
    return folder
