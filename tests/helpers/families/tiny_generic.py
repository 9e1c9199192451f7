"""Random pipelines of stock classes that no family is written for: all classes are real ones, and small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from tiny_qwen_image import qwen_tokenizer, text_config
from tiny_sana import PUBLISHED as SANA_LEVELS
from tiny_sana import gemma

from flowrl.pretraining.tiny_sd3 import CONTEXT, t5_settings, t5_tokenizer

WIDTH = 16


def image_vae(channels: int = 4, levels: int = 2, **changes: Any) -> Any:
    """An autoencoder of images."""
    return diffusers.AutoencoderKL(
        block_out_channels=(8,) * levels, down_block_types=("DownEncoderBlock2D",) * levels, latent_channels=channels,
        up_block_types=("UpDecoderBlock2D",) * levels, norm_num_groups=4, sample_size=16, **changes,
    )  # fmt: skip


def _wan_vae() -> Any:
    return diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.5, 2.0, 1.0],
    )  # fmt: skip


def _t5(kind: str = "T5") -> dict[str, Any]:
    tokenizer = t5_tokenizer()
    settings = t5_settings(tokenizer, WIDTH)
    config = getattr(transformers, f"{kind}Config")(**settings)
    return {"tokenizer": tokenizer, "text_encoder": getattr(transformers, f"{kind}EncoderModel")(config)}


def flow(**changes: Any) -> Any:
    """A flow scheduler."""
    return diffusers.FlowMatchEulerDiscreteScheduler(**changes)


def denoiser(cls: str, **settings: Any) -> Any:
    """A network whose last layers, which some classes set to zero, are not."""
    network = getattr(diffusers, cls)(**settings)
    for parameter in network.parameters():
        if parameter.ndim > 1 and float(parameter.detach().abs().max()) == 0:
            torch.nn.init.normal_(parameter, std=0.1)
    return network


def _pixart() -> dict[str, Any]:
    return {
        **_t5(), "vae": image_vae(), "scheduler": diffusers.DPMSolverMultistepScheduler(),
        "transformer": denoiser(
            "PixArtTransformer2DModel", num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=8,
            cross_attention_dim=WIDTH, caption_channels=WIDTH,
        ),
    }  # fmt: skip


def _aura() -> dict[str, Any]:
    return {
        **_t5("UMT5"), "vae": image_vae(), "scheduler": flow(shift=1.73),
        "transformer": denoiser(
            "AuraFlowTransformer2DModel", sample_size=8, num_mmdit_layers=1, num_single_dit_layers=1,
            attention_head_dim=8, num_attention_heads=2, joint_attention_dim=WIDTH, caption_projection_dim=WIDTH,
            pos_embed_max_size=64,
        ),
    }  # fmt: skip


def _chroma() -> dict[str, Any]:
    return {
        **_t5(), "vae": image_vae(shift_factor=0.1), "scheduler": flow(),
        "transformer": denoiser(
            "ChromaTransformer2DModel", in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8), approximator_num_channels=8,
            approximator_hidden_dim=32, approximator_layers=1,
        ),
    }  # fmt: skip


def _bria() -> dict[str, Any]:
    return {
        **_t5(), "vae": image_vae(shift_factor=0.1), "scheduler": flow(use_dynamic_shifting=True),
        "transformer": denoiser(
            "BriaTransformer2DModel", in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=8,
            num_attention_heads=2, joint_attention_dim=WIDTH, axes_dims_rope=[0, 4, 4],
        ),
    }  # fmt: skip


def _lumina2() -> dict[str, Any]:
    return {
        **gemma(), "vae": image_vae(shift_factor=0.1, levels=4), "scheduler": flow(shift=6.0),
        "transformer": denoiser(
            "Lumina2Transformer2DModel", sample_size=8, in_channels=4, hidden_size=24, num_layers=1,
            num_refiner_layers=1, num_attention_heads=2, num_kv_heads=1, multiple_of=8, axes_dim_rope=(4, 4, 4),
            axes_lens=(512, 32, 32), cap_feat_dim=WIDTH,
        ),
    }  # fmt: skip


def _cogview4() -> dict[str, Any]:
    tokenizer = t5_tokenizer()  # an empty prompt has a token, as with the published one
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    return {
        "tokenizer": tokenizer, "text_encoder": transformers.GlmModel(transformers.GlmConfig(**settings)),
        "vae": image_vae(), "scheduler": flow(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75),
        "transformer": denoiser(
            "CogView4Transformer2DModel", in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
            num_attention_heads=2, text_embed_dim=WIDTH, time_embed_dim=8, condition_dim=4, sample_size=16,
            rope_axes_dim=(64, 64),
        ),
    }  # fmt: skip


def _cogview3() -> dict[str, Any]:
    return {
        **_t5(), "vae": image_vae(),
        "scheduler": diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True,
                                                      timestep_spacing="trailing", clip_sample=False),
        "transformer": denoiser(
            "CogView3PlusTransformer2DModel", in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
            num_attention_heads=2, text_embed_dim=WIDTH, time_embed_dim=8, condition_dim=4, pos_embed_max_size=16,
            sample_size=8,
        ),
    }  # fmt: skip


def _mochi() -> dict[str, Any]:
    return {
        **_t5(), "scheduler": flow(invert_sigmas=True),
        "vae": diffusers.AutoencoderKLMochi(
            encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4, latent_channels=12,
            layers_per_block=(1, 1, 1, 1, 1), add_attention_block=(False,) * 5,
        ),
        "transformer": denoiser(
            "MochiTransformer3DModel", num_attention_heads=2, attention_head_dim=8, num_layers=2,
            pooled_projection_dim=WIDTH, in_channels=12, text_embed_dim=WIDTH, time_embed_dim=8,
            max_sequence_length=CONTEXT,
        ),
    }  # fmt: skip


def _skyreels() -> dict[str, Any]:
    return {
        **_t5("UMT5"), "vae": _wan_vae(),
        "scheduler": diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True,
                                                       flow_shift=8.0),
        "transformer": denoiser(
            "SkyReelsV2Transformer3DModel", num_attention_heads=2, attention_head_dim=12, in_channels=4,
            out_channels=4, text_dim=WIDTH, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
        ),
    }  # fmt: skip


def _sana_video() -> dict[str, Any]:
    return {
        **gemma(), "vae": _wan_vae(), "scheduler": diffusers.DPMSolverMultistepScheduler(**SANA_LEVELS),
        "transformer": denoiser(
            "SanaVideoTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12,
            num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24,
            caption_channels=WIDTH, sample_size=4, rope_max_seq_len=32,
        ),
    }  # fmt: skip


def _ovis() -> dict[str, Any]:
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    encoder = transformers.Qwen3Model(transformers.Qwen3Config(**text_config(tokenizer), head_dim=8))
    return {
        "tokenizer": tokenizer, "text_encoder": encoder, "vae": image_vae(shift_factor=0.1),
        "scheduler": flow(use_dynamic_shifting=True),
        "transformer": denoiser(
            "OvisImageTransformer2DModel", in_channels=16, out_channels=16, num_layers=1, num_single_layers=1,
            attention_head_dim=16, num_attention_heads=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8),
        ),
    }  # fmt: skip


_IMAGE: dict[str, Any] = {"height": 16, "width": 16, "max_sequence_length": CONTEXT}
_CLIP: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": CONTEXT}
TINY_GENERIC: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "PixArtSigmaPipeline": (_pixart, _IMAGE),
    "PixArtAlphaPipeline": (_pixart, _IMAGE),
    "AuraFlowPipeline": (_aura, _IMAGE),
    "ChromaPipeline": (_chroma, _IMAGE),
    "BriaPipeline": (_bria, _IMAGE),
    "Lumina2Pipeline": (_lumina2, {"height": 64, "width": 64, "max_sequence_length": 256}),
    "CogView4Pipeline": (_cogview4, {**_IMAGE, "height": 32, "width": 32}),
    "CogView3PlusPipeline": (_cogview3, _IMAGE),
    "OvisImagePipeline": (_ovis, {**_IMAGE, "max_sequence_length": 64}),
    "MochiPipeline": (_mochi, {**_CLIP, "num_frames": 7}),
    "SkyReelsV2Pipeline": (_skyreels, _CLIP),
    "SanaVideoPipeline": (_sana_video, _CLIP),
}
"""Stock class -> what its parts are made by, and the settings that it is loaded with."""
