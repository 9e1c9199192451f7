"""A Qwen2.5-VL and a Qwen3-VL of a few thousand weights, with the processor of the tiny Qwen2-VL in their classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_vlm import CHAT_TEMPLATE, WIDTH, tiny_processor

LAYERS = 2
TEXT: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 8192, "bos_token_id": None,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": LAYERS, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40, "out_hidden_size": WIDTH,
}  # fmt: skip


def generation_processor(generation: str) -> Any:
    """The tiny processor as Qwen2.5-VL (`25`) or Qwen3-VL (`3`) has it, which cuts patches of 16 pixels."""
    import transformers

    tokenizer = tiny_processor().tokenizer
    if generation == "25":
        return transformers.Qwen2_5_VLProcessor(
            image_processor=transformers.Qwen2VLImageProcessor(), tokenizer=tokenizer,
            video_processor=transformers.Qwen2VLVideoProcessor(), chat_template=CHAT_TEMPLATE,
        )  # fmt: skip
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            patch_size=16, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ),
        tokenizer=tokenizer, video_processor=transformers.Qwen3VLVideoProcessor(), chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def write_generation(folder: Path, generation: str) -> Path:
    """A complete folder of the class for conditional generation; weights large enough for inputs to tell apart."""
    import transformers

    processor = generation_processor(generation)
    token = processor.tokenizer.convert_tokens_to_ids
    text = TEXT | {
        "vocab_size": len(processor.tokenizer) + 8, "pad_token_id": token("<|endoftext|>"),
        "eos_token_id": token("<|im_end|>"),
    }  # fmt: skip
    ids = {f"{kind}_token_id": token(f"<|{kind}_pad|>") for kind in ("image", "video")}
    ids |= {f"vision_{end}_token_id": token(f"<|vision_{end}|>") for end in ("start", "end")}
    torch.manual_seed(0)
    model: Any
    if generation == "25":
        vision = VISION | {"fullatt_block_indexes": [1]}
        model = transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        )
    else:
        vision = VISION | {"num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
        model = transformers.Qwen3VLForConditionalGeneration(
            transformers.Qwen3VLConfig(text_config=text | {"head_dim": 16}, vision_config=vision, **ids)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
