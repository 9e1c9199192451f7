"""A Qwen2-VL of a few thousand weights with its real processor classes, made without any download."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.rewards import RewardInputs

PROMPTS = ["a dog", "two cats on a red sofa", "the sea"]
LEVEL_WORDS = ("excellent", "good", "fair", "poor", "bad")
LEVEL_TOKENS = tuple(f" {word}" for word in LEVEL_WORDS)
CHAT_TOKENS = (
    "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}"
    "{% else %}<|vision_start|><|{{ c.type }}_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDTH = 32
SPARE_ROWS = 8  # of the embedding, beyond the tokenizer's words, as in the published models


def tiny_processor(words: Sequence[str] = LEVEL_TOKENS) -> Any:
    """Bytes, the tokens of the chat format, and some words: by default the five levels with a blank before them."""
    import transformers
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = transformers.Qwen2Tokenizer(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    tokenizer.add_tokens(list(CHAT_TOKENS), special_tokens=True)
    tokenizer.add_tokens(list(words))
    return transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(), tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(), chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def tiny_config(processor: Any, *, layers: int = 2, width: int = WIDTH) -> Any:
    import transformers

    token = processor.tokenizer.convert_tokens_to_ids
    return transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": len(processor.tokenizer) + SPARE_ROWS, "hidden_size": width, "intermediate_size": 48,
            "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 8192, "pad_token_id": token("<|endoftext|>"), "bos_token_id": None,
            "eos_token_id": token("<|im_end|>"),
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": layers, "embed_dim": 32, "hidden_size": width, "num_heads": 2, "mlp_ratio": 2,
        },
        image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
    )  # fmt: skip


def write_tiny_vlm(
    folder: Path, *, words: Sequence[str] = LEVEL_TOKENS, generation: Mapping[str, float] | None = None
) -> Path:
    """A complete `Qwen2VLForConditionalGeneration` folder; weights large enough for inputs to tell apart."""
    import transformers

    processor = tiny_processor(words)
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(tiny_config(processor))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0) if parameter.ndim > 1 else None
    if generation is not None:
        ends = {key: getattr(model.config.text_config, key) for key in ("eos_token_id", "pad_token_id")}
        model.generation_config = transformers.GenerationConfig(**ends, **generation)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def older_name(name: str) -> str:
    """A weight's name in checkpoints of before the model was nested, from its name today."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1)


def backbone_state(folder: Path) -> dict[str, Tensor]:
    """The weights of the whole model by the names of today."""
    import transformers

    state: dict[str, Tensor] = transformers.Qwen2VLForConditionalGeneration.from_pretrained(folder).state_dict()
    return state


def inputs_of(*, videos: bool = False, prompts: list[str] | None = None) -> RewardInputs:
    """Images of 48 x 72 in coarse blocks of colour, or clips of six such frames at 8 a second."""
    prompts = PROMPTS if prompts is None else prompts
    generator, batch = torch.Generator().manual_seed(0), len(prompts)
    frames = torch.rand(batch, 6, 3, 4, 6, generator=generator).repeat_interleave(12, -1).repeat_interleave(12, -2)
    return RewardInputs(
        prompts=prompts, images=frames[:, 0], metadata=[{}] * batch, group_ids=torch.zeros(batch, dtype=torch.int64),
        sample_ids=torch.arange(batch), videos=frames if videos else None, fps=8.0 if videos else None,
    )  # fmt: skip
