"""ImageReward: names of the published checkpoint, the arithmetic from those names by hand, and the whole scorer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rounding import assert_same_sum, rounding
from torch import Tensor
from torch.nn import functional

from flowrl.rewards import RewardInputs, build_reward, image_reward, reward_options, to_uint8
from flowrl.rewards.networks.clip_encoder import clip_pixels

MEAN, STD = 0.16717362830052426, 1.0333394966054072
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "dog", "cat", "and", "two"]


def published_shapes(
    *, width: int, layers: int, side: int, patch: int, text_width: int, text_layers: int, words: int, positions: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of ImageReward.pt, as its own code declares them."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes.update({f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)})

    def norm(name: str, size: int) -> None:
        shapes.update({f"{name}.weight": (size,), f"{name}.bias": (size,)})

    v, t = "blip.visual_encoder", "blip.text_encoder"
    shapes[f"{v}.cls_token"] = (1, 1, width)
    shapes[f"{v}.pos_embed"] = (1, 1 + (side // patch) ** 2, width)
    shapes.update({f"{v}.patch_embed.proj.weight": (width, 3, patch, patch), f"{v}.patch_embed.proj.bias": (width,)})
    for i in range(layers):
        norm(f"{v}.blocks.{i}.norm1", width)
        linear(f"{v}.blocks.{i}.attn.qkv", 3 * width, width)
        linear(f"{v}.blocks.{i}.attn.proj", width, width)
        norm(f"{v}.blocks.{i}.norm2", width)
        linear(f"{v}.blocks.{i}.mlp.fc1", 4 * width, width)
        linear(f"{v}.blocks.{i}.mlp.fc2", width, 4 * width)
    norm(f"{v}.norm", width)
    shapes[f"{t}.embeddings.position_ids"] = (1, positions)
    shapes[f"{t}.embeddings.word_embeddings.weight"] = (words, text_width)
    shapes[f"{t}.embeddings.position_embeddings.weight"] = (positions, text_width)
    norm(f"{t}.embeddings.LayerNorm", text_width)
    for i in range(text_layers):
        layer = f"{t}.encoder.layer.{i}"
        for kind, seen in (("attention", text_width), ("crossattention", width)):
            linear(f"{layer}.{kind}.self.query", text_width, text_width)
            linear(f"{layer}.{kind}.self.key", text_width, seen)
            linear(f"{layer}.{kind}.self.value", text_width, seen)
            linear(f"{layer}.{kind}.output.dense", text_width, text_width)
            norm(f"{layer}.{kind}.output.LayerNorm", text_width)
        linear(f"{layer}.intermediate.dense", 4 * text_width, text_width)
        linear(f"{layer}.output.dense", text_width, 4 * text_width)
        norm(f"{layer}.output.LayerNorm", text_width)
    linear("blip.vision_proj", 256, width)
    linear("blip.text_proj", 256, text_width)
    sizes = (text_width, 1024, 128, 64, 16, 1)
    for place, inputs, outputs in zip((0, 2, 4, 6, 7), sizes, sizes[1:], strict=False):
        linear(f"mlp.layers.{place}", outputs, inputs)
    return shapes


TINY = published_shapes(
    width=128, layers=2, side=32, patch=16, text_width=128, text_layers=2, words=len(WORDS) + 2, positions=48
)

DEPTH = 6_300
"""Roundings from pixels to a score: 768 of the patches, 900 of each image layer, 1,170 of each text layer, 1,360 of the
head."""


def random_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in TINY.items():
        scale = 0.3 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5 if len(shape) == 2 else 0.2
        base = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
        weights[name] = base + scale * torch.randn(shape, generator=generator)
    return weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the published names and a BERT tokenizer of a dozen words."""
    import transformers

    path = tmp_path_factory.mktemp("image_reward")
    torch.save(random_weights(), path / "ImageReward.pt")
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(path)
    return path


def inputs_of(prompts: list[str]) -> RewardInputs:
    batch = len(prompts)
    return RewardInputs(
        prompts=prompts, images=torch.rand(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1)),
        metadata=[{}] * batch, group_ids=torch.zeros(batch, dtype=torch.int64), sample_ids=torch.arange(batch),
    )  # fmt: skip


def options_of(folder: Path) -> dict[str, str]:
    return {"model": str(folder), "tokenizer": str(folder)}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention with heads of 64 on [l, d] matrices."""
    heads = []
    for h in range(q.shape[1] // 64):
        s = slice(64 * h, 64 * h + 64)
        logits = q[:, s] @ k[:, s].T / 8.0
        heads.append((logits if mask is None else logits.masked_fill(~mask, -torch.inf)).softmax(-1) @ v[:, s])
    return torch.cat(heads, dim=1)


def by_hand(weights: dict[str, Tensor], image: np.ndarray, tokens: list[int]) -> float:
    """One value from the published names alone, float64, without padding: the padded text must give the same."""
    w = {name: weight.double() for name, weight in weights.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(name: str, x: Tensor, eps: float) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    v, t = "blip.visual_encoder", "blip.text_encoder"
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073], dtype=torch.float64)[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711], dtype=torch.float64)[:, None, None]
    pixels = (torch.from_numpy(image).permute(2, 0, 1).double() / 255 - mean) / std
    patches = functional.conv2d(
        pixels[None], w[f"{v}.patch_embed.proj.weight"], w[f"{v}.patch_embed.proj.bias"], stride=16
    )
    x = torch.cat([w[f"{v}.cls_token"][0], patches[0].flatten(1).T]) + w[f"{v}.pos_embed"][0]
    for i in range(2):
        block = f"{v}.blocks.{i}"
        q, k, value = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", x, 1e-6)).chunk(3, dim=1)
        x = x + linear(f"{block}.attn.proj", attend(q, k, value))
        x = x + linear(f"{block}.mlp.fc2", functional.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x, 1e-6))))
    image_tokens = norm(f"{v}.norm", x, 1e-6)
    x = w[f"{t}.embeddings.word_embeddings.weight"][tokens]
    x = x + w[f"{t}.embeddings.position_embeddings.weight"][: len(tokens)]
    x = norm(f"{t}.embeddings.LayerNorm", x, 1e-12)
    for i in range(2):
        layer = f"{t}.encoder.layer.{i}"
        for kind in ("attention", "crossattention"):
            seen = x if kind == "attention" else image_tokens
            q, k, value = (
                linear(f"{layer}.{kind}.self.{n}", s) for n, s in (("query", x), ("key", seen), ("value", seen))
            )
            x = norm(
                f"{layer}.{kind}.output.LayerNorm",
                x + linear(f"{layer}.{kind}.output.dense", attend(q, k, value)),
                1e-12,
            )
        hidden = functional.gelu(linear(f"{layer}.intermediate.dense", x))
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", hidden), 1e-12)
    output = x[0]
    for place in (0, 2, 4, 6, 7):
        output = linear(f"mlp.layers.{place}", output)
    return (float(output) - MEAN) / STD


def test_every_published_name_has_its_place_in_the_full_size_model() -> None:
    """Names and shapes of the real checkpoint, without memory, against transformers' modules of the same size."""
    import transformers

    shapes = published_shapes(
        width=1024, layers=24, side=224, patch=16, text_width=768, text_layers=12, words=30524, positions=512
    )
    with torch.device("meta"):
        weights = {name: torch.empty(shape) for name, shape in shapes.items()}
        image, text, head = image_reward.to_transformers(weights)
        vision_config, text_config = image_reward.configs(image, text)
        modules = (
            transformers.BlipVisionModel(vision_config),
            transformers.BlipTextModel(text_config, add_pooling_layer=False),
            image_reward.linear_head(768),
        )
    for module, state in zip(modules, (image, text, head), strict=True):
        expected = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
        assert {name: tuple(weight.shape) for name, weight in state.items()} == expected
    assert (vision_config.image_size, vision_config.num_attention_heads, vision_config.layer_norm_eps) == (
        224,
        16,
        1e-6,
    )
    assert (text_config.vocab_size, text_config.num_attention_heads, text_config.encoder_hidden_size) == (
        30524,
        12,
        1024,
    )
    assert sum(weight.numel() for weight in head.values()) == 927_969


def test_values_are_those_computed_by_hand_from_the_published_names(folder: Path) -> None:
    prompts = ["a red dog", "two blue cats and a dog", ""]
    tokens = [[2, 5, 6, 8, 3], [2, 11, 7, 1, 10, 5, 8, 3], [2, 3]]  # "cats" is unknown
    inputs = inputs_of(prompts)
    expected = [by_hand(random_weights(), i, t) for i, t in zip(to_uint8(inputs.images), tokens, strict=True)]
    output = build_reward("image_reward", options=options_of(folder))(inputs)
    np.testing.assert_allclose(output.values.numpy(), expected, rtol=1e-4, atol=1e-4)
    assert len({round(value, 2) for value in expected}) == 3
    assert bool(output.valid.all())


def test_text_runs_without_causal_mask_and_sees_the_image(folder: Path) -> None:
    """A later word and another image both change the first hidden state, which is all that the head reads."""
    reward = build_reward("image_reward", options=options_of(folder))
    inputs = inputs_of(["a red dog", "a red cat"])
    same_image = RewardInputs(
        prompts=inputs.prompts, images=inputs.images[:1].expand(2, 3, 32, 32), metadata=inputs.metadata,
        group_ids=inputs.group_ids, sample_ids=inputs.sample_ids,
    )  # fmt: skip
    first, second = reward(same_image).values.tolist()
    assert abs(first - second) > 1e-3
    same_prompt = inputs_of(["a red dog", "a red dog"])
    first, second = reward(same_prompt).values.tolist()
    assert abs(first - second) > 1e-3


def test_prompts_are_cut_to_35_tokens(folder: Path) -> None:
    """[CLS], 33 words, [SEP]; what comes after is not read."""
    reward = build_reward("image_reward", options=options_of(folder))
    words = ["dog", "red", "cat"] * 11
    inputs = inputs_of([" ".join(words), " ".join([*words, "blue", "two"]), " ".join([*words[:-1], "blue"])])
    inputs = RewardInputs(
        prompts=inputs.prompts, images=inputs.images[:1].expand(3, 3, 32, 32), metadata=inputs.metadata,
        group_ids=inputs.group_ids, sample_ids=inputs.sample_ids,
    )  # fmt: skip
    whole, longer, other = reward(inputs).values.tolist()
    room = rounding(torch.float32, DEPTH, abs(whole))
    assert whole == pytest.approx(longer, abs=room)
    assert abs(whole - other) > 10 * room


def test_values_are_pointwise(folder: Path) -> None:
    reward, inputs = (
        build_reward("image_reward", options=options_of(folder)),
        inputs_of(["a dog", "", "red", "two cat"]),
    )
    whole = reward(inputs).values
    assert_same_sum(reward(inputs[[3, 1, 0, 2]]).values, whole[[3, 1, 0, 2]], depth=DEPTH)
    assert_same_sum(torch.cat([reward(inputs[[i]]).values for i in range(4)]), whole, depth=DEPTH)


def test_images_are_resized_by_the_shorter_side_and_cut_to_the_centre() -> None:
    """A wide image with stripes: 64 x 128 becomes 32 x 64, and the middle 32 columns are kept."""
    image = np.zeros((64, 128, 3), dtype=np.uint8)
    image[:, 32:96] = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    small = np.asarray(Image.fromarray(image).resize((64, 32), Image.Resampling.BICUBIC))[:, 16:48] / 255.0
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = clip_pixels(Image.fromarray(image), 32)
    assert pixels.shape == (3, 32, 32)
    np.testing.assert_allclose(pixels.permute(1, 2, 0).numpy(), (small - mean) / std, atol=1e-5)


def test_a_value_that_is_not_finite_is_a_failed_item(folder: Path, tmp_path: Path) -> None:
    weights = random_weights()
    weights["mlp.layers.7.bias"] = torch.tensor([torch.inf])
    torch.save(weights, tmp_path / "ImageReward.pt")
    output = build_reward("image_reward", options={**options_of(folder), "model": str(tmp_path)})(
        inputs_of(["a", "dog"])
    )
    assert not bool(output.valid.any())
    assert bool(output.values.isnan().all())
    assert output.errors == {"not_finite": 2}


def test_image_reward_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file or folder"):
        reward_options("image_reward", {"model": "./none.pt"})
    with pytest.raises(ValueError, match="there is no folder"):
        reward_options("image_reward", {"tokenizer": "./none"})
    weights = random_weights()
    for change, message in (
        ({"blip.itm_head.weight": torch.zeros(2, 128)}, r"holds 'blip\.itm_head\.weight', so it is not ImageReward"),
        ({"blip.visual_encoder.norm.weight": torch.zeros(3)}, "does not fit"),
    ):
        torch.save({**weights, **change}, tmp_path / "ImageReward.pt")
        with pytest.raises(ValueError, match=message):
            build_reward("image_reward", options={**options_of(folder), "model": str(tmp_path)})
    for gone, message in (("mlp.layers.7.bias", "does not fit"), ("blip.visual_encoder.pos_embed", "lacks '")):
        torch.save({k: v for k, v in weights.items() if k != gone}, tmp_path / "ImageReward.pt")
        with pytest.raises(ValueError, match=message):
            build_reward("image_reward", options={**options_of(folder), "model": str(tmp_path)})


def test_more_words_than_the_checkpoint_has_are_an_error(folder: Path, tmp_path: Path) -> None:
    import transformers

    transformers.BertTokenizer(vocab={word: i for i, word in enumerate([*WORDS, "green"])}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has 15 words, the checkpoint 14"):
        build_reward("image_reward", options={**options_of(folder), "tokenizer": str(tmp_path)})


def test_version_and_options(folder: Path) -> None:
    reward = build_reward("image_reward", options=options_of(folder))
    assert reward.needs == {"images", "prompts"}
    assert ":standardised:bicubic-crop-32:35-tokens:float32" in reward.version
