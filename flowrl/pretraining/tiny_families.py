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

from flowrl.pretraining.tiny_sd3 import clip_config, clip_tokenizer, t5_settings, t5_tokenizer


def build_tiny_sd15(vae: AutoencoderKL, seed: int = 0) -> StableDiffusionPipeline:
    """An untrained Stable Diffusion 1 pipeline that predicts noise on the latents of a given autoencoder.

    Args:
        vae: autoencoder of 64 x 64 images with 8 x 8 latents; its shift_factor has no place in this family.
        seed: of the initial weights; the global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer()
        unet = UNet2DConditionModel(
            sample_size=8, in_channels=vae.config.latent_channels, out_channels=vae.config.latent_channels,
            layers_per_block=1, block_out_channels=(64, 96), norm_num_groups=16, cross_attention_dim=128,
            attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D",) * 2,
            up_block_types=("CrossAttnUpBlock2D",) * 2,
        )  # fmt: skip
        text_encoder = CLIPTextModel(clip_config(tokenizer, 128))
    vae.register_to_config(shift_factor=None)
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        clip_sample=False,
        set_alpha_to_one=True,
    )
    return StableDiffusionPipeline(
        vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=unet, scheduler=scheduler, safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def build_tiny_wan(words: Sequence[str], seed: int = 0) -> WanPipeline:
    """An untrained Wan text-to-video pipeline for clips of 64 x 64 pixels, with latents [16, 3, 8, 8] of 9 frames.

    Args:
        words: of its prompts, beyond those of the images'.
        seed: of the initial weights; the global random state is left as it was.
    """
    width = 160  # of the transformer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = t5_tokenizer(words)
        text_encoder = UMT5EncoderModel(UMT5Config(**t5_settings(tokenizer, width)))
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=width // 32, attention_head_dim=32, in_channels=16,
            out_channels=16, text_dim=width, freq_dim=64, ffn_dim=2 * width, num_layers=6, rope_max_seq_len=32,
        )  # fmt: skip
        vae = AutoencoderKLWan(
            base_dim=16, z_dim=16, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[True, True],
            in_channels=12, out_channels=12, patch_size=2, latents_mean=[0.0] * 16, latents_std=[1.0] * 16,
            scale_factor_temporal=4, scale_factor_spatial=8,
        )  # fmt: skip
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    return WanPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, vae=vae, scheduler=scheduler
    )


def build_tiny_kontext(
    vae: AutoencoderKL, words: Sequence[str], seed: int = 0, *, width: int = 128, blocks: tuple[int, int] = (3, 3)
) -> FluxKontextPipeline:
    """An untrained FLUX.1 Kontext pipeline on the 8 x 8 latents of a given autoencoder of 64 x 64 images.

    Args:
        vae: the autoencoder; its latents are packed two by two.
        words: of instructions, beyond those of the images' prompts.
        seed: of the initial weights; the global random state is left as it was.
        width: of the transformer (a multiple of 32).
        blocks: double-stream and single-stream blocks.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, tokenizer_2 = clip_tokenizer(words), t5_tokenizer(words)
        text_encoder = CLIPTextModel(clip_config(tokenizer, 64))
        text_encoder_2 = T5EncoderModel(T5Config(**t5_settings(tokenizer_2, width)))
        transformer = FluxTransformer2DModel(
            patch_size=1, in_channels=4 * vae.config.latent_channels, num_layers=blocks[0],
            num_single_layers=blocks[1], attention_head_dim=32, num_attention_heads=width // 32,
            joint_attention_dim=width, pooled_projection_dim=64, guidance_embeds=True, axes_dims_rope=(8, 12, 12),
        )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        shift=3.0,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    return FluxKontextPipeline(
        scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2, transformer=transformer,
    )  # fmt: skip
