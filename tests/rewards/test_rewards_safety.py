"""The safety gate on a tiny random ViT, and its place in a list of rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.rewards import RewardInputs, build_reward, reward_options, to_uint8
from flowrl.rewards.compose import build_weighted_sum


def inputs_of(size: int = 40, batch: int = 4) -> RewardInputs:
    images = torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
    images[1:] *= torch.tensor([0.0, 1.0, 0.4])[: batch - 1, None, None, None]
    return RewardInputs(
        prompts=[""] * batch, images=images, metadata=[{}] * batch, group_ids=torch.zeros(batch, dtype=torch.int64),
        sample_ids=torch.arange(batch),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT classifier with the published classes, random weights and a processor, for images of 32 pixels."""
    import transformers

    path = tmp_path_factory.mktemp("vit")
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16,
        id2label={0: "normal", 1: "nsfw"}, label2id={"normal": 0, "nsfw": 1},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config)
    with torch.no_grad():
        model.classifier.weight.mul_(30.0)  # so that images differ
    model.save_pretrained(path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(path)
    return path


def test_value_is_minus_the_probability_of_the_unsafe_class(folder: Path) -> None:
    """The same images at the model's own size, so that the processor only maps [0, 255] to [-1, 1]."""
    import transformers

    inputs = inputs_of(size=32)
    model = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    pixels = torch.from_numpy(to_uint8(inputs.images)).permute(0, 3, 1, 2).float() / 127.5 - 1.0
    with torch.no_grad():
        logits = model(pixel_values=pixels).logits.numpy().astype(np.float64)
    unsafe = 1.0 / (1.0 + np.exp(logits[:, 0] - logits[:, 1]))
    output = build_reward("safety", options={"model": str(folder)})(inputs)
    np.testing.assert_allclose(output.values.numpy(), -unsafe, atol=1e-5)
    assert bool(output.valid.all())
    opposite = build_reward("safety", options={"model": str(folder), "label": "normal"})(inputs)
    np.testing.assert_allclose((output.values + opposite.values).numpy(), -1.0, atol=1e-5)


def test_values_are_pointwise_and_differ(folder: Path) -> None:
    inputs, reward = inputs_of(), build_reward("safety", options={"model": str(folder)})
    whole = reward(inputs).values
    assert len({round(v, 4) for v in whole.tolist()}) == len(inputs)
    torch.testing.assert_close(reward(inputs[[3, 1, 0, 2]]).values, whole[[3, 1, 0, 2]], rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat([reward(inputs[[i]]).values for i in range(4)]), whole, rtol=0, atol=1e-5)


def test_works_as_a_gate_of_other_rewards(folder: Path) -> None:
    """Samples below the gate get the lowest total of the others of their group."""
    inputs = inputs_of()
    alone = build_reward("safety", options={"model": str(folder)})(inputs).values
    size = build_reward("jpeg_incompressibility")(inputs).values
    gate = float(alone.sort().values[1:3].mean())
    specs: list[dict[str, Any]] = [
        {"name": "jpeg_incompressibility", "weight": 1.0},
        {"name": "safety", "weight": 0.0, "gate": gate, "options": {"model": str(folder)}},
    ]
    output = build_weighted_sum(specs)(inputs)
    expected = torch.where(alone < gate, size[alone >= gate].min(), size)
    torch.testing.assert_close(output.values, expected)
    assert output.parts["reward/safety/gated"].sum() == 2


def test_safety_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no class 'unsafe'; its classes: normal, nsfw"):
        build_reward("safety", options={"model": str(folder), "label": "unsafe"})
    with pytest.raises(ValueError, match=r"could not load the ViT classifier model"):
        build_reward("safety", options={"model": str(tmp_path)})
    with pytest.raises(ValueError, match="there is no folder"):
        reward_options("safety", {"model": "./none"})
    with pytest.raises(ValueError, match="label must name"):
        reward_options("safety", {"label": ""})


def test_version_and_options(folder: Path) -> None:
    reward = build_reward("safety", options={"model": str(folder)})
    assert reward.needs == {"images"}
    assert "-P(nsfw)" in reward.version
    assert "ViTImageProcessor" in reward.version
