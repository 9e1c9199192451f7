"""EditReward on a tiny random Qwen2.5-VL: its two texts, two images, two heads, and what becomes of their outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_vlm import PROMPTS, WIDTH, inputs_of
from tiny_vlm_generations import generation_processor, write_generation

from flowrl.rewards import RewardInputs, build_reward, edit_reward, hpsv3, reward_options, to_uint8
from flowrl.rewards.networks import qwen_vl


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_generation(tmp_path_factory.mktemp("base"), "25")


def random_heads() -> edit_reward.TwoHeads:
    heads = edit_reward.TwoHeads(WIDTH)
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return heads.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def options(base: Path) -> dict[str, Any]:
    """The options of a checkpoint by the names that the published class has under transformers 4.57."""
    import transformers

    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(base)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights |= {f"rm_heads.{name}": weight.clone() for name, weight in random_heads().state_dict().items()}
    assert {"model.visual.merger.mlp.0.weight", "lm_head.weight", "rm_heads.head_1.5.bias"} <= weights.keys()
    folder = base.with_name("edit_reward")
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    return {"model": str(folder), "base": str(base), "dtype": "float32"}


def edits() -> RewardInputs:
    """Images of 48 x 72 with a source each, of another size."""
    generator = torch.Generator().manual_seed(7)
    sources = [[torch.rand(3, 5, 4 + i, generator=generator).repeat_interleave(12, -1).repeat_interleave(12, -2)]
               for i in range(3)]  # fmt: skip
    return replace(inputs_of(), source_images=sources)


@pytest.mark.slow
@torch.no_grad()
def test_values_are_the_heads_means_of_the_two_texts(base: Path, options: dict[str, Any]) -> None:
    """By hand: source then edit, the repository's text, plain positions, each head's first output at the token."""
    import transformers

    inputs = edits()[[0, 1]]
    output = build_reward("edit_reward", options=options)(inputs)
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(base).eval()
    processor = generation_processor("25")
    processor.tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    heads = random_heads()
    folder = Path(hpsv3.__file__).parent / "templates" / "published" / "edit_reward"
    assert inputs.source_images is not None
    for i, image in enumerate(to_uint8(inputs.images[:2])):
        means = []
        for name, head in (("dim1", heads.head_0), ("dim2", heads.head_1)):
            shown = []
            for array in (to_uint8(inputs.source_images[i][0][None])[0], image):
                rows, columns = qwen_vl.smart_resize(*array.shape[:2], min_pixels=200704, max_pixels=200704)
                shown.append(Image.fromarray(array).resize((columns, rows), Image.Resampling.BICUBIC))
            text = "<|im_start|>user\n" + "<|vision_start|><|image_pad|><|vision_end|>" * 2
            text += (folder / f"{name}.txt").read_text().replace("{prompt}", PROMPTS[i])
            batch = processor(text=text + "<|im_end|>\n<|im_start|>assistant\n", images=shown, return_tensors="pt")
            length = batch["input_ids"].shape[1]
            hidden = model.model(**batch, position_ids=torch.arange(length).expand(3, 1, length)).last_hidden_state[0]
            (place,) = torch.nonzero(batch["input_ids"][0] == len(processor.tokenizer) - 1).flatten().tolist()
            means.append(float(head(hidden[place])[0]))
        assert [float(output.parts[p][i]) for p in ("following", "quality")] == pytest.approx(means, abs=1e-4)
        assert float(output.values[i]) == pytest.approx(np.mean(means), abs=1e-4)


def test_pooling_batches_and_order(options: dict[str, Any]) -> None:
    inputs = edits()
    inputs = inputs[[0, 1]]
    whole = build_reward("edit_reward", options=options)(inputs)
    means = torch.stack([whole.parts["following"], whole.parts["quality"]])
    assert len({round(value, 3) for value in whole.values.tolist()}) == 2
    smaller = build_reward("edit_reward", options=options | {"pooling": "min", "batch_size": 2})
    torch.testing.assert_close(smaller(inputs[[1, 0]]).values, means.amin(0)[[1, 0]], rtol=0, atol=1e-4)
    assert ":min:" in smaller.version
    torch.testing.assert_close(edit_reward.POOLED["sum"](means), 2 * whole.values, rtol=0, atol=1e-5)


def test_an_edit_needs_one_source(options: dict[str, Any]) -> None:
    inputs = edits()
    assert inputs.source_images is not None
    first = inputs.source_images[0]
    output = build_reward("edit_reward", options=options)(replace(inputs, source_images=[first, [], first * 2]))
    assert output.valid.tolist() == [True, False, False]
    assert output.errors == {"missing_source": 1, "several_sources": 1}
    assert output.parts["quality"].isnan().tolist() == [False, True, True]
    with pytest.raises(ValueError, match="no source_images"):
        build_reward("edit_reward", options=options)(inputs_of())


def test_what_cannot_be_loaded_is_told(base: Path, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file or folder"):
        reward_options("edit_reward", {"model": "./none"})
    with pytest.raises(ValueError, match="pooling must be one of"):
        reward_options("edit_reward", {"pooling": "max"})
    with pytest.raises(ValueError, match=r"holds neither model\.safetensors nor model\.pth"):
        build_reward("edit_reward", options=options | {"model": str(tmp_path)})
    torch.save({"model": {"model.visual.a": torch.zeros(1)}}, tmp_path / "model.pth")
    with pytest.raises(ValueError, match=r"has no weights rm_heads\."):
        build_reward("edit_reward", options=options | {"model": str(tmp_path)})


def test_names_and_sizes_of_the_published_class_fit_the_full_size_backbone() -> None:
    """Qwen2.5-VL 7B without memory, with the vocabulary that training left it."""
    import transformers

    with torch.device("meta"):
        config = transformers.Qwen2_5_VLConfig(
            text_config={"vocab_size": 151666, "hidden_size": 3584, "intermediate_size": 18944,
                         "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
            vision_config={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
        )  # fmt: skip
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        heads = edit_reward.TwoHeads(3584)
    assert sum(parameter.numel() for parameter in heads.parameters()) == 2 * 3_687_474
    weights = model.state_dict() | {f"rm_heads.{name}": weight for name, weight in heads.state_dict().items()}
    backbone, found = qwen_vl.split_weights(weights, owner="test", heads=edit_reward.HEADS)
    assert {n: w.shape for n, w in backbone.items()} == {n: w.shape for n, w in model.model.state_dict().items()}
    assert found.keys() == heads.state_dict().keys()
