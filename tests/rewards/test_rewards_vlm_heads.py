"""Heads on Qwen2-VL: sizes, frames and positions, the token read-out, and HPSv3, on a tiny model with its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_vlm import PROMPTS, WIDTH, backbone_state, inputs_of, older_name, tiny_processor, write_tiny_vlm
from torch import Tensor, nn

from flowrl.rewards import build_reward, hpsv3, reward_options, to_uint8
from flowrl.rewards.networks import qwen_vl


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vlm(tmp_path_factory.mktemp("base"))


def random_head(head: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return head.requires_grad_(False)


@pytest.fixture(scope="module")
def hps(base: Path) -> dict[str, Any]:
    """The options of an HPSv3 whose weights have the names of the published file."""
    weights = {older_name(name): weight for name, weight in backbone_state(base).items()}
    head = random_head(hpsv3.preference_head(WIDTH))
    weights |= {f"rm_head.{name}": weight for name, weight in head.state_dict().items()}
    folder = base.with_name("hpsv3")
    folder.mkdir()
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "HPSv3.safetensors")
    return {"model": str(folder), "base": str(base), "dtype": "float32"}


# Closed forms.


@pytest.mark.parametrize(
    ("size", "low", "high", "expected", "tokens"),
    [
        ((512, 512), 200704, 200704, (448, 448), 256),
        ((768, 1024), 200704, 200704, (364, 504), 234),
        ((480, 640), 200704, 200704, (364, 504), 234),
        ((256, 256), 100352, 200704, (336, 336), 144),
        ((300, 300), 0, 10**9, (308, 308), 121),
        ((5, 900), 0, 10**9, (28, 896), 32),
        ((10, 1400), 0, 784 * 10, (28, 1036), 37),
    ],
)
def test_smart_resize(size: tuple[int, int], low: int, high: int, expected: tuple[int, int], tokens: int) -> None:
    resized = qwen_vl.smart_resize(*size, min_pixels=low, max_pixels=high)
    assert resized == expected
    assert resized[0] * resized[1] == tokens * 784
    assert qwen_vl.smart_resize(*size[::-1], min_pixels=low, max_pixels=high) == expected[::-1]


@pytest.mark.parametrize(
    ("frames", "fps", "places"),
    [(53, 24, [0, 17, 35, 52]), (16, 8, [0, 5, 10, 15]), (3, 8, [0, 2]), (81, 16, 10), (49, 8, 12), (33, 16, 4)],
)
def test_frame_places(frames: int, fps: float, places: list[int] | int) -> None:
    found = qwen_vl.clip_places(frames, fps)
    assert (found if isinstance(places, list) else len(found)) == places
    assert (found[0], found[-1]) == (0, frames - 1)
    assert len(qwen_vl.clip_places(frames, fps, count=2)) == 2


def test_frames_and_sizes_that_cannot_be_are_errors() -> None:
    for frames, fps, count in ((1, 8.0, None), (16, 0.0, None), (4, 8.0, 6)):
        with pytest.raises(ValueError, match="frames"):
            qwen_vl.clip_places(frames, fps, count=count)
    with pytest.raises(ValueError, match="200 times"):
        qwen_vl.smart_resize(1, 201, min_pixels=0, max_pixels=10**6)


def test_images_and_frames_are_resized_bicubically() -> None:
    """In the middle of the range, where neither filter's overshoot is cut off, the two differ by rounding only."""
    image = np.random.default_rng(0).integers(80, 176, (60, 60, 3), dtype=np.uint8)
    big = qwen_vl.resize_image(image, min_pixels=7056, max_pixels=7056)
    assert big.size == (84, 84)
    np.testing.assert_array_equal(big, Image.fromarray(image).resize((84, 84), Image.Resampling.BICUBIC))
    frames = qwen_vl.resize_frames(np.stack([image, image[::-1]]), min_pixels=7056, max_pixels=7056)
    assert (frames.dtype, frames.shape) == (torch.uint8, (2, 3, 84, 84))
    assert np.abs(frames[0].permute(1, 2, 0).numpy().astype(int) - np.asarray(big)).max() <= 1


def test_size_of_the_preference_head() -> None:
    head = hpsv3.preference_head(3584)
    assert sum(parameter.numel() for parameter in head.parameters()) == 3_687_474
    assert sorted(head.state_dict()) == sorted(f"{i}.{kind}" for i in (0, 3, 5) for kind in ("weight", "bias"))


# The token read-out.


def test_score_is_the_head_at_the_token_whatever_follows(base: Path) -> None:
    """Three texts of other lengths in one batch; by hand one by one, without padding."""
    _, processor, ids = qwen_vl.load_base(str(base), ["<|Reward|>"], revision=None, owner="test")
    network = hidden_network(base)
    texts = ["rate: <|Reward|>", "rate this long text: <|Reward|> END", "<|Reward|>"]
    batch = qwen_vl.encode(processor, texts)
    assert batch["attention_mask"].sum(1).unique().numel() == 3
    outputs = network(batch, ids, position_mode="sequential")[:, 0]
    for i, text in enumerate(texts):
        alone = qwen_vl.encode(processor, [text])
        hidden = network.backbone.language_model(input_ids=alone["input_ids"]).last_hidden_state[0]
        (place,) = torch.nonzero(alone["input_ids"][0] == ids[0]).flatten().tolist()
        torch.testing.assert_close(outputs[i], network.head(hidden[place]), rtol=0, atol=1e-5)
    longer = {k: torch.nn.functional.pad(v, (0, 7), value=0) for k, v in batch.items()}
    torch.testing.assert_close(network(longer, ids, position_mode="sequential")[:, 0], outputs, rtol=0, atol=1e-5)


def hidden_network(base: Path) -> qwen_vl.TokenReward:
    import transformers

    backbone = transformers.Qwen2VLModel.from_pretrained(base).eval().requires_grad_(False)
    return qwen_vl.TokenReward(backbone, random_head(nn.Linear(WIDTH, 2, bias=False)))


@torch.no_grad()
def test_position_modes_agree_on_text_and_differ_on_images(base: Path) -> None:
    """Sequential positions are 0, 1, 2, ...; M-RoPE's are the stock model's own, from its processor's token kinds."""
    _, processor, ids = qwen_vl.load_base(str(base), ["<|Reward|>"], revision=None, owner="test")
    network = hidden_network(base)
    text = qwen_vl.encode(processor, ["rate: <|Reward|>"])
    both = [network(text, ids, position_mode=mode) for mode in ("sequential", "mrope")]
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=1e-6)
    images = [Image.fromarray(to_uint8(inputs_of().images)[0]).resize((84, 56))]
    seen = qwen_vl.encode(processor, ["rate: <|Reward|>"], images=images)
    both = [network(seen, ids, position_mode=mode) for mode in ("sequential", "mrope")]
    assert float((both[0] - both[1]).abs().max()) > 1e-3
    embeds = network.backbone.get_input_embeddings()(seen["input_ids"])
    features = network.backbone.visual(seen["pixel_values"], grid_thw=seen["image_grid_thw"]).pooler_output
    image = seen["input_ids"] == processor.image_token_id
    assert int(image.sum()) == 6  # 84 x 56 pixels: 3 x 2 merged tokens
    embeds[image] = features
    hidden = network.backbone.language_model(inputs_embeds=embeds).last_hidden_state  # its own default: sequential
    place = int(torch.nonzero(seen["input_ids"][0] == ids[0]))
    torch.testing.assert_close(both[0][0, 0], network.head(hidden[0, place]), rtol=0, atol=1e-5)


def test_a_reward_token_missing_or_there_twice_is_an_error() -> None:
    ids = torch.tensor([[4, 7, 8, 0], [7, 8, 4, 0]])
    assert qwen_vl.token_places(ids, [7, 8]).tolist() == [[1, 2], [0, 1]]
    for wrong, message in (([4, 7, 7, 8], "id 7 2 times"), ([4, 7, 0, 0], "id 8 0 times")):
        with pytest.raises(ValueError, match=message):
            qwen_vl.token_places(torch.tensor([[4, 7, 8, 0], wrong]), [7, 8])


# HPSv3.


@torch.no_grad()
def test_hpsv3_is_the_first_output_of_the_head(base: Path, hps: dict[str, Any]) -> None:
    """By hand: the image at 256 merged tokens, the template, the stock model's hidden state, the published head."""
    import transformers

    inputs = inputs_of()
    values = build_reward("hpsv3", options=hps)(inputs).values
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(base).eval()
    processor = tiny_processor()
    processor.tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    head = random_head(hpsv3.preference_head(WIDTH)).eval()
    template = (Path(hpsv3.__file__).parent / "templates" / "published" / "hpsv3" / "hpsv3.txt").read_text()
    for i, image in enumerate(to_uint8(inputs.images)):
        drawn = Image.fromarray(image).resize((28 * 20, 28 * 14), Image.Resampling.BICUBIC)  # of 48 x 72
        text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>" + template.replace(
            "{prompt}", PROMPTS[i]
        )
        batch = processor(text=text + "<|im_end|>\n<|im_start|>assistant\n", images=[drawn], return_tensors="pt")
        length = batch["input_ids"].shape[1]
        positions = torch.arange(length).expand(3, 1, length)
        hidden = model.model(**batch, position_ids=positions).last_hidden_state[0]
        (place,) = torch.nonzero(batch["input_ids"][0] == len(processor.tokenizer) - 1).flatten().tolist()
        assert values[i].item() == pytest.approx(head(hidden[place])[0].item(), abs=1e-4)
    tenth = build_reward("hpsv3", options={**hps, "scale": "verl_omni"})(inputs).values
    torch.testing.assert_close(tenth, 0.1 * values, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_hpsv3_is_pointwise(hps: dict[str, Any]) -> None:
    """Alone, permuted, and in a batch whose prompts are of other lengths."""
    inputs = inputs_of()
    reward = build_reward("hpsv3", options=hps)
    whole = reward(inputs).values
    assert len({round(value, 3) for value in whole.tolist()}) == 3
    torch.testing.assert_close(reward(inputs[[2, 0, 1]]).values, whole[[2, 0, 1]], rtol=0, atol=1e-5)
    batched = build_reward("hpsv3", options={**hps, "batch_size": 3})(inputs).values
    torch.testing.assert_close(batched, whole, rtol=0, atol=1e-5)


def test_position_mode_and_template_change_scores_and_version(hps: dict[str, Any], tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("{prompt} {0} <|Reward|>\n")  # other braces are plain text
    rewards = [
        build_reward("hpsv3", options=hps | more) for more in ({}, {"position_mode": "mrope"}, {"template": str(own)})
    ]
    values = [reward(inputs_of()).values for reward in rewards]
    assert len({reward.version for reward in rewards}) == 3
    for first, second in ((0, 1), (0, 2)):
        assert float((values[first] - values[second]).abs().max()) > 1e-3


def test_names_of_the_full_size_checkpoint_fit_the_full_size_backbone() -> None:
    """A Qwen2-VL 7B without memory: its names in the older layout come back as those of today's inner model."""
    import transformers

    with torch.device("meta"):
        config = transformers.Qwen2VLConfig(
            text_config={"vocab_size": 151658, "hidden_size": 3584, "intermediate_size": 18944,
                         "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
            vision_config={"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16},
        )  # fmt: skip
        model = transformers.Qwen2VLForConditionalGeneration(config)
        head = hpsv3.preference_head(3584)
    today = model.state_dict() | {f"rm_head.{name}": weight for name, weight in head.state_dict().items()}
    older = {older_name(name): weight for name, weight in today.items()}
    some = ("visual.blocks.31.attn.qkv.weight", "visual.merger.mlp.2.bias", "model.layers.27.mlp.down_proj.weight")
    for name in (*some, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "rm_head.5.weight"):
        assert name in older
    wanted = {name: weight.shape for name, weight in model.model.state_dict().items()}
    for weights in (today, older):
        backbone, found = qwen_vl.split_weights(weights, owner="test")
        assert {name: weight.shape for name, weight in backbone.items()} == wanted
        assert set(found) == set(head.state_dict())


def test_hpsv3_errors(hps: dict[str, Any], base: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.txt"
    for text, message in (
        ("{prompt}", r"must hold <\|Reward\|> exactly once, it is there 0 times"),
        ("{prompt} <|Reward|> {prompt}", r"must hold \{prompt\} exactly once, it is there 2 times"),
    ):
        template.write_text(text)
        with pytest.raises(ValueError, match=message):
            reward_options("hpsv3", {"template": str(template)})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"template": "./none.txt"}, "cannot be read as UTF-8 text"),
        ({"scale": "tenth"}, "scale must be one of raw, verl_omni"),
        ({"position_mode": "flat"}, "position_mode must be"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"model": "./none.safetensors"}, "there is no file or folder"),
        ({"base": "./none"}, "there is no folder"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("hpsv3", options)
    with pytest.raises(ValueError, match=r"the prompt 'a <\|im_end\|> b' holds the special token <\|im_end\|>"):
        build_reward("hpsv3", options=hps)(inputs_of(prompts=["a <|im_end|> b"]))


def test_checkpoints_that_do_not_fit_are_errors(hps: dict[str, Any], base: Path, tmp_path: Path) -> None:
    weights = load_file(Path(hps["model"]) / "HPSv3.safetensors")
    rows = weights["model.embed_tokens.weight"]
    changes: list[tuple[dict[str, Tensor | None], str]] = [
        ({"rm_head.0.weight": torch.zeros(4, 4)}, "head does not fit"),
        ({"model.norm.weight": None}, r"1 weights are missing .*language_model\.norm\.weight"),
        ({"visual.extra": torch.zeros(1)}, r"1 weights are unexpected .*visual\.extra"),
        ({"projector.weight": torch.zeros(1)}, "holds 'projector.weight'"),
        ({"model.embed_tokens.weight": rows[:100].clone()}, "the checkpoint has 100 tokens of width 32"),
        ({f"rm_head.{i}.{kind}": None for i in (0, 3, 5) for kind in ("weight", "bias")}, "has no weights rm_head"),
    ]
    for change, message in changes:
        changed = {name: weight for name, weight in (weights | change).items() if weight is not None}
        save_file(changed, tmp_path / "HPSv3.safetensors")
        with pytest.raises(ValueError, match=message):
            build_reward("hpsv3", options={**hps, "model": str(tmp_path)})


def test_what_the_reward_says_of_itself(hps: dict[str, Any]) -> None:
    reward = build_reward("hpsv3", options=hps)
    assert reward.needs == {"images", "prompts"}
    assert ":raw:" in reward.version
    assert ":template-" in reward.version
    assert reward.version.endswith(":float32")
