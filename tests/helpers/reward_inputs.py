"""Inputs of rewards made by a few numbers, and what holds of every pointwise reward."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowrl.config.rewards import RewardConfig
from flowrl.rewards import Reward, RewardInputs
from flowrl.rewards.base.outputs import check_output
from flowrl.rewards.compose import WeightedSum, sum_of


def weighted_sum(
    rewards: Sequence[Reward], weights: Sequence[float], labels: Sequence[str | None] | None = None
) -> WeightedSum:
    """Sums existing rewards, each with a weight and perhaps a label."""
    members = zip(rewards, weights, labels or [None] * len(rewards), strict=True)
    return sum_of([(one, RewardConfig(name=one.name, weight=weight, label=label)) for one, weight, label in members])


def inputs_of(
    images: Tensor, prompts: list[str] | None = None, metadata: list[dict[str, Any]] | None = None
) -> RewardInputs:
    batch = len(images)
    return RewardInputs(
        prompts=prompts or [f"image {i}" for i in range(batch)],
        images=images,
        metadata=metadata or [{} for _ in range(batch)],
        group_ids=torch.arange(batch) // 2,
        sample_ids=torch.arange(batch),
    )


def random_images(batch: int = 4, size: int = 16) -> Tensor:
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def select(inputs: RewardInputs, items: list[int]) -> RewardInputs:
    return RewardInputs(
        prompts=[inputs.prompts[i] for i in items],
        images=inputs.images[items],
        metadata=[inputs.metadata[i] for i in items],
        group_ids=inputs.group_ids[items],
        sample_ids=inputs.sample_ids[items],
    )


def assert_pointwise(reward: Reward, inputs: RewardInputs, *, atol: float = 0.0) -> None:
    """The value of an item depends on that item alone: any order and any batch give the same."""
    whole = check_output(reward(inputs), len(inputs), reward.name)
    order = list(reversed(range(len(inputs))))
    torch.testing.assert_close(reward(select(inputs, order)).values, whole.values[order], rtol=0, atol=atol)
    for i in range(len(inputs)):
        torch.testing.assert_close(reward(select(inputs, [i])).values, whole.values[i : i + 1], rtol=0, atol=atol)
    assert len(set(whole.values.tolist())) > 1, "values that do not differ could not show a mix-up"


def jpeg_length(image: Tensor) -> int:
    pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=95)
    return len(stream.getvalue())
