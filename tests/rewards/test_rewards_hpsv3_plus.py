"""HPSv3++ on a tiny random Qwen3-VL: sizes, positions, what modulates the head, and the names of its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_vlm import PROMPTS, WIDTH, inputs_of
from tiny_vlm_generations import generation_processor, write_generation

from flowrl.rewards import build_reward, hpsv3, reward_options, to_uint8
from flowrl.rewards.networks import qwen_vl


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_generation(tmp_path_factory.mktemp("base"), "3")


def random_head() -> hpsv3.ModulatedHead:
    head = hpsv3.ModulatedHead(WIDTH, 8)
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return head.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def options(base: Path) -> dict[str, Any]:
    import transformers

    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(base)
    folder = base.with_name("plus")
    folder.mkdir()
    torch.save({**model.state_dict(), **random_head().state_dict()}, folder / "hpsv3++.pth")
    return {"model": str(folder), "base": str(base), "dtype": "float32"}


@torch.no_grad()
def test_value_by_hand(base: Path, options: dict[str, Any]) -> None:
    """The image at 256 tokens of 28 pixels, then at multiples of 32; the stock positions; FiLM; the head."""
    import transformers

    inputs = replace(inputs_of()[[0, 1]], iteration=250)
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(base).eval()
    processor = generation_processor("3")
    processor.tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    head = random_head()
    template = (Path(hpsv3.__file__).parent / "templates" / "published" / "hpsv3" / "hpsv3_plus.txt").read_text()
    outputs = {t: build_reward("hpsv3_plus", options={**options, "trained": t})(inputs) for t in (0.0, None)}
    for i, image in enumerate(to_uint8(inputs.images)):
        drawn = Image.fromarray(image).resize((28 * 20, 28 * 14), Image.Resampling.BICUBIC)  # of 48 x 72
        text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>" + template.replace(
            "{prompt}", PROMPTS[i]
        )
        batch = processor(text=text + "<|im_end|>\n<|im_start|>assistant\n", images=[drawn], return_tensors="pt")
        assert batch["image_grid_thw"].tolist() == [[1, 24, 36]]  # 384 x 576 pixels, patches of 16
        hidden = model.model(**batch).last_hidden_state[0]
        (place,) = torch.nonzero(batch["input_ids"][0] == len(processor.tokenizer) - 1).flatten().tolist()
        h, parts = hidden[place], head.cap_encoder
        able = torch.sigmoid(parts["out_proj"](parts["proj"](h)))
        for t, given in ((0.0, 0.0), (None, 0.25)):
            film = head.film_gen(head.cond_encoder(torch.stack([able[0], torch.tensor(given)])))
            wanted = head.rm_head(h * (1 + film[:WIDTH]) + film[WIDTH:])[0]
            assert float(outputs[t].values[i]) == pytest.approx(float(wanted), abs=1e-4)
            assert float(outputs[t].parts["capability"][i]) == pytest.approx(float(able), abs=1e-5)
    assert float((outputs[0.0].values - outputs[None].values).abs().min()) > 1e-3


def test_batches_agree(options: dict[str, Any]) -> None:
    inputs = inputs_of()[[0, 1]]
    whole = build_reward("hpsv3_plus", options=options)(inputs).values
    assert float((whole[0] - whole[1]).abs()) > 1e-3
    pair = build_reward("hpsv3_plus", options={**options, "batch_size": 2})(inputs[[1, 0]]).values
    torch.testing.assert_close(pair, whole[[1, 0]], rtol=0, atol=1e-4)


def test_what_does_not_fit_is_told(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trained must lie in"):
        reward_options("hpsv3_plus", {"trained": 2.0})
    weights = torch.load(f"{options['model']}/hpsv3++.pth")
    torch.save({k: v for k, v in weights.items() if not k.startswith("cond_")}, tmp_path / "hpsv3++.pth")
    with pytest.raises(ValueError, match="so it is not HPSv3"):
        build_reward("hpsv3_plus", options={**options, "model": str(tmp_path)})


def test_full_size_names_fit() -> None:
    """Qwen3-VL 8B without memory; the head has the widths of the published configuration."""
    import transformers

    with torch.device("meta"):
        config = transformers.Qwen3VLConfig(
            text_config={"vocab_size": 151670, "hidden_size": 4096, "intermediate_size": 12288,
                         "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
            vision_config={"out_hidden_size": 4096},
        )  # fmt: skip
        model = transformers.Qwen3VLForConditionalGeneration(config)
        head = hpsv3.ModulatedHead(4096, 256)
    weights = {**model.state_dict(), **head.state_dict()}
    backbone, found = qwen_vl.split_weights(weights, owner="test", heads=hpsv3.HEADS)
    assert {n: w.shape for n, w in backbone.items()} == {n: w.shape for n, w in model.model.state_dict().items()}
    assert found.keys() == head.state_dict().keys()
    assert found["cap_encoder.proj.weight"].shape == (256, 4096)
    assert found["film_gen.2.bias"].shape == (8192,)
