"""Random pipelines of this year's stock classes that no family is written for: all classes are real ones, and small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.models.transformers import transformer_hunyuan_video15
from tiny_folders import narrow_glyphs
from tiny_generic import TINY_GENERIC, WIDTH, denoiser, flow, image_vae
from tiny_ltx_video import OPTIONS as LTX
from tiny_ltx_video import tiny_ltx_parts
from tiny_qwen_image import qwen_tokenizer, text_config, vision_language_model

from flowrl.pretraining.tiny_sd3 import CONTEXT

narrow_glyphs(transformer_hunyuan_video15.HunyuanVideo15ByT5TextProjection)
_TEMPLATE = "{{ 'x' * 108 }}{{ messages[1]['content'] }}"
"""As many tokens before the prompt as stock cuts off."""


def hunyuan_video_15() -> dict[str, Any]:
    """HunyuanVideo-1.5: two encoders and a guider."""
    tokenizer, letters = qwen_tokenizer(), transformers.ByT5Tokenizer()
    tokenizer.chat_template = _TEMPLATE
    config = {**text_config(tokenizer), "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1],
                                                            "rope_theta": 10000.0}}  # fmt: skip
    glyphs = {"d_model": WIDTH, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": len(letters)}
    text = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLTextModel
    return {
        "tokenizer": tokenizer, "tokenizer_2": letters, "scheduler": flow(shift=5.0),
        "text_encoder": text(transformers.models.qwen2_5_vl.Qwen2_5_VLTextConfig(**config)),
        "text_encoder_2": transformers.T5EncoderModel(transformers.T5Config(**glyphs)),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1,
        ),
        "transformer": denoiser(
            "HunyuanVideo15Transformer3DModel", in_channels=9, out_channels=4, num_attention_heads=2,
            attention_head_dim=12, num_layers=2, num_refiner_layers=1, text_embed_dim=WIDTH, text_embed_2_dim=WIDTH,
            image_embed_dim=8, rope_axes_dim=(4, 4, 4), target_size=32, task_type="t2v",
        ),
    }  # fmt: skip


def longcat() -> dict[str, Any]:
    """LongCat-Image."""
    tokenizer = qwen_tokenizer()
    processor = transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(), tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(), chat_template="",
    )  # fmt: skip
    return {
        "tokenizer": tokenizer, "text_encoder": vision_language_model(tokenizer), "text_processor": processor,
        "vae": image_vae(16, shift_factor=0.1), "scheduler": flow(use_dynamic_shifting=True),
        "transformer": denoiser(
            "LongCatImageTransformer2DModel", in_channels=64, num_layers=1, num_single_layers=1,
            attention_head_dim=16, num_attention_heads=2, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
            axes_dims_rope=[4, 4, 8],
        ),
    }  # fmt: skip


def prx() -> dict[str, Any]:
    """PRX, which guides one prompt at a time."""
    tokenizer = qwen_tokenizer()
    tokenizer.model_max_length = CONTEXT
    module = {"vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
    config = transformers.T5GemmaConfig(
        encoder=module, decoder=module, vocab_size=len(tokenizer), is_encoder_decoder=False
    )
    encoder = transformers.T5GemmaEncoderModel(config)
    return {
        "tokenizer": tokenizer, "text_encoder": encoder, "vae": image_vae(4, shift_factor=0.1),
        "scheduler": flow(shift=3.0),
        "transformer": denoiser(
            "PRXTransformer2DModel", in_channels=4, context_in_dim=WIDTH, hidden_size=24, num_heads=2, depth=2,
            axes_dim=[6, 6],
        ),
    }  # fmt: skip


def _image_encoder(kind: str) -> Any:
    """CLIP or SigLIP of images of 16 x 16."""
    settings = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    return getattr(transformers, f"{kind}VisionModel")(getattr(transformers, f"{kind}VisionConfig")(**settings))


_SHOWN = {"height": 16, "width": 16}


def hunyuan_video_15_from_image() -> dict[str, Any]:
    """HunyuanVideo-1.5 from a first frame, whose shape says what is drawn."""
    return {
        **hunyuan_video_15(),
        "image_encoder": _image_encoder("Siglip"),
        "feature_extractor": transformers.SiglipImageProcessor(size=_SHOWN),
    }


def skyreels_from_image() -> dict[str, Any]:
    """SkyReels V2 from a first frame, which stands beside the noisy channels."""
    parts = TINY_GENERIC["SkyReelsV2Pipeline"][0]()
    network = denoiser(
        "SkyReelsV2Transformer3DModel",
        **{**parts["transformer"].config, "in_channels": 12, "image_dim": 8, "added_kv_proj_dim": 24},
    )
    processor = transformers.CLIPImageProcessor(size=_SHOWN, crop_size=_SHOWN)
    shown = {"image_encoder": _image_encoder("CLIP"), "image_processor": processor}
    return {**parts, **shown, "transformer": network}


LATER: dict[str, tuple[Any, dict[str, Any]]] = {
    "HunyuanVideo15Pipeline": (hunyuan_video_15, {"height": 32, "width": 32, "num_frames": 5}),
    "LongCatImagePipeline": (longcat, {"height": 16, "width": 16}),
    "PRXPipeline": (prx, {"height": 16, "width": 16}),
    "SanaImageToVideoPipeline": TINY_GENERIC["SanaVideoPipeline"],
    "SkyReelsV2ImageToVideoPipeline": (skyreels_from_image, TINY_GENERIC["SkyReelsV2Pipeline"][1]),
    "LTXImageToVideoPipeline": (tiny_ltx_parts, LTX),
    "HunyuanVideo15ImageToVideoPipeline": (hunyuan_video_15_from_image, {"height": 32, "width": 32, "num_frames": 5}),
}
"""Stock class -> what its parts are made by, and the settings that it is loaded with."""


def save_tiny_generic(name: str, folder: Path) -> Path:
    """A complete folder of a stock class."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {**TINY_GENERIC, **LATER}[name][0]()
        getattr(diffusers, name)(**parts).save_pretrained(folder)
    return folder
