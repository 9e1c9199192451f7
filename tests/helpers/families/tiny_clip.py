"""A random CLIP of real classes with a tokenizer of letters, written without any download, and inputs to score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from flowrl.rewards import Reward, RewardInputs
from flowrl.rewards.base.outputs import check_output

LETTERS = "abcdefghijklmnopqrstuvwxyz-"
VOCABULARY = 2 * len(LETTERS) + 2  # each letter inside and at the end of a word, start and end of the text


def text_tower(positions: int = 16) -> dict[str, Any]:
    """The text half of a tiny CLIP's configuration."""
    ends = {"bos_token_id": VOCABULARY - 2, "eos_token_id": VOCABULARY - 1, "pad_token_id": VOCABULARY - 1}
    return {**_SIZES, **ends, "vocab_size": VOCABULARY, "max_position_embeddings": positions}


def vision_tower(patch: int = 16) -> dict[str, Any]:
    """The image half, for images of 32 pixels."""
    return {**_SIZES, "image_size": 32, "patch_size": patch}


_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_tiny_clip(folder: Path, *, seed: int = 0, patch: int = 16, positions: int = 16, projection: int = 16) -> Path:
    """Writes model, tokenizer and processor; returns the folder."""
    config = transformers.CLIPConfig(
        text_config=text_tower(positions), vision_config=vision_tower(patch), projection_dim=projection
    )
    torch.manual_seed(seed)
    model = transformers.CLIPModel(config)
    with torch.no_grad():  # so that random embeddings differ enough for a mix-up to show
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    pieces = [letter + end for letter in LETTERS for end in ("", "</w>")]
    vocab = {piece: i for i, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    tokenizer = transformers.CLIPTokenizer(vocab=vocab, merges=[])
    transformers.CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def write_tiny_dinov2(folder: Path, *, width: int = 32) -> Path:
    """Writes a DINOv2 of random weights, for images of 28 pixels, four patches; returns the folder."""
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    transformers.Dinov2Model(config).save_pretrained(folder)
    return folder


def inputs_of(images: Tensor, prompts: list[str] | None = None, **fields: Any) -> RewardInputs:
    """Inputs of these images; groups of two."""
    batch = len(images)
    return RewardInputs(
        prompts=prompts or [f"image {i}" for i in range(batch)],
        images=images,
        metadata=[{} for _ in range(batch)],
        group_ids=torch.arange(batch) // 2,
        sample_ids=torch.arange(batch),
        **fields,
    )


def random_images(batch: int = 4, height: int = 16, width: int | None = None, seed: int = 0) -> Tensor:
    """Noise, float in [0, 1]."""
    return torch.rand(batch, 3, height, width or height, generator=torch.Generator().manual_seed(seed))


def clip_inputs() -> RewardInputs:
    """Four images of 40 x 56 pixels and prompts, one of them too long for the tiny CLIP."""
    long = "a bench on a hill under a cloud and far more letters than the model can read"
    return inputs_of(random_images(4, 40, 56), ["a dog", "two cats", long, "red"])


def assert_pointwise(reward: Reward, inputs: RewardInputs, *, atol: float = 1e-5) -> None:
    """The value of an item depends on that item alone: any order and any batch give the same, but for rounding."""
    whole = check_output(reward(inputs), len(inputs), reward.name)
    order = list(reversed(range(len(inputs))))
    torch.testing.assert_close(reward(inputs[order]).values, whole.values[order], rtol=0, atol=atol)
    for i in range(len(inputs)):
        torch.testing.assert_close(reward(inputs[[i]]).values, whole.values[i : i + 1], rtol=0, atol=atol)
    spread = float(whole.values.max() - whole.values.min())
    assert spread > 10 * atol, "values that do not differ could not show a mix-up"
