"""A random Sana pipeline of about twenty thousand parameters."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

PUBLISHED: dict[str, Any] = {
    "use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction", "solver_order": 2,
    "algorithm_type": "dpmsolver++",
}  # fmt: skip
"""What the published checkpoints' schedulers set."""


def gemma_tokenizer() -> GemmaTokenizer:
    """A Gemma tokenizer whose pieces are single characters."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = [*special, *string.ascii_letters, *string.digits, *string.punctuation, "▁", "\n"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return GemmaTokenizer(vocab=vocab, merges=[], model_max_length=2048, add_bos_token=True)


def gemma() -> dict[str, Any]:
    """A tokenizer and a text encoder of one layer."""
    tokenizer = gemma_tokenizer()
    config = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=2048,
    )  # fmt: skip
    return {"tokenizer": tokenizer, "text_encoder": Gemma2Model(config)}


def save_tiny_sana(folder: Path) -> Path:
    """A complete pipeline folder for 64 x 64 images, with the published scheduler."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = SanaPipeline(
            **gemma(),
            vae=AutoencoderDC(
                in_channels=3, latent_channels=4, attention_head_dim=8, encoder_block_types="ResBlock",
                decoder_block_types="ResBlock", encoder_block_out_channels=(8, 8, 16, 16),
                decoder_block_out_channels=(8, 8, 16, 16), encoder_layers_per_block=(1, 1, 1, 1),
                decoder_layers_per_block=(1, 1, 1, 1), encoder_qkv_multiscales=((),) * 4,
                decoder_qkv_multiscales=((),) * 4, scaling_factor=0.41407,
            ),
            transformer=SanaTransformer2DModel(
                in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2,
                num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16,
                sample_size=8,
            ),
            scheduler=DPMSolverMultistepScheduler(**PUBLISHED),
        )  # fmt: skip
    pipe.save_pretrained(folder)
    return folder
