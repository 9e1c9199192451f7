"""A random HunyuanVideo 1.5 pipeline of a few thousand parameters: quick, and real in every class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.models.transformers import transformer_hunyuan_video15
from tiny_folders import narrow_glyphs
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    T5Config,
    T5EncoderModel,
)

from flowrl.pretraining.tiny_sd3 import _WORDS

OPTIONS: dict[str, Any] = {"height": 32, "width": 48, "num_frames": 5, "fps": 8.0, "max_sequence_length": 16}
WIDTH, GLYPH_WIDTH, CHANNELS = 24, 16, 4
narrow_glyphs(transformer_hunyuan_video15.HunyuanVideo15ByT5TextProjection)
TEMPLATE = "{% for i in range(108) %}system {% endfor %}{{ messages[1]['content'] }} assistant"
"""As many tokens before the prompt as the published template has."""


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of the world's words and those of the template."""
    pieces = ["<pad>", "<unk>", "system", "assistant", *_WORDS]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", padding_side="right", chat_template=TEMPLATE
    )


def save_tiny_hunyuan_video15(folder: Path) -> Path:
    """A complete pipeline folder; load it with `OPTIONS`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = chat_tokenizer()
        text_encoder = Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(
                vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=4,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, pad_token_id=0,
                bos_token_id=None, eos_token_id=None,
                rope_parameters={"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0},
            )
        )  # fmt: skip
        text_encoder_2 = T5EncoderModel(
            T5Config(
                vocab_size=384, d_model=GLYPH_WIDTH, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
                feed_forward_proj="gated-gelu",
            )
        )  # fmt: skip
        transformer = HunyuanVideo15Transformer3DModel(
            in_channels=2 * CHANNELS + 1, out_channels=CHANNELS, num_attention_heads=2, attention_head_dim=12,
            num_layers=2, num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=WIDTH, text_embed_2_dim=GLYPH_WIDTH,
            image_embed_dim=8, rope_axes_dim=(4, 4, 4), target_size=64, task_type="t2v",
        )  # fmt: skip
        for part, factor in ((text_encoder, 10.0), (transformer, 2.0)):  # so that text and attention matter
            for parameter in part.parameters():
                parameter.data.mul_(factor) if parameter.ndim > 1 else None
        vae = AutoencoderKLHunyuanVideo15(
            latent_channels=CHANNELS, block_out_channels=(8, 8, 8, 8, 16), layers_per_block=1
        )
    HunyuanVideo15Pipeline(
        text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer, vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0), text_encoder_2=text_encoder_2,
        tokenizer_2=ByT5Tokenizer(), guider=ClassifierFreeGuidance(guidance_scale=6.0),
    ).save_pretrained(folder)  # fmt: skip
    return folder
