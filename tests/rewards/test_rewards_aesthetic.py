"""LAION's aesthetic head on a tiny random CLIP with embeddings of the published width."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tiny_clip import assert_pointwise, clip_inputs, inputs_of, write_tiny_clip
from torch import Tensor

from flowrl.rewards import build_reward, reward_options, to_uint8
from flowrl.rewards.aesthetic import head_of
from flowrl.rewards.image_reward import linear_head


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_clip(tmp_path_factory.mktemp("clip"), projection=768)


def head_shapes() -> dict[str, tuple[int, ...]]:
    return {f"layers.{name}": tuple(weight.shape) for name, weight in linear_head(768).state_dict().items()}


def random_head(seed: int = 0) -> dict[str, Tensor]:
    """A head whose value stays of order one, biases included."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) / (math.sqrt(shape[1]) if len(shape) > 1 else 2)
        for name, shape in head_shapes().items()
    }


def affine(head: dict[str, Tensor]) -> tuple[np.ndarray, float]:
    """The five layers as one: a vector and a number."""
    matrix, offset = np.eye(768), np.zeros(768)
    for place in (0, 2, 4, 6, 7):
        weight = head[f"layers.{place}.weight"].double().numpy()
        matrix = weight @ matrix
        offset = weight @ offset + head[f"layers.{place}.bias"].double().numpy()
    return matrix[0], float(offset[0])


def test_head_has_the_published_names_and_size() -> None:
    shapes = head_shapes()
    assert shapes["layers.0.weight"] == (1024, 768)
    assert shapes["layers.2.weight"] == (128, 1024)
    assert shapes["layers.4.weight"] == (64, 128)
    assert shapes["layers.6.weight"] == (16, 64)
    assert shapes["layers.7.weight"] == (1, 16)
    assert shapes["layers.7.bias"] == (1,)
    assert len(shapes) == 10
    assert sum(math.prod(shape) for shape in shapes.values()) == 927_969


def test_head_is_one_affine_map() -> None:
    head = {name: tensor.double() for name, tensor in random_head().items()}
    module = head_of(head)
    x, y = torch.randn(2, 3, 768, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mixed = module(0.3 * x + 0.7 * y)
    torch.testing.assert_close(mixed, 0.3 * module(x) + 0.7 * module(y), rtol=0, atol=1e-12)
    vector, offset = affine(head)
    np.testing.assert_allclose(module(x)[:, 0].numpy(), x.numpy() @ vector + offset, atol=1e-12)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_score_is_the_affine_map_of_the_unit_embedding(suffix: str, tiny_clip: Path, tmp_path: Path) -> None:
    """The embedding from the model's full forward pass, the head collapsed in float64."""
    head, path = random_head(), tmp_path / f"head{suffix}"
    save_file(head, path) if suffix == ".safetensors" else torch.save(head, path)
    reward = build_reward("aesthetic", options={"model": str(tiny_clip), "head": str(path)})
    inputs = clip_inputs()
    model = transformers.CLIPModel.from_pretrained(tiny_clip).eval()
    processor = transformers.CLIPProcessor.from_pretrained(tiny_clip)
    images = [Image.fromarray(image) for image in to_uint8(inputs.images)]
    with torch.no_grad():
        embeddings = model(**processor(text=["x"], images=images, return_tensors="pt")).image_embeds.double().numpy()
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)
    vector, offset = affine(head)
    np.testing.assert_allclose(reward(inputs).values.numpy(), embeddings @ vector + offset, atol=1e-5)
    assert_pointwise(reward, inputs)
    assert reward.needs == {"images"}
    assert not reward.differentiable
    torch.testing.assert_close(reward(inputs_of(inputs.images, ["other"] * 4)).values, reward(inputs).values)


def test_float_preprocessing_lets_the_gradient_through(tiny_clip: Path, tmp_path: Path) -> None:
    save_file(random_head(), tmp_path / "model.safetensors")
    options = {"model": str(tiny_clip), "head": str(tmp_path), "preprocess": "bicubic"}
    reward = build_reward("aesthetic", options=options)
    assert reward.differentiable
    inputs = clip_inputs()
    leaf = inputs.images.clone().requires_grad_()
    reward(inputs_of(leaf)).values.sum().backward()
    assert leaf.grad is not None
    moved = inputs_of((inputs.images + 0.002 * leaf.grad.sign()).clamp(0, 1))
    assert bool((reward(moved).values > reward(inputs).values).all())


def test_version_tells_heads_apart(tiny_clip: Path, tmp_path: Path) -> None:
    versions = []
    for seed in (0, 1):
        save_file(random_head(seed), tmp_path / "model.safetensors")
        options = {"model": str(tiny_clip), "head": str(tmp_path)}
        versions.append(build_reward("aesthetic", options=options).version)
    assert versions[0] != versions[1]


def test_errors_name_what_does_not_fit(tiny_clip: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": "./nowhere"}, r"there is no folder '\./nowhere'"),
        ({"head": "./head.pth"}, r"option head: there is no file or folder '\./head\.pth'"),
        ({"preprocess": "lanczos"}, "preprocess must be"),
        ({"scale": "raw"}, "unknown key 'scale'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("aesthetic", options)
    head = random_head()
    path = tmp_path / "head.safetensors"
    for wrong, message in (
        ({name: tensor for name, tensor in head.items() if name != "layers.7.bias"}, r"layers\.7\.bias: wanted \(1,\)"),
        ({**head, "layers.1.weight": torch.ones(3)}, r"layers\.1\.weight: wanted None, got \(3,\)"),
        ({**head, "layers.0.weight": torch.ones(1024, 512)}, r"wanted \(1024, 768\), got \(1024, 512\)"),
    ):
        save_file(wrong, path)
        with pytest.raises(ValueError, match=message):
            build_reward("aesthetic", options={"model": str(tiny_clip), "head": str(path)})
    save_file(head, path)
    narrow = write_tiny_clip(tmp_path / "narrow")
    with pytest.raises(ValueError, match=r"reads embeddings of width 768, those of .* have 16"):
        build_reward("aesthetic", options={"model": str(narrow), "head": str(path)})
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"could not read head\.safetensors"):
        build_reward("aesthetic", options={"model": str(tiny_clip), "head": str(path)})
