"""Builds the other embedded models' parts, untrained: complete stock pipelines of their families, made small.

All read the world's words through the tokenizers of `flowrl.pretraining.tiny_sd3`; context is 16 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import CLIPTextModel, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

from flowrl.pretraining.tiny_sd3 import NETWORKS, clip_config, clip_tokenizer, t5_settings, t5_tokenizer


def build_tiny_sd15(vae: AutoencoderKL, seed: int = 0) -> StableDiffusionPipeline:
    """An untrained Stable Diffusion 1 pipeline that predicts noise on the latents of a given autoencoder, 8 x 8 of
    images of 64 x 64; its shift_factor has no place here. `seed` sets the weights; the global random state stays."""
    sizes = NETWORKS["sd15"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer()
        unet = UNet2DConditionModel(
            **sizes["unet"], in_channels=vae.config.latent_channels, out_channels=vae.config.latent_channels
        )
        text_encoder = CLIPTextModel(clip_config(tokenizer, unet.config.cross_attention_dim))
    vae.register_to_config(shift_factor=None)
    return StableDiffusionPipeline(
        vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=unet,
        scheduler=DDIMScheduler(**sizes["scheduler"]), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip


def build_tiny_wan(words: Sequence[str], seed: int = 0) -> WanPipeline:
    """An untrained Wan text-to-video pipeline for clips of 64 x 64 pixels, with latents [16, 3, 8, 8] of 9 frames.
    `words` are those of its prompts beyond the images'; `seed` sets the weights; the global random state stays."""
    sizes = NETWORKS["wan"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = t5_tokenizer(words)
        text_encoder = UMT5EncoderModel(UMT5Config(**t5_settings(tokenizer, sizes["transformer"]["text_dim"])))
        transformer = WanTransformer3DModel(**sizes["transformer"])
        vae = AutoencoderKLWan(**sizes["vae"])
    return WanPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, vae=vae,
        scheduler=UniPCMultistepScheduler(**sizes["scheduler"]),
    )  # fmt: skip


def build_tiny_kontext(
    vae: AutoencoderKL, words: Sequence[str], seed: int = 0, *, width: int = 128, blocks: tuple[int, int] = (3, 3)
) -> FluxKontextPipeline:
    """An untrained FLUX.1 Kontext pipeline on the 8 x 8 latents of a given autoencoder of 64 x 64 images. Latents are
    packed two by two. `words` are those of instructions beyond the images' prompts; the width of the transformer is a
    multiple of 32, and its `blocks` are double-stream and single-stream ones. `seed` is that of the initial weights;
    the global random state is left as it was."""
    sizes = NETWORKS["kontext"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, tokenizer_2 = clip_tokenizer(words), t5_tokenizer(words)
        text_encoder = CLIPTextModel(clip_config(tokenizer, sizes["transformer"]["pooled_projection_dim"]))
        text_encoder_2 = T5EncoderModel(T5Config(**t5_settings(tokenizer_2, width)))
        transformer = FluxTransformer2DModel(
            **sizes["transformer"], in_channels=4 * vae.config.latent_channels, num_layers=blocks[0],
            num_single_layers=blocks[1], num_attention_heads=width // 32, joint_attention_dim=width,
        )  # fmt: skip
    return FluxKontextPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**sizes["scheduler"]), vae=vae, text_encoder=text_encoder,
        tokenizer=tokenizer, text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2, transformer=transformer,
    )  # fmt: skip
