"""Builds an untrained image-and-text model of the embedded world: a complete Qwen2-VL folder, made small.

One token sees 16 x 16 pixels, so that an image of 64 x 64 is 16 tokens; each of the world's words is one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from flowrl.config.strict_yaml import read_mapping
from flowrl.pretraining.tiny_sd3 import NETWORKS
from flowrl.world.edits import WORDS
from flowrl.world.scenes import COLORS, SHAPES

TABLES: dict[str, Any] = read_mapping(Path(__file__).with_name("verifier.yaml"))
"""What the embedded world's verifiers are asked and say."""


def build_tiny_vlm(seed: int = 0) -> tuple[Qwen2VLForConditionalGeneration, Qwen2VLProcessor]:
    """An untrained Qwen2-VL, in float32 on the CPU, and its processor; `seed` is that of the weights alone."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(vocab={letter: place for place, letter in enumerate(letters)}, merges=[])
    tokenizer.add_tokens(TABLES["marks"], special_tokens=True)
    words = dict.fromkeys([*TABLES["words"].split(), *WORDS, *COLORS, *SHAPES])
    tokenizer.add_tokens([form for word in words for form in (word, f" {word}")])
    sizes, token = NETWORKS["verifier"], tokenizer.convert_tokens_to_ids
    patches = {"patch_size": sizes["vision"]["patch_size"], "size": {"shortest_edge": 1, "longest_edge": 64 * 64}}
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches),
        video_processor=Qwen2VLVideoProcessor(**patches),
        tokenizer=tokenizer,
        chat_template=TABLES["chat"],
    )
    text = sizes["text"] | {"vocab_size": len(tokenizer), "bos_token_id": None}
    text |= {"eos_token_id": token("<|im_end|>"), "pad_token_id": tokenizer.pad_token_id}
    tokens = {f"{name}_token_id": token(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    tokens |= {f"{kind}_token_id": token(f"<|{kind}_pad|>") for kind in ("image", "video")}
    config = Qwen2VLConfig(text_config=text, vision_config=sizes["vision"], **tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2VLForConditionalGeneration(config), processor
