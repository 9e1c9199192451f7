"""Builds the embedded model's parts, untrained: every class of a complete `StableDiffusion3Pipeline`, made small.

Two CLIP text encoders share one byte-level tokenizer of about 600 entries, and a one-layer T5 encoder has a tokenizer
of the world's words, because stock diffusers refuses an SD3 folder without `text_encoder_3`. Context is 16 + 16 tokens.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from flowrl.config.strict_yaml import read_mapping

CONTEXT = 16
"""Tokens of each text encoder (`max_sequence_length` of every stock call)."""

NUM_STEPS, GUIDANCE_SCALE = 10, 3.0
"""Default sampling settings of the embedded model."""

NETWORKS: dict[str, dict[str, Any]] = read_mapping(Path(__file__).with_name("networks.yaml"))
"""By embedded model, the sizes of its networks."""

_WORDS = (
    "a an photo of and left right above below one two three four circle square triangle star circles squares triangles"
    " stars red orange yellow green blue purple pink brown black white picture image drawing painting print sketch"
    " poster view scene"
).split()


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Byte-pair merges that make every word one piece: the most frequent pair first, ties in alphabetical order. The
    library's own trainer breaks ties by hash order, so that two processes get different token ids."""
    pieces = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    while any(len(parts) > 1 for parts in pieces):
        counts = Counter(pair for parts in pieces for pair in pairwise(parts))
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        for place, parts in enumerate(pieces):  # every occurrence of the pair is joined, left to right
            joined: list[str] = []
            for part in parts:
                if joined and (joined[-1], part) == best:
                    joined[-1] += part
                else:
                    joined.append(part)
            pieces[place] = joined
    return merges


def clip_tokenizer(more: Sequence[str] = ()) -> CLIPTokenizer:
    """A CLIP tokenizer: all bytes, their word-end forms, and merges that make each of the world's words one token.
    `more` are words of other prompts than the images'."""
    merges = _merges([*_WORDS, *more])
    # The 256 printable stand-ins for bytes that byte-level BPE uses, in byte order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
    vocabulary = [*alphabet, *(symbol + "</w>" for symbol in alphabet), *("".join(pair) for pair in merges)]
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    entries = {token: i for i, token in enumerate(dict.fromkeys(vocabulary))}
    return CLIPTokenizer(vocab=entries, merges=merges, model_max_length=CONTEXT)


def t5_tokenizer(more: Sequence[str] = ()) -> T5TokenizerFast:
    """A T5 (unigram) tokenizer of the world's words and `more`, with single letters as a fallback."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("▁", -8.0)]
    pieces += [("▁" + word, -4.0) for word in (*_WORDS, *more)]
    pieces += [(letter, -10.0) for letter in string.ascii_letters + string.digits + string.punctuation]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=CONTEXT)


def clip_config(tokenizer: CLIPTokenizer, width: int) -> CLIPTextConfig:
    """A CLIP text encoder of two layers."""
    return CLIPTextConfig(
        **NETWORKS["text"]["clip"], vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width,
        projection_dim=width, max_position_embeddings=CONTEXT, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip


def t5_settings(tokenizer: T5TokenizerFast, width: int) -> dict[str, Any]:
    """What a T5 or UMT5 encoder of one layer is configured with."""
    return NETWORKS["text"]["t5"] | {"vocab_size": len(tokenizer), "d_model": width, "d_ff": 2 * width}


def build_tiny_sd3(
    seed: int = 0, *, width: int = 128, num_layers: int = 4, vae_channels: tuple[int, ...] = (24, 48, 64, 64)
) -> StableDiffusion3Pipeline:
    """An untrained SD3 pipeline for 64 x 64 images, in float32 on the CPU. `seed` is that of the initial weights; the
    global random state is left as it was. The width of the transformer is a multiple of 32; `vae_channels` are those of
    the autoencoder's four resolutions, latents `[8, 8, 8]`."""
    sizes = NETWORKS["sd3"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, tokenizer_3 = clip_tokenizer(), t5_tokenizer()
        clip = clip_config(tokenizer, width // 2)
        text_encoder, text_encoder_2 = CLIPTextModelWithProjection(clip), CLIPTextModelWithProjection(clip)
        text_encoder_3 = T5EncoderModel(T5Config(**t5_settings(tokenizer_3, width)))
        transformer = SD3Transformer2DModel(
            **sizes["transformer"], num_layers=num_layers, num_attention_heads=width // 32, joint_attention_dim=width,
            caption_projection_dim=width, pooled_projection_dim=width,
        )  # fmt: skip
        vae = AutoencoderKL(**sizes["vae"], block_out_channels=vae_channels)
    return StableDiffusion3Pipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(**sizes["scheduler"]), vae=vae,
        text_encoder=text_encoder, tokenizer=tokenizer, text_encoder_2=text_encoder_2, tokenizer_2=tokenizer,
        text_encoder_3=text_encoder_3, tokenizer_3=tokenizer_3,
    )  # fmt: skip
