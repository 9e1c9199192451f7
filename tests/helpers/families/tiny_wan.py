"""Random Wan and Motif-Video pipelines of a few thousand parameters: quick, and real in every class."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import (
    AdaptiveProjectedGuidance,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    LucyEditPipeline,
    MotifVideoPipeline,
    MotifVideoTransformer3DModel,
    UniPCMultistepScheduler,
    WanAnimatePipeline,
    WanAnimateTransformer3DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5Gemma2Encoder,
    T5Gemma2EncoderConfig,
    T5Gemma2TextConfig,
    UMT5Config,
    UMT5EncoderModel,
)

from flowrl.pretraining.tiny_sd3 import CONTEXT, t5_tokenizer

Kind = Literal["t2v", "t2v-a14b", "ti2v-5b", "i2v", "i2v-a14b", "vace", "vace-a14b", "animate", "lucy"]
OPTIONS: dict[str, Any] = {
    "height": 32, "width": 48, "num_frames": 5, "fps": 8.0, "max_sequence_length": CONTEXT, "device": "cpu",
}  # fmt: skip
CHANNELS, WIDTH, BOUNDARY = 4, 24, 0.8


def save_tiny_wan(folder: Path, kind: Kind = "t2v") -> Path:
    """A complete pipeline folder like the published one of this kind; load it with `OPTIONS`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = t5_tokenizer()
        text_encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer), d_model=WIDTH, d_kv=12, d_ff=WIDTH, num_layers=1, num_heads=2,
                is_encoder_decoder=False, tie_word_embeddings=True,
            )
        )  # fmt: skip
        vace, animate, lucy = kind.startswith("vace"), kind == "animate", kind == "lucy"
        layers: dict[str, Any] = {
            "dim_mult": [1, 1, 2],
            "temperal_downsample": [True, True],
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
        }
        if vace or animate:  # whose stock class counts an autoencoder's levels alone
            layers = {"dim_mult": [1, 1, 1, 2], "temperal_downsample": [False, True, True]}
        vae = AutoencoderKLWan(
            base_dim=4, z_dim=CHANNELS, num_res_blocks=1, latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.5, 2.0, 1.0], scale_factor_temporal=4, scale_factor_spatial=8, **layers,
        )  # fmt: skip
        beside = kind in ("i2v", "i2v-a14b", "animate")
        config: dict[str, Any] = {
            "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12,
            "in_channels": 2 * CHANNELS if lucy else 2 * CHANNELS + 4 if beside else CHANNELS, "out_channels": CHANNELS,
            "text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 16,
        }  # fmt: skip
        if kind in ("i2v", "animate"):
            config |= {"image_dim": 16, "added_kv_proj_dim": WIDTH}
        if vace:
            config |= {"num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 2 * CHANNELS + 64}
        if animate:
            config |= {
                "latent_channels": CHANNELS, "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
                "motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 16,
                "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2,
            }  # fmt: skip
        network: Any = (
            WanVACETransformer3DModel if vace else WanAnimateTransformer3DModel if animate else WanTransformer3DModel
        )
        experts = {"transformer": network(**config)}
        if kind.endswith("a14b"):
            experts["transformer_2"] = network(**config)
        for expert in experts.values():  # its initial output is nearly zero, and so are the embeddings of times
            torch.nn.init.normal_(expert.proj_out.weight, std=0.3)
            torch.nn.init.normal_(expert.condition_embedder.time_proj.weight, std=0.3)
        parts: dict[str, Any] = {
            "tokenizer": tokenizer,
            "text_encoder": text_encoder,
            "vae": vae,
            **experts,
            "scheduler": UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
            ),
            "boundary_ratio": BOUNDARY if kind.endswith("a14b") else None,
        }
        if animate:
            del parts["boundary_ratio"]
        elif not vace:
            parts["expand_timesteps"] = kind in ("ti2v-5b", "lucy")
        if kind in ("i2v", "animate"):
            parts["image_encoder"] = CLIPVisionModel(
                CLIPVisionConfig(
                    hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16,
                    patch_size=8, projection_dim=16,
                )
            )  # fmt: skip
            size = {"height": 16, "width": 16}
            parts["image_processor"] = CLIPImageProcessor(size=size, crop_size=size)
    stock: Any = WanVACEPipeline if vace else WanImageToVideoPipeline if beside else WanPipeline
    stock = WanAnimatePipeline if animate else LucyEditPipeline if lucy else stock
    stock(**parts).save_pretrained(folder)
    return folder


def save_tiny_wan_vace(folder: Path) -> Path:
    """A VACE pipeline of one network; two of its three blocks have a control block."""
    return save_tiny_wan(folder, "vace")


def save_tiny_wan_animate(folder: Path) -> Path:
    """An Animate pipeline of two blocks, the first of which reads the face."""
    return save_tiny_wan(folder, "animate")


def save_tiny_lucy_edit(folder: Path) -> Path:
    """Lucy Edit, whose network reads as many channels of a clip as noisy ones."""
    return save_tiny_wan(folder, "lucy")


def save_tiny_motif_video(folder: Path) -> Path:
    """A complete pipeline folder; the last of its three single blocks is a decoder's. Load it with `OPTIONS`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = t5_tokenizer()
        text = T5Gemma2TextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=12,
            max_position_embeddings=128,
            dropout_rate=0.0,
        )
        seen = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
        text_encoder = T5Gemma2Encoder(
            T5Gemma2EncoderConfig(
                text_config=text, vision_config={**seen, "hidden_size": 16, "patch_size": 8}, mm_tokens_per_image=4
            )
        )
        transformer = MotifVideoTransformer3DModel(
            in_channels=2 * CHANNELS + 1,
            out_channels=CHANNELS,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=1,
            num_single_layers=3,
            num_decoder_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=WIDTH,
            image_embed_dim=16,
            rope_axes_dim=(4, 4, 4),
            enable_text_cross_attention_single=True,
        )
        for part in (
            transformer.context_embedder,
            *transformer.transformer_blocks,
            *transformer.single_transformer_blocks,
        ):
            for layer in part.modules():  # so that what a prompt says is seen in a clip
                if isinstance(layer, torch.nn.Linear):
                    torch.nn.init.normal_(layer.weight, std=0.3)
        torch.nn.init.normal_(transformer.proj_out.weight, std=0.5)
        torch.nn.init.normal_(transformer.norm_out.linear.weight, std=0.3)
        vae = AutoencoderKLWan(
            base_dim=4,
            z_dim=CHANNELS,
            num_res_blocks=1,
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.5, 2.0, 1.0],
            dim_mult=[1, 1, 1, 2],
            temperal_downsample=[False, True, True],
        )
    MotifVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        transformer=transformer,
        vae=vae,
        feature_extractor=None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=2.5),
        guider=AdaptiveProjectedGuidance(),
    ).save_pretrained(folder)
    return folder
