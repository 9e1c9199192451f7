"""Random Qwen-Image and HunyuanImage pipelines of a few ten thousand weights: every class is the real one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import (
    AdaptiveProjectedMixGuidance,
    AutoencoderKLHunyuanImage,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.transformers import transformer_hunyuanimage
from tiny_folders import narrow_glyphs
from tokenizers import pre_tokenizers

WIDTH, CHANNELS, SIZE = 16, 4, 16
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
INSTRUCTIONS = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of "
    "the objects and background:user\nassistant\n Describe the key features of the input image (color, shape, size, "
    "texture, objects, background), then explain how the user's text instruction should alter or modify the image. "
    "Generate a new image that meets the user's requirements while maintaining consistency with the original input "
    "where appropriate."
)
"""The words of the stock prompt templates: one token each, as in the published tokenizer."""


def qwen_tokenizer() -> Any:
    """Bytes, the tokens of the chat format, and the templates' words, so that their prefixes have published lengths."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = transformers.Qwen2Tokenizer(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    words = re.findall(r"'s| ?[A-Za-z]+| ?[^\s\w]+|\n", INSTRUCTIONS)
    tokenizer.add_tokens([word for word in dict.fromkeys(words) if len(word) > 1])
    return tokenizer


def text_config(tokenizer: Any) -> dict[str, Any]:
    """A language model of two layers."""
    return {
        "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096, "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }  # fmt: skip


def vision_language_model(tokenizer: Any) -> Any:
    """A Qwen2.5-VL."""
    token = tokenizer.convert_tokens_to_ids
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config={
                **text_config(tokenizer),
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
            },
            vision_config={
                "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH,
                "fullatt_block_indexes": [0],
            },
            image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
            vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
        )
    )  # fmt: skip


def _parts(*, zero_cond_t: bool = False) -> dict[str, Any]:
    """What all three pipelines share; attention and text are made strong enough to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = qwen_tokenizer()
        text_encoder = vision_language_model(tokenizer)
        transformer = QwenImageTransformer2DModel(
            in_channels=4 * CHANNELS, out_channels=CHANNELS, num_layers=2, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=WIDTH, axes_dims_rope=(2, 4, 2), zero_cond_t=zero_cond_t,
        )  # fmt: skip
        for part, factor in ((text_encoder, 10.0), (transformer, 2.0)):
            for parameter in part.parameters():
                parameter.data.mul_(factor) if parameter.ndim > 1 else None
        vae = AutoencoderKLQwenImage(
            base_dim=8, z_dim=CHANNELS, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
            latents_mean=[0.1, -0.2, 0.3, -0.4], latents_std=[0.5, 1.5, 2.0, 0.8],
        )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=8192, base_shift=0.5, max_shift=0.9,
        shift=1.0, shift_terminal=0.02,
    )  # fmt: skip
    return {
        "tokenizer": tokenizer, "text_encoder": text_encoder, "transformer": transformer, "vae": vae,
        "scheduler": scheduler,
    }  # fmt: skip


def save_tiny_qwen_image(folder: Path) -> Path:
    """A complete pipeline folder for images of 16 x 16, latents [4, 8, 8], and Qwen-Image's scheduler."""
    QwenImagePipeline(**_parts()).save_pretrained(folder)
    return folder


def save_tiny_qwen_image_edit(folder: Path, *, several: bool = False, zero_cond_t: bool = False) -> Path:
    """The same for edits of one source image, or of several."""
    parts = _parts(zero_cond_t=zero_cond_t)
    processor = transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(), tokenizer=parts["tokenizer"],
        video_processor=transformers.Qwen2VLVideoProcessor(), chat_template="",
    )  # fmt: skip
    cls = QwenImageEditPlusPipeline if several else QwenImageEditPipeline
    cls(**parts, processor=processor).save_pretrained(folder)
    return folder


OPTIONS: dict[str, Any] = {"height": 32, "width": 48, "max_sequence_length": 32}
GLYPH_WIDTH, FIRST, FIRST_OF_LETTERS = 16, 1, 2
narrow_glyphs(transformer_hunyuanimage.HunyuanImageByT5TextProjection)


def save_tiny_hunyuan_image(folder: Path, distilled: bool = False) -> Path:
    """A complete folder of HunyuanImage, to be loaded with `OPTIONS`. Projections guide after step `FIRST`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = qwen_tokenizer()
        text_encoder_2 = transformers.T5EncoderModel(
            transformers.T5Config(
                vocab_size=384,
                d_model=GLYPH_WIDTH,
                d_kv=8,
                d_ff=16,
                num_layers=1,
                num_heads=2,
                feed_forward_proj="gated-gelu",
            )
        )
        transformer = HunyuanImageTransformer2DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=WIDTH,
            text_embed_2_dim=GLYPH_WIDTH,
            rope_axes_dim=(4, 4),
            guidance_embeds=distilled,
            use_meanflow=distilled,
        )
        for parameter in transformer.parameters():  # so that text and attention matter
            parameter.data.mul_(2.0) if parameter.ndim > 1 else None
        vae = AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=CHANNELS,
            block_out_channels=(32, 32, 32, 32),
            layers_per_block=1,
            scaling_factor=0.75289,
            spatial_compression_ratio=8,
            sample_size=128,
        )
        guiders = [
            None
            if distilled
            else AdaptiveProjectedMixGuidance(
                adaptive_projected_guidance_start_step=step, adaptive_projected_guidance_scale=4.0
            )
            for step in (FIRST, FIRST_OF_LETTERS)
        ]
        HunyuanImagePipeline(
            text_encoder=vision_language_model(tokenizer),
            tokenizer=tokenizer,
            transformer=transformer,
            vae=vae,
            text_encoder_2=text_encoder_2,
            tokenizer_2=transformers.ByT5Tokenizer(),
            guider=guiders[0],
            ocr_guider=guiders[1],
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        ).save_pretrained(folder)
    return folder
