"""Similarity to reference images on tiny random models of DINOv2 and CLIP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_clip import assert_pointwise, inputs_of, random_images, write_tiny_clip
from torch import Tensor

from flowrl.rewards import RewardInputs, build_reward, reward_options, similarity, to_uint8
from flowrl.rewards.image_files import image_files, read_image
from flowrl.rewards.networks.pretrained import load_network


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dino")
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14, layerscale_value=1.0
    )
    torch.manual_seed(0)
    model = transformers.Dinov2Model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    transformers.BitImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28}, resample=3,
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_clip(tmp_path_factory.mktemp("clip"))


def referenced(counts: tuple[int, ...] = (1, 3, 2)) -> RewardInputs:
    """Samples with some references each, of other sizes than their own."""
    references = [
        [random_images(1, 30 + 8 * j, 44, seed=10 * i + j)[0] for j in range(n)] for i, n in enumerate(counts)
    ]
    return inputs_of(random_images(len(counts), 36, 36, seed=99), reference_images=references)


def plain_features(kind: str, folder: Path, image: Tensor) -> np.ndarray:
    """The unit feature of one image, float64."""
    drawn = Image.fromarray(to_uint8(image[None])[0])
    with torch.no_grad():
        if kind == "clip":
            processor = transformers.CLIPProcessor.from_pretrained(folder)
            model = transformers.CLIPModel.from_pretrained(folder).eval()
            feature = model(**processor(text=["x"], images=[drawn], return_tensors="pt")).image_embeds[0]
        else:
            processor = transformers.BitImageProcessor.from_pretrained(folder)
            model = transformers.Dinov2Model.from_pretrained(folder).eval()
            output = model(**processor([drawn], return_tensors="pt"))
            feature = output.pooler_output[0] if kind == "cls" else output.last_hidden_state[0, 1:].mean(0)
    array: np.ndarray = feature.double().numpy()
    return array / np.linalg.norm(array)


@pytest.mark.parametrize("kind", ["cls", "mean", "clip"])
def test_value_is_the_largest_cosine(kind: str, dino: Path, clip: Path) -> None:
    folder = clip if kind == "clip" else dino
    options: dict[str, Any] = {"model": str(folder)}
    options |= {"features": "clip"} if kind == "clip" else {"pooling": kind}
    reward = build_reward("similarity", options=options)
    inputs = referenced()
    expected = []
    assert inputs.reference_images is not None
    for image, references in zip(inputs.images, inputs.reference_images, strict=True):
        own = plain_features(kind, folder, image)
        expected.append(max(float(own @ plain_features(kind, folder, other)) for other in references))
    np.testing.assert_allclose(reward(inputs).values.numpy(), expected, atol=1e-5)
    assert reward.needs == {"images", "reference_images"}
    assert not reward.differentiable
    assert_pointwise(reward, inputs)


def test_an_image_among_its_references_scores_1(dino: Path) -> None:
    inputs = referenced()
    assert inputs.reference_images is not None
    inputs.reference_images[1].append(inputs.images[1])
    values = build_reward("similarity", options={"model": str(dino)})(inputs).values
    assert values[1].item() == pytest.approx(1.0, abs=1e-5)
    assert values[0] < 0.999


def test_without_references_a_sample_fails(dino: Path) -> None:
    reward = build_reward("similarity", options={"model": str(dino)})
    output = reward(referenced((2, 0, 1)))
    assert output.valid.tolist() == [True, False, True]
    assert torch.isnan(output.values).tolist() == [False, True, False]
    assert output.errors == {"missing_reference": 1}


def test_references_are_encoded_once(dino: Path) -> None:
    """Counted on the network, which is the one that the reward holds."""
    reward = build_reward("similarity", options={"model": str(dino)})
    network = load_network(
        transformers.Dinov2Model, str(dino), device=torch.device("cpu"), owner="test", option="model", what="DINOv2"
    )
    seen: list[int] = []
    handle = network.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    inputs = referenced((1, 3, 2))
    first = reward(inputs).values
    assert seen == [6, 3]
    torch.testing.assert_close(reward(inputs).values, first, rtol=0, atol=1e-6)
    assert seen == [6, 3, 3]
    assert inputs.reference_images is not None
    inputs.reference_images[0].append(inputs.reference_images[1][0])  # another sample's
    reward(inputs)
    assert seen == [6, 3, 3, 3]
    handle.remove()


def test_memory_of_references_is_bounded(dino: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgetting changes no value."""
    whole = build_reward("similarity", options={"model": str(dino)})(referenced()).values
    monkeypatch.setattr(similarity, "REMEMBERED", 2)
    monkeypatch.setattr(similarity, "BATCH", 2)
    reward = build_reward("similarity", options={"model": str(dino)})
    for _ in range(2):
        torch.testing.assert_close(reward(referenced()).values, whole, rtol=0, atol=1e-5)


# ---- files -----------------------------------------------------------------------------------------------------------


def write_images(folder: Path, count: int) -> Tensor:
    """PNG files and what they hold."""
    folder.mkdir(exist_ok=True)
    images = random_images(count, 33, 40, seed=5)
    for i, array in enumerate(to_uint8(images)):
        Image.fromarray(array).save(folder / f"{i}.png")
    return torch.from_numpy(to_uint8(images)).permute(0, 3, 1, 2).float() / 255


def test_a_folder_serves_every_prompt(dino: Path, tmp_path: Path) -> None:
    images = write_images(tmp_path, 3)
    (tmp_path / "notes.txt").write_text("no image")
    inputs = inputs_of(random_images(4, 36, 36, seed=99))
    given = inputs_of(inputs.images, reference_images=[list(images)] * 4)
    expected = build_reward("similarity", options={"model": str(dino)})(given).values
    reward = build_reward("similarity", options={"model": str(dino), "references": str(tmp_path)})
    torch.testing.assert_close(reward(inputs).values, expected, rtol=0, atol=1e-5)
    assert reward.needs == {"images"}
    before = reward.version
    write_images(tmp_path, 2)
    Image.new("RGB", (9, 9)).save(tmp_path / "2.png")
    after = build_reward("similarity", options={"model": str(dino), "references": str(tmp_path)}).version
    assert before != after, "the version names the images by their content"


def test_a_json_file_names_references_by_prompt(dino: Path, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 3)
    table = {"a dog": ["images/0.png", "images/2.png"], "a cat": ["images/1.png"]}
    (tmp_path / "references.json").write_text(json.dumps(table))
    inputs = inputs_of(random_images(3, 36, 36, seed=99), ["a cat", "a dog", "a cow"])
    given = inputs_of(inputs.images, reference_images=[[images[1]], [images[0], images[2]], []])
    expected = build_reward("similarity", options={"model": str(dino)})(given)
    options = {"model": str(dino), "references": str(tmp_path / "references.json")}
    reward = build_reward("similarity", options=options)
    output = reward(inputs)
    torch.testing.assert_close(output.values, expected.values, rtol=0, atol=1e-5, equal_nan=True)
    assert output.errors == {"missing_reference": 1}
    assert reward.needs == {"images", "prompts"}


def test_reference_files_lie_as_they_are_looked_at(tmp_path: Path) -> None:
    Image.new("RGBA", (3, 2), (9, 9, 9, 0)).save(tmp_path / "clear.png")
    assert read_image(tmp_path / "clear.png").tolist() == [[[255, 255, 255]] * 3] * 2
    turned = Image.Exif()
    turned[0x0112] = 6  # orientation: a quarter turn
    Image.new("RGB", (3, 2), (9, 9, 9)).save(tmp_path / "turned.jpg", exif=turned)
    assert read_image(tmp_path / "turned.jpg").shape == (3, 2, 3)
    (tmp_path / "deeper").mkdir()
    Image.new("RGB", (3, 2)).save(tmp_path / "deeper" / "black.png")
    Image.fromarray(np.full((1, 1), 128 * 257, np.uint16)).save(tmp_path / "wide.png")
    assert read_image(tmp_path / "wide.png").tolist() == [[[128] * 3]], "16 bits become 8"
    listed = [path.name for path in image_files(str(tmp_path))[None]]
    assert listed == ["clear.png", "black.png", "turned.jpg", "wide.png"]


def test_similarity_errors(dino: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    files: dict[str, tuple[Any, str]] = {
        "list.json": (["a.png"], "lists no references"),
        "none.json": ({"a dog": []}, r"must give each prompt a file or a list of files, got \[\] for 'a dog'"),
        "number.json": ({"a dog": 3}, "must give each prompt a file or a list of files, got 3 for 'a dog'"),
        "gone.json": ({"a dog": ["gone.png"]}, r"lists 1 files that are not there \(first: .*gone\.png"),
    }
    for name, (content, message) in files.items():
        (tmp_path / name).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            reward_options("similarity", {"references": str(tmp_path / name)})
    (tmp_path / "broken.json").write_text("{")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"references": str(tmp_path / "broken.json")}, "not valid JSON"),
        ({"references": str(empty)}, "holds no images"),
        ({"references": "./nowhere"}, "which is neither"),
        ({"features": "clip", "pooling": "mean"}, "pooling is for features dinov2"),
        ({"features": "dino"}, "features must be one of dinov2, clip"),
        ({"model": "./nowhere"}, r"there is no folder '\./nowhere': give model: a folder with a DINOv2 model"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("similarity", options)
    (empty / "torn.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"torn\.png cannot be read as an image"):
        build_reward("similarity", options={"model": str(dino), "references": str(empty)})
    reward = build_reward("similarity", options={"model": str(dino)})
    with pytest.raises(ValueError, match="needs reference images, and the samples have none"):
        reward(inputs_of(random_images(2, 36, 36)))
