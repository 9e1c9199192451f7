"""Quality from level words: the closed forms, and the scorer on a tiny random Qwen2-VL with its real processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vlm import LEVEL_WORDS, inputs_of, tiny_processor, write_tiny_vlm

from flowrl.rewards import build_reward, reward_options, to_uint8
from flowrl.rewards.judges import level_tokens
from flowrl.rewards.judges.answers import expected_level
from flowrl.rewards.judges.level_tokens import LEVELS, WEIGHTS


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vlm(tmp_path_factory.mktemp("base"))


def batches(processor: Any) -> list[Any]:
    """What the model is to read of each image at hand, made by hand from the template of the package."""
    lines = (Path(level_tokens.__file__).parents[1] / "templates" / "level_tokens.txt").read_text().split("\n")
    assert lines[1:] == ["<|answer|>", "The quality of this picture is", ""]
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>" + lines[0]
    text += "<|im_end|>\n<|im_start|>assistant\n" + lines[2]
    images = [Image.fromarray(image) for image in to_uint8(inputs_of().images)]
    return [processor(text=text, images=[image], return_tensors="pt") for image in images]


def level_rows(processor: Any) -> list[int]:
    rows: list[int] = processor.tokenizer.convert_tokens_to_ids([f" {word}" for word in LEVEL_WORDS])
    return rows


@pytest.mark.parametrize(
    ("logits", "deqa", "qalign"),
    [([0.0] * 5, 3.0, 0.5), ([2.0, 1.0, 0.0, -1.0, -2.0], 4.451942, 0.862985), ([99.0, 0, 0, 0, 0], 5.0, 1.0),
     ([0.0, 0, 0, 0, 99], 1.0, 0.0)],
)  # fmt: skip
def test_expected_level(logits: list[float], deqa: float, qalign: float) -> None:
    """Equal, descending and one-sided logits; DeQA / 5 is .6, .890388, 1 and .2."""
    row = dict(zip(LEVELS, logits, strict=True))
    values = {name: expected_level(row, dict(zip(LEVELS, worth, strict=True))) for name, worth in WEIGHTS.items()}
    assert values["deqa"] == pytest.approx(deqa, abs=5e-7)
    assert values["qalign"] == pytest.approx(qalign, abs=5e-7)
    assert values["zero_one"] == pytest.approx(deqa / 5, abs=1e-7)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("name", "weights"),
    [("deqa", [5, 4, 3, 2, 1]), ("qalign", [1, 0.75, 0.5, 0.25, 0]), ("zero_one", [1, 0.8, 0.6, 0.4, 0.2])],
)
def test_value_is_the_expected_level_at_the_next_token(name: str, weights: list[float], size: int, base: Path) -> None:
    import transformers

    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(base).eval()
    processor = tiny_processor()
    with torch.no_grad():
        rows = [model(**batch).logits[0, -1, level_rows(processor)].double().numpy() for batch in batches(processor)]
    p = np.exp(np.stack(rows))
    p /= p.sum(1, keepdims=True)
    options = {"model": str(base), "dtype": "float32", "weights": name, "batch_size": size}
    output = build_reward("level_tokens", options=options)(inputs_of())
    np.testing.assert_allclose(output.values.numpy(), p @ np.array(weights), atol=1e-5)
    assert len({round(value, 5) for value in output.values.tolist()}) == 3
    assert bool(output.valid.all())


@pytest.mark.parametrize(("word", "value"), [("excellent", 5.0), ("poor", 2.0), (None, 3.0)])
def test_a_level_that_dominates_gives_its_weight(word: str | None, value: float, base: Path, tmp_path: Path) -> None:
    """An output row that gives every image's next token a logit of 50; all other rows are zero."""
    import transformers

    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(base)
    processor = tiny_processor()
    with torch.no_grad():
        hidden = torch.stack([model.model(**batch).last_hidden_state[0, -1] for batch in batches(processor)])
        model.lm_head.weight.zero_()
        if word is not None:
            row = torch.linalg.lstsq(hidden, torch.full((3, 1), 50.0)).solution[:, 0]
            model.lm_head.weight[level_rows(processor)[LEVEL_WORDS.index(word)]] = row
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    options = {"model": str(tmp_path), "dtype": "float32", "weights": "deqa"}
    values = build_reward("level_tokens", options=options)(inputs_of()).values
    torch.testing.assert_close(values, torch.full((3,), value), rtol=0, atol=1e-4)


def test_values_are_pointwise(base: Path) -> None:
    inputs, reward = inputs_of(), build_reward("level_tokens", options={"model": str(base), "dtype": "float32"})
    whole = reward(inputs).values
    torch.testing.assert_close(reward(inputs[[2, 0, 1]]).values, whole[[2, 0, 1]], rtol=0, atol=1e-5)


def test_levels_must_be_single_tokens_or_it_is_an_error(base: Path) -> None:
    tokenizer = tiny_processor().tokenizer
    ids = level_tokens.level_ids(tokenizer, "it is")
    assert tokenizer.convert_ids_to_tokens(list(ids)) == [f" {word}" for word in LEVEL_WORDS]
    with pytest.raises(ValueError, match=r"'great' must be one token of its own after 'it is', .* makes 6"):
        level_tokens.level_ids(tokenizer, "it is", ["good", "great"])
    with pytest.raises(ValueError, match="'good' must be one token"):
        level_tokens.level_ids(tokenizer, "it is", ["good", "good"])


def test_level_errors(base: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.txt"
    for text, message in (("question", "exactly once"), ("<|answer|> it is", "must have a question before")):
        template.write_text(text)
        with pytest.raises(ValueError, match=message):
            reward_options("level_tokens", {"template": str(template)})
    with pytest.raises(ValueError, match="weights must be one of deqa, qalign, zero_one"):
        reward_options("level_tokens", {"weights": "mos"})
    with pytest.raises(ValueError, match="could not load the vision-language model"):
        build_reward("level_tokens", options={"model": str(tmp_path)})


def test_what_the_reward_says_of_itself(base: Path) -> None:
    reward = build_reward("level_tokens", options={"model": str(base), "dtype": "float32"})
    assert reward.needs == {"images"}
    assert ":zero_one:" in reward.version
    assert ":template-" in reward.version
    assert reward.version.endswith(":float32")
