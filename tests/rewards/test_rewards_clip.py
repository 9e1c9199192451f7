"""CLIPScore and PickScore on tiny random models of transformers and open_clip, made here without any download."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import open_clip  # type: ignore[import-untyped]
import pytest
import torch
import transformers
from PIL import Image
from tiny_clip import assert_pointwise, clip_inputs, inputs_of, random_images, write_tiny_clip
from torch import Tensor

from flowrl.rewards import build_reward, clip, reward_options, to_uint8
from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.clip_encoder import float_pixels

MEAN = np.array([0.48145466, 0.4578275, 0.40821073])[:, None, None]
STD = np.array([0.26862954, 0.26130258, 0.27577711])[:, None, None]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def tiny_open_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as open_clip writes it, for the tokenizer that comes with the package."""
    folder = tmp_path_factory.mktemp("open_clip")
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
    }
    preprocess = {"mean": MEAN.ravel().tolist(), "std": STD.ravel().tolist(), "interpolation": "bicubic"}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": preprocess}))
    torch.manual_seed(0)
    torch.save(open_clip.CLIP(**config).state_dict(), folder / "open_clip_pytorch_model.bin")
    return folder


def plain_logits(folder: Path) -> tuple[Tensor, float]:
    """The diagonal of the logits of the model's full forward pass, and its scale."""
    inputs = clip_inputs()
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    processor = transformers.CLIPProcessor.from_pretrained(folder)
    batch = processor(
        text=inputs.prompts,
        images=[Image.fromarray(image) for image in to_uint8(inputs.images)],
        padding="max_length",  # the reward pads to the longest: a causal text tower must not see the difference
        truncation=True,
        max_length=16,
        return_tensors="pt",
    )
    with torch.no_grad():
        return model(**batch).logits_per_image.diagonal(), float(model.logit_scale.exp())


# ---- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scale", "factor", "offset"),
    [
        ("clip_score", "logits", 1, 0),
        ("clip_score", "logits_100", 100, 0),
        ("clip_score", "logits_30", 30, 0),
        ("pick_score", "raw", 1, 0),
        ("pick_score", "flow_grpo", 26, 0),
        ("pick_score", "mixgrpo", 8, 18),
        ("pick_score", "cosine", None, 0),
        ("clip_score", "cosine", None, 0),
    ],
)
def test_scores_are_the_models_own_logits_scaled(
    name: str, scale: str, factor: float | None, offset: float, tiny_clip: Path
) -> None:
    """Against the model's full forward pass; a cosine is a logit over the model's scale."""
    logits, logit_scale = plain_logits(tiny_clip)
    values = build_reward(name, options={"model": str(tiny_clip), "scale": scale})(clip_inputs()).values
    torch.testing.assert_close(values, (logits - offset) / (factor or logit_scale), rtol=1e-5, atol=1e-5)
    assert float(values.max() - values.min()) > 1e-3


def test_defaults_are_the_cosine_and_flow_grpos_scale(tiny_clip: Path) -> None:
    logits, logit_scale = plain_logits(tiny_clip)
    for name, divisor in (("clip_score", logit_scale), ("pick_score", 26)):
        values = build_reward(name, options={"model": str(tiny_clip)})(clip_inputs()).values
        torch.testing.assert_close(values, logits / divisor, rtol=0, atol=1e-5)


def test_scalings_on_a_cosine_of_96_percent() -> None:
    """exp(logit_scale) = 100: s = 96."""
    cosine = torch.tensor([0.96, -0.5])
    clip_expected = {"cosine": 0.96, "logits": 96, "logits_100": 0.96, "logits_30": 3.2, "paper": 2.4}
    for clip_scale, value in clip_expected.items():
        got = clip.SCALES[clip_scale](cosine, 100.0)
        assert got[0].item() == pytest.approx(value, abs=1e-5)
        assert got[1].item() == pytest.approx(0.0 if clip_scale == "paper" else -0.5 * value / 0.96, abs=1e-5)
    pick_expected = {"flow_grpo": 3.692308, "cosine": 0.96, "mixgrpo": 9.75, "raw": 96.0}
    for pick_scale, value in pick_expected.items():
        got = clip.SCALES[pick_scale](cosine, 100.0)
        assert got[0].item() == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("name", ["clip_score", "pick_score"])
@pytest.mark.parametrize("preprocess", ["processor", "bilinear", "bicubic"])
def test_scores_are_pointwise(name: str, preprocess: str, tiny_clip: Path) -> None:
    options = {"model": str(tiny_clip), "scale": "cosine", "preprocess": preprocess}
    reward = build_reward(name, options=options)
    assert_pointwise(reward, clip_inputs())
    assert float(reward(clip_inputs()).values.abs().max()) <= 1.0
    assert reward.kind == "pointwise"
    assert reward.needs == {"images", "prompts"}


@pytest.mark.parametrize("wrapped", [False, True])
def test_features_may_come_as_tensor_or_as_output(wrapped: bool) -> None:
    def embeds(row: list[float]) -> Any:
        features = torch.tensor([row])
        return SimpleNamespace(pooler_output=features) if wrapped else features

    network = SimpleNamespace(get_image_features=lambda pixel_values: embeds([3.0, 4.0]))
    image = pretrained.clip_image(network, torch.zeros(1, 3, 2, 2))
    torch.testing.assert_close(image, torch.tensor([[0.6, 0.8]]))


def test_threshold_gives_0_and_1_and_keeps_the_score(tiny_clip: Path) -> None:
    options = {"model": str(tiny_clip), "preprocess": "bicubic"}
    plain = build_reward("clip_score", options=options)
    score = plain(clip_inputs()).values
    bound = float(score.sort().values[1])  # two of four lie above, one on it, one below
    binary = build_reward("clip_score", options={**options, "threshold": bound})
    output = binary(clip_inputs())
    assert output.values.tolist() == (score > bound).float().tolist()
    assert output.values.sum() == 2
    torch.testing.assert_close(output.parts["score"], score, rtol=0, atol=0)
    assert plain.differentiable
    assert not binary.differentiable
    assert binary.version != plain.version


def test_an_image_that_is_not_finite_fails_alone(tiny_clip: Path) -> None:
    """A NaN, also one outside the crop, is no score: neither above a threshold nor below it."""
    inputs = clip_inputs()
    inputs.images[1, 0, 3, 28] = math.nan
    inputs.images[2, 0, 3, 0] = math.nan
    for threshold in (None, -2.0):
        options = {"model": str(tiny_clip), "preprocess": "bilinear", "threshold": threshold}
        output = build_reward("clip_score", options=options)(inputs)
        assert output.valid.tolist() == [True, False, False, True]
        assert torch.isnan(output.values).tolist() == [False, True, True, False]
        assert output.errors == {"not_finite": 2}


# ---- preprocessing ---------------------------------------------------------------------------------------------------


def drawn(height: int, width: int) -> np.ndarray:
    """8-bit [H, W, 3]: a slope, bars and a block, so that a shift, a flip or a wrong filter shows."""
    y, x = np.mgrid[:height, :width]
    image = np.stack([255 * x / (width - 1), 255 * ((x // 3) % 2), 255 * y / (height - 1)], axis=-1)
    image[height // 4 : height // 2, width // 3 : width // 2] = (250, 10, 60)
    return image.round().astype(np.uint8)


def plain_square(image: np.ndarray, size: int, how: Image.Resampling) -> np.ndarray:
    """[3, size, size] in [0, 1]: short side to `size` by Pillow in floating point, the middle square."""
    height, width = image.shape[:2]
    short = min(height, width)
    target = (int(size * width / short), int(size * height / short))
    planes = [Image.fromarray(image[..., c].astype(np.float32) / 255).resize(target, how) for c in range(3)]
    array = np.stack([np.asarray(plane) for plane in planes])
    top, left = round((array.shape[1] - size) / 2), round((array.shape[2] - size) / 2)
    return array[:, top : top + size, left : left + size]


@pytest.mark.parametrize("size", [(64, 64), (60, 90), (91, 48)])
@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
def test_float_preprocessing_is_resize_crop_normalise(size: tuple[int, int], how: Any) -> None:
    image = drawn(*size)
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    expected = (plain_square(image, 32, filters[how]) - MEAN) / STD
    images = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    pixels = float_pixels(images, size=32, interpolation=how)
    np.testing.assert_allclose(pixels[0].numpy(), expected, atol=2e-5)


def test_processor_is_bicubic_on_8_bits(tiny_clip: Path) -> None:
    """Within a level or so of Pillow: the processor resizes with torchvision, in integers as Pillow does."""
    processor = transformers.CLIPProcessor.from_pretrained(tiny_clip).image_processor
    image = drawn(60, 90)
    pixels = processor([Image.fromarray(image)], return_tensors="pt")["pixel_values"][0].numpy()
    resized = Image.fromarray(image).resize((48, 32), Image.Resampling.BICUBIC).crop((8, 0, 40, 32))
    expected = np.asarray(resized).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(pixels * STD + MEAN, expected, atol=1.01 / 255)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clip_score", "pick_score"])
def test_float_preprocessing_lets_the_gradient_through(name: str, tiny_clip: Path) -> None:
    """Along one direction against central differences; the model itself gets no gradient."""
    options = {"model": str(tiny_clip), "preprocess": "bicubic", "scale": "cosine"}
    reward = build_reward(name, options=options)
    assert reward.differentiable
    inputs = clip_inputs()
    direction = random_images(4, 40, 56, seed=7) - 0.5
    leaf = inputs.images.clone().requires_grad_()
    reward(inputs_of(leaf, inputs.prompts)).values.sum().backward()
    assert leaf.grad is not None
    step = 1e-2
    ends = [
        reward(inputs_of(inputs.images + sign * step * direction, inputs.prompts)).values.double().sum()
        for sign in (1, -1)
    ]
    slope = float((ends[0] - ends[1]) / (2 * step))
    assert float((leaf.grad * direction).sum()) == pytest.approx(slope, rel=0.02, abs=1e-4)
    assert abs(slope) > 1e-3
    network, _ = pretrained.load_clip(str(tiny_clip), device=CPU, owner="test", option="model")
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in network.parameters())


def test_no_graph_where_none_is_wanted(tiny_clip: Path) -> None:
    inputs = clip_inputs()
    leaf = inputs_of(inputs.images.clone().requires_grad_(), inputs.prompts)
    exact = build_reward("clip_score", options={"model": str(tiny_clip)})
    assert not exact.differentiable
    assert not exact(leaf).values.requires_grad
    soft = build_reward("clip_score", options={"model": str(tiny_clip), "preprocess": "bilinear"})
    assert not soft(inputs).values.requires_grad
    with torch.no_grad():
        assert not soft(leaf).values.requires_grad


# ---- open_clip -------------------------------------------------------------------------------------------------------


def test_open_clip_score_is_the_cosine_of_its_features(tiny_open_clip: Path) -> None:
    """Its transform by hand with Pillow on 8 bits, its features from its own forward pass."""
    options = {"library": "open_clip", "model": f"local-dir:{tiny_open_clip}"}
    reward = build_reward("clip_score", options=options)
    inputs = clip_inputs()
    config = json.loads((tiny_open_clip / "open_clip_config.json").read_text())["model_cfg"]
    model = open_clip.CLIP(**config).eval()
    model.load_state_dict(torch.load(tiny_open_clip / "open_clip_pytorch_model.bin", weights_only=True))
    pixels = []
    for image in to_uint8(inputs.images):
        square = Image.fromarray(image).resize((44, 32), Image.Resampling.BICUBIC).crop((6, 0, 38, 32))
        pixels.append((np.asarray(square).transpose(2, 0, 1) / 255 - MEAN) / STD)
    with torch.no_grad():
        image_features, text_features, scale = model(
            torch.from_numpy(np.stack(pixels)).float(), open_clip.tokenize(inputs.prompts)
        )
    cosine = (image_features * text_features).sum(-1)
    torch.testing.assert_close(reward(inputs).values, cosine, rtol=0, atol=1e-5)
    logits = build_reward("clip_score", options={**options, "scale": "logits"})(inputs).values
    torch.testing.assert_close(logits, scale * cosine, rtol=0, atol=1e-4)
    assert_pointwise(reward, inputs)
    assert not reward.differentiable


def test_open_clip_errors(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": "ViT-H-14"}, "model must be architecture/weights such as ViT-H-14/laion2b_s32b_b79k"),
        ({"model": "local-dir:./nowhere"}, r"there is no folder '\./nowhere'"),
        ({"model": "ViT-H-14/laion2b_s32b_b79k", "revision": "main"}, "revision is for library transformers"),
        ({"model": "ViT-H-14/laion2b_s32b_b79k", "preprocess": "bicubic"}, "preprocess is for library transformers"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("clip_score", {"library": "open_clip", **options})
    reward_options("clip_score", {"library": "open_clip", "model": "hf-hub:apple/DFN5B-CLIP-ViT-H-14-384"})
    for model in (f"local-dir:{tmp_path}", "ViT-H-140/laion2b", "ViT-B-32/no-such-weights"):
        with pytest.raises(ValueError, match="could not load the open_clip model") as caught:
            build_reward("clip_score", options={"library": "open_clip", "model": model})
        assert "\n" not in str(caught.value)


# ---- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rewards_share_one_network_while_one_uses_it(tiny_clip: Path) -> None:
    def load(**options: Any) -> Any:
        return pretrained.load_network(
            transformers.CLIPModel, str(tiny_clip), device=CPU, owner="test", option="model", what="CLIP", **options
        )

    one = load()
    assert load() is one
    own = load(shared=False)
    assert own is not one
    assert load(shared=False) is not own
    half = load(dtype=torch.bfloat16)
    assert half is not one
    assert half.logit_scale.dtype == torch.bfloat16
    # Only a test may change it; a reward built now shows whether it is the one changed.
    before = build_reward("clip_score", options={"model": str(tiny_clip)})(clip_inputs()).values
    with torch.no_grad():
        one.visual_projection.weight.neg_()
    changed = build_reward("clip_score", options={"model": str(tiny_clip)})
    torch.testing.assert_close(changed(clip_inputs()).values, -before)
    del one, changed
    gc.collect()
    after = build_reward("clip_score", options={"model": str(tiny_clip)})(clip_inputs()).values
    torch.testing.assert_close(after, before)


def test_version_names_weights_scale_and_preprocessing(tiny_clip: Path, tmp_path: Path) -> None:
    other = write_tiny_clip(tmp_path / "other", seed=3)
    made = [
        build_reward("clip_score", options=options).version
        for options in (
            {"model": str(tiny_clip)},
            {"model": str(tiny_clip), "scale": "paper"},
            {"model": str(tiny_clip), "preprocess": "bilinear"},
            {"model": str(other)},
        )
    ]
    assert len(set(made)) == 4
    weights = [version.split(":")[3] for version in made]
    assert weights[0] == weights[1] == weights[2] != weights[3]
    assert made[0].startswith(f"clip_score:{tiny_clip}:cosine:")
    assert made[0].endswith(":CLIPImageProcessor:float32")


@pytest.mark.parametrize("name", ["clip_score", "pick_score"])
def test_clip_errors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"there is no folder '\./no-such-folder'"):
        reward_options(name, {"model": "./no-such-folder"})
    with pytest.raises(ValueError, match=r"could not load the CLIP model .*Give model: a folder") as caught:
        build_reward(name, options={"model": str(tmp_path)})
    assert "\n" not in str(caught.value)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"threshold": math.inf}, "threshold must be a finite number or null, got inf"),
        ({"scale": "cosin"}, "scale must be one of cosine, |scale must be one of flow_grpo, "),
        ({"preprocess": "nearest"}, "preprocess must be one of processor, bilinear, bicubic"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options(name, options)

    def unreachable(*arguments: Any, **options: Any) -> None:
        raise OSError("We couldn't connect to the hub.\nDetails of three lines.")

    monkeypatch.setattr(transformers.CLIPModel, "from_pretrained", unreachable)
    with pytest.raises(ValueError, match=r"'someone/clip': We couldn't connect to the hub\. Give model"):
        build_reward(name, options={"model": "someone/clip"})
