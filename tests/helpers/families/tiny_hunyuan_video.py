"""A random HunyuanVideo pipeline of a few thousand parameters: quick, and real in every class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from flowrl.pretraining.tiny_sd3 import _WORDS, clip_tokenizer

OPTIONS: dict[str, Any] = {"height": 16, "width": 32, "num_frames": 5, "fps": 8.0, "max_sequence_length": 16}
WIDTH = 24


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Words and punctuation of the template and of the world's prompts, one token each."""
    split = pre_tokenizers.Whitespace()
    template = [piece for piece, _ in split.pre_tokenize_str(DEFAULT_PROMPT_TEMPLATE["template"])]
    pieces = ["<pad>", "<unk>", *dict.fromkeys([*template, *_WORDS])]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", padding_side="right"
    )


def save_tiny_hunyuan_video(folder: Path) -> Path:
    """A complete pipeline folder; load it with `OPTIONS`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer, tokenizer_2 = llama_tokenizer(), clip_tokenizer()
        text_encoder = LlamaModel(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=3,
                num_attention_heads=2, max_position_embeddings=128, pad_token_id=0,
            )
        )  # fmt: skip
        text_encoder_2 = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(tokenizer_2), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                num_attention_heads=2, max_position_embeddings=77, bos_token_id=tokenizer_2.bos_token_id,
                eos_token_id=tokenizer_2.eos_token_id, pad_token_id=tokenizer_2.pad_token_id,
            )
        )  # fmt: skip
        transformer = HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2,
            num_single_layers=2, num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=WIDTH, pooled_projection_dim=16,
            rope_axes_dim=(4, 4, 4),
        )  # fmt: skip
        torch.nn.init.normal_(transformer.proj_out.weight, std=0.5)  # nearly zero at first, as is its modulation
        torch.nn.init.normal_(transformer.norm_out.linear.weight, std=0.3)
        vae = AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2,
            scaling_factor=0.476986,
        )  # fmt: skip
    HunyuanVideoPipeline(
        text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer, vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0), text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2,
    ).save_pretrained(folder)  # fmt: skip
    return folder
