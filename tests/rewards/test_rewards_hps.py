"""HPSv2: its preprocessing on drawn images, and open_clip's weights in transformers, at tiny and at full size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import open_clip  # type: ignore[import-untyped]
import pytest
import torch
import transformers
from PIL import Image
from tiny_clip import VOCABULARY, assert_pointwise, clip_inputs, inputs_of, text_tower, vision_tower, write_tiny_clip
from torch import Tensor

from flowrl.rewards import build_reward, hps, reward_options, to_uint8
from flowrl.rewards.hps import fit_size, pad_pixels
from flowrl.rewards.networks.clip_encoder import clip_from_open_clip, to_transformers

MEAN = np.array([0.48145466, 0.4578275, 0.40821073])[:, None, None]
STD = np.array([0.26862954, 0.26130258, 0.27577711])[:, None, None]


def tiny_open_clip(seed: int = 0) -> Any:
    """open_clip's own class: towers of different widths, depths and numbers of heads, and every weight random, biases
    too, so that none could take another's place unseen.
    """
    model = open_clip.CLIP(
        embed_dim=16,
        vision_cfg={"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 16},
        text_cfg={"context_length": 16, "vocab_size": VOCABULARY, "width": 24, "heads": 2, "layers": 3},
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


TINY_TEXT = {
    **text_tower(), "hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 3, "hidden_act": "gelu",
}  # fmt: skip
TINY_VISION = {**vision_tower(), "intermediate_size": 128, "num_attention_heads": 4, "hidden_act": "gelu"}


def tiny_config() -> Any:
    return transformers.CLIPConfig(text_config=TINY_TEXT, vision_config=TINY_VISION, projection_dim=16)


# ---- open_clip's weights in transformers -----------------------------------------------------------------------------


def test_remapped_weights_give_equal_features() -> None:
    """Images and texts of several lengths through both libraries."""
    source = tiny_open_clip()
    network = clip_from_open_clip(source.state_dict(), tiny_config(), owner="test")
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 3, 32, 32, generator=generator)
    words = torch.randint(0, VOCABULARY - 2, (3, 16), generator=generator)
    words[:, 0] = VOCABULARY - 2
    for row, length in enumerate((3, 9, 15)):
        words[row, length] = VOCABULARY - 1
        words[row, length + 1 :] = 0
    with torch.no_grad():
        image, text = source.encode_image(pixels), source.encode_text(words)
        other_image = network.get_image_features(pixel_values=pixels).pooler_output
        other_text = network.get_text_features(input_ids=words).pooler_output
    torch.testing.assert_close(other_image, image, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other_text, text, rtol=1e-4, atol=1e-5)
    assert network.logit_scale.item() == source.logit_scale.item()
    # A mix-up of queries and keys would show by far more than the tolerance.
    mixed = source.state_dict()
    for name in [name for name in mixed if "in_proj" in name]:
        queries, keys, values = mixed[name].chunk(3)
        mixed[name] = torch.cat([keys, queries, values])
    wrong = clip_from_open_clip(mixed, tiny_config(), owner="test")
    with torch.no_grad():
        assert float((wrong.get_image_features(pixel_values=pixels).pooler_output - image).abs().max()) > 1e-2
        assert float((wrong.get_text_features(input_ids=words).pooler_output - text).abs().max()) > 1e-2
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.slow
def test_published_names_and_shapes_are_those_of_vit_h_14() -> None:
    """All 986 million weights of open_clip's ViT-H-14 land in the configuration of this reward, without storage."""
    with torch.device("meta"):
        source = open_clip.CLIP(**open_clip.get_model_config("ViT-H-14"))
        config = transformers.CLIPConfig(
            text_config=hps.TEXT_TOWER, vision_config=hps.VISION_TOWER, projection_dim=hps.WIDTH
        )
        wanted = {name: tuple(tensor.shape) for name, tensor in transformers.CLIPModel(config).state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in to_transformers(source.state_dict()).items()}
    assert given == wanted
    assert sum(math.prod(shape) for shape in given.values()) == 986_109_441
    published = source.state_dict()
    for name, shape in {
        "visual.proj": (1280, 1024),
        "visual.conv1.weight": (1280, 3, 14, 14),
        "visual.positional_embedding": (257, 1280),
        "visual.transformer.resblocks.31.attn.in_proj_weight": (3840, 1280),
        "text_projection": (1024, 1024),
        "transformer.resblocks.23.mlp.c_fc.weight": (4096, 1024),
        "positional_embedding": (77, 1024),
    }.items():
        assert tuple(published[name].shape) == shape
    # Not seen in the weights:
    assert source.visual.transformer.resblocks[0].attn.num_heads == hps.VISION_TOWER["num_attention_heads"]
    assert source.transformer.resblocks[0].attn.num_heads == hps.TEXT_TOWER["num_attention_heads"]
    assert isinstance(source.transformer.resblocks[0].mlp.gelu, torch.nn.GELU)
    assert isinstance(source.visual.transformer.resblocks[0].mlp.gelu, torch.nn.GELU)


def test_checkpoints_that_do_not_fit_are_refused() -> None:
    state = tiny_open_clip().state_dict()
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({**state, "visual.attn_pool.query": torch.zeros(3)}, r"1 of \d+ weights have no place .*visual\.attn_pool"),
        ({name: tensor for name, tensor in state.items() if name != "ln_final.bias"}, r"final_layer_norm\.bias.*None"),
        ({**state, "visual.proj": torch.zeros(32, 8)}, r"visual_projection\.weight: wanted \(16, 32\)"),
        ({}, "weights do not fit"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            clip_from_open_clip(given, tiny_config(), owner="reward 'x'")
        assert str(caught.value).startswith("reward 'x': ")


# ---- preprocessing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "fitted", "before", "after"),
    [
        ((384, 512), (168, 224), (28, 0), (28, 0)),
        ((720, 1280), (126, 224), (49, 0), (49, 0)),
        ((512, 341), (224, 149), (0, 37), (0, 38)),
        ((512, 512), (224, 224), (0, 0), (0, 0)),
        ((100, 50), (224, 112), (0, 56), (0, 56)),
    ],
)
def test_long_side_is_224_and_the_rest_black(
    size: tuple[int, int], fitted: tuple[int, int], before: tuple[int, int], after: tuple[int, int]
) -> None:
    """An image of one colour stays that colour inside, and 0 before normalisation outside."""
    assert fit_size(*size) == fitted
    color = np.array([250, 25, 75])[:, None, None] / 255
    pixels = pad_pixels(torch.tensor(color, dtype=torch.float32).expand(1, 3, *size))
    assert pixels.shape == (1, 3, 224, 224)
    expected = np.zeros((3, 224, 224))
    expected[:, before[0] : 224 - after[0], before[1] : 224 - after[1]] = color
    np.testing.assert_allclose(pixels[0].numpy(), (expected - MEAN) / STD, atol=1e-5)


def plain_pixels(image: np.ndarray, size: int) -> np.ndarray:
    """[3, size, size]: Pillow's bicubic in floating point, black around, normalised."""
    height, width = image.shape[:2]
    scale = size / max(height, width)
    h, w = round(height * scale), round(width * scale)
    padded = np.zeros((3, size, size))
    for channel in range(3):
        plane = Image.fromarray(image[..., channel].astype(np.float32) / 255)
        top, left = (size - h) // 2, (size - w) // 2
        padded[channel, top : top + h, left : left + w] = np.asarray(plane.resize((w, h), Image.Resampling.BICUBIC))
    return np.asarray((padded - MEAN) / STD)


@pytest.mark.parametrize("size", [(60, 90), (91, 48), (20, 17)])
def test_pixels_are_pillows_bicubic(size: tuple[int, int]) -> None:
    """A drawn image, made smaller and larger; overshoot at the edges is not cut off."""
    y, x = np.mgrid[: size[0], : size[1]]
    image = np.stack([255 * x / size[1], 255 * ((x // 3 + y // 4) % 2), 255 * (y > x)], axis=-1).astype(np.uint8)
    images = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    pixels = pad_pixels(images, size=32)[0].numpy()
    np.testing.assert_allclose(pixels, plain_pixels(image, 32), atol=2e-5)
    assert float((pixels * STD + MEAN).max()) > 1.001


def test_images_are_taken_at_8_bits_and_the_gradient_passes() -> None:
    images = torch.rand(2, 3, 24, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rounded = torch.from_numpy(to_uint8(images)).permute(0, 3, 1, 2).float() / 255
    pixels = pad_pixels(images, size=32)
    torch.testing.assert_close(pixels, pad_pixels(rounded, size=32), rtol=0, atol=2e-6)
    pixels[:, 1].sum().backward()
    assert images.grad is not None
    # Resizing keeps the mean: each pixel counts (32 / 24)^2, over the deviation of its channel.
    assert float(images.grad[:, 1].mean()) == pytest.approx((32 / 24) ** 2 / 0.26130258, rel=1e-3)
    assert float(images.grad[:, 0].abs().max()) == 0


# ---- the reward ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both versions under their published names, of a tiny architecture."""
    monkeypatch.setattr(hps, "TEXT_TOWER", TINY_TEXT)
    monkeypatch.setattr(hps, "VISION_TOWER", TINY_VISION)
    monkeypatch.setattr(hps, "WIDTH", 16)
    torch.save({"state_dict": tiny_open_clip(0).state_dict()}, tmp_path / "HPS_v2_compressed.pt")
    half = {name: tensor.half() for name, tensor in tiny_open_clip(1).state_dict().items()}
    torch.save({"state_dict": half}, tmp_path / "HPS_v2.1_compressed.pt")
    return tmp_path


def plain_scores(seed: int, tokenizer: Path) -> np.ndarray:
    """open_clip's features of images that numpy and Pillow prepared, and their cosines."""
    inputs = clip_inputs()
    source = tiny_open_clip(seed)
    if seed == 1:
        source = source.half().float()
    pixels = np.stack([plain_pixels(image, 32) for image in to_uint8(inputs.images)])
    words = transformers.CLIPTokenizer.from_pretrained(tokenizer)
    ids = words(inputs.prompts, padding="max_length", truncation=True, max_length=16, return_tensors="pt")["input_ids"]
    for row in ids:  # open_clip pads with 0 behind the end of the text
        row[int((row == VOCABULARY - 1).nonzero()[0]) + 1 :] = 0
    with torch.no_grad():
        image = source.encode_image(torch.from_numpy(pixels).float()).double().numpy()
        text = source.encode_text(ids).double().numpy()
    cosine: np.ndarray = (image * text).sum(1) / np.linalg.norm(image, axis=1) / np.linalg.norm(text, axis=1)
    return cosine


@pytest.mark.slow
@pytest.mark.parametrize(("version", "seed"), [("v2", 0), ("v2.1", 1)])
def test_score_is_the_cosine_of_open_clips_features(
    version: str, seed: int, checkpoints: Path, tokenizer: Path
) -> None:
    reward = build_reward(
        "hps", options={"version": version, "checkpoint": str(checkpoints), "tokenizer": str(tokenizer)}
    )
    values = reward(clip_inputs()).values
    np.testing.assert_allclose(values.numpy(), plain_scores(seed, tokenizer), atol=1e-5)
    assert_pointwise(reward, clip_inputs())
    assert reward.needs == {"images", "prompts"}
    assert f"HPS_{version}_compressed.pt:cosine" in reward.version


@pytest.mark.slow
def test_default_is_v2_1_and_a_file_is_taken_as_it_is(checkpoints: Path, tokenizer: Path) -> None:
    default = build_reward("hps", options={"checkpoint": str(checkpoints), "tokenizer": str(tokenizer)})
    np.testing.assert_allclose(default(clip_inputs()).values.numpy(), plain_scores(1, tokenizer), atol=1e-5)
    file = str(checkpoints / "HPS_v2_compressed.pt")
    named = build_reward("hps", options={"checkpoint": file, "tokenizer": str(tokenizer)})
    np.testing.assert_allclose(named(clip_inputs()).values.numpy(), plain_scores(0, tokenizer), atol=1e-5)
    assert default.version.split(":")[-3] != named.version.split(":")[-3], "the fingerprints of the weights"
    assert default.version.split(":")[-2:] == ["long-side-bicubic-black", "float32"]


def test_threshold_makes_it_binary(checkpoints: Path, tokenizer: Path) -> None:
    scores = plain_scores(1, tokenizer)
    bound = float(np.sort(scores)[1:3].mean())
    options = {"checkpoint": str(checkpoints), "tokenizer": str(tokenizer), "threshold": bound}
    output = build_reward("hps", options=options)(clip_inputs())
    assert output.values.tolist() == (scores > bound).astype(float).tolist()
    assert sorted(output.values.tolist()) == [0, 0, 1, 1]
    np.testing.assert_allclose(output.parts["score"].numpy(), scores, atol=1e-5)


def test_gradient_reaches_the_images(checkpoints: Path, tokenizer: Path) -> None:
    reward = build_reward("hps", options={"checkpoint": str(checkpoints), "tokenizer": str(tokenizer)})
    assert reward.differentiable
    inputs = clip_inputs()
    leaf = inputs.images.clone().requires_grad_()
    reward(inputs_of(leaf, inputs.prompts)).values.sum().backward()
    assert leaf.grad is not None
    with torch.no_grad():
        moved = inputs_of((inputs.images + 0.01 * leaf.grad.sign()).clamp(0, 1), inputs.prompts)
        assert bool((reward(moved).values > reward(inputs).values).all())


def test_errors_come_before_or_instead_of_wrong_weights(checkpoints: Path, tokenizer: Path) -> None:
    options = {"checkpoint": str(checkpoints), "tokenizer": str(tokenizer)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"threshold": math.nan}, "threshold must be a finite number"),
        ({"version": "v3"}, "version must be one of v2, v2.1, got 'v3'"),
        ({"checkpoint": "./HPS.pt"}, r"option checkpoint: there is no file or folder '\./HPS\.pt'"),
        ({"checkpoint": "HPS_v2.1.pt"}, "option checkpoint: there is no file or folder"),
        ({"tokenizer": "./nowhere"}, r"there is no folder '\./nowhere': give tokenizer: a folder"),
    ]
    for changed, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("hps", {**options, **changed})
    with pytest.raises(ValueError, match=r"the folder .* holds no file HPS_v2\.1_compressed\.pt"):
        build_reward("hps", options={**options, "checkpoint": str(tokenizer)})
    damaged = checkpoints / "damaged.pt"
    damaged.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"could not read damaged\.pt"):
        build_reward("hps", options={**options, "checkpoint": str(damaged)})
    code = checkpoints / "code.pt"
    torch.save({"state_dict": {"logit_scale": torch.zeros(())}, "run": print}, code)
    with pytest.raises(ValueError, match=r"could not read code\.pt"):
        build_reward("hps", options={**options, "checkpoint": str(code)})
    with pytest.raises(ValueError, match=r"could not fetch HPS_v2\.1_compressed\.pt from 'someone/hps'"):
        build_reward("hps", options={**options, "checkpoint": "someone/hps"})
