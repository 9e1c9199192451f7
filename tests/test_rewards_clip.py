"""CLIPScore on a tiny random model with a real tokenizer, both made here without any download."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowrl.rewards import Reward, RewardInputs, build_reward, check_reward, to_uint8
from flowrl.rewards.outputs import check_output


def inputs_of(
    images: Tensor, prompts: list[str] | None = None, metadata: list[dict[str, Any]] | None = None
) -> RewardInputs:
    batch = len(images)
    return RewardInputs(
        prompts=prompts or [f"picture {i}" for i in range(batch)],
        images=images,
        metadata=metadata or [{} for _ in range(batch)],
        group_ids=torch.arange(batch) // 2,
        sample_ids=torch.arange(batch),
    )


def random_images(batch: int = 4, size: int = 16) -> Tensor:
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def select(inputs: RewardInputs, items: list[int]) -> RewardInputs:
    return RewardInputs(
        prompts=[inputs.prompts[i] for i in items],
        images=inputs.images[items],
        metadata=[inputs.metadata[i] for i in items],
        group_ids=inputs.group_ids[items],
        sample_ids=inputs.sample_ids[items],
    )


def assert_pointwise(reward: Reward, inputs: RewardInputs, *, atol: float = 0.0) -> None:
    """The value of an item depends on that item alone: any order and any batch give the same."""
    whole = check_output(reward(inputs), len(inputs), reward.name)
    order = list(reversed(range(len(inputs))))
    torch.testing.assert_close(reward(select(inputs, order)).values, whole.values[order], rtol=0, atol=atol)
    for i in range(len(inputs)):
        torch.testing.assert_close(reward(select(inputs, [i])).values, whole.values[i : i + 1], rtol=0, atol=atol)
    assert len(set(whole.values.tolist())) > 1, "values that do not differ could not show a mix-up"


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP folder with random weights and a letters-only tokenizer, made without any download."""
    import transformers

    folder = tmp_path_factory.mktemp("clip")
    pieces = [letter + end for letter in "abcdefghijklmnopqrstuvwxyz" for end in ("", "</w>")]
    vocab = {piece: i for i, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": len(vocab) - 2, "eos_token_id": len(vocab) - 1, "pad_token_id": len(vocab) - 1}
    config = transformers.CLIPConfig(
        text_config={**tower, **ends, "vocab_size": len(vocab), "max_position_embeddings": 16},
        vision_config={**tower, "image_size": 32, "patch_size": 16},
        projection_dim=16,
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config)
    with torch.no_grad():  # so that random embeddings differ enough for a mix-up to show
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    tokenizer = transformers.CLIPTokenizer(vocab=vocab, merges=[])
    transformers.CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def clip_inputs() -> RewardInputs:
    long = "a bench on a hill under a cloud and far more letters than the model can read"
    return inputs_of(random_images(4, 40), ["a dog", "two cats", long, "red"])


def test_clip_score_is_the_cosine_of_the_models_own_embeddings(tiny_clip: Path) -> None:
    """Against the model's full forward pass: the diagonal of its logits, divided by its scale."""
    import transformers

    inputs = clip_inputs()
    model = transformers.CLIPModel.from_pretrained(tiny_clip).eval()
    processor = transformers.CLIPProcessor.from_pretrained(tiny_clip)
    batch = processor(
        text=inputs.prompts,
        images=[Image.fromarray(image) for image in to_uint8(inputs.images)],
        padding="max_length",  # the reward pads to the longest: a causal text tower must not see the difference
        truncation=True,
        max_length=16,
        return_tensors="pt",
    )
    with torch.no_grad():
        logits = model(**batch).logits_per_image.diagonal()
        scale = model.logit_scale.exp()
    cosine = build_reward("clip_score", options={"model": str(tiny_clip)})(inputs).values
    torch.testing.assert_close(cosine, logits / scale, rtol=0, atol=1e-5)
    options = {"model": str(tiny_clip), "scale": "logits", "divisor": 26}
    torch.testing.assert_close(
        build_reward("clip_score", options=options)(inputs).values, logits / 26, rtol=0, atol=1e-5
    )


def test_clip_score_is_pointwise(tiny_clip: Path) -> None:
    reward = build_reward("clip_score", options={"model": str(tiny_clip)})
    assert_pointwise(reward, clip_inputs(), atol=1e-5)  # float32 sums in another order
    assert float(reward(clip_inputs()).values.abs().max()) <= 1.0


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, 0.96),
        ({"scale": "logits", "divisor": 26}, 3.692308),
        ({"scale": "logits", "divisor": 30.0}, 3.2),
        ({"scale": "logits", "divisor": 100}, 0.96),
        ({"divisor": 0.4, "clamp_min": 0.0}, 2.4),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_clip_scalings_on_a_cosine_of_96_percent(
    options: dict[str, Any], value: float, wrapped: bool, tiny_clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings (0.96, 0.28) and (3, 0): cosine 0.96, with exp(logit_scale) = 100, in both return forms."""
    from flowrl.rewards import clip

    def embeds(row: list[float]) -> Callable[..., Any]:
        features = torch.tensor([row])
        return lambda **_: SimpleNamespace(pooler_output=features) if wrapped else features

    load = clip._load

    def load_with_known_embeddings(*arguments: Any) -> Any:
        network, processor = load(*arguments)
        network.logit_scale.data.fill_(math.log(100.0))
        monkeypatch.setattr(network, "get_image_features", embeds([0.96, 0.28]))
        monkeypatch.setattr(network, "get_text_features", embeds([3.0, 0.0]))
        return network, processor

    monkeypatch.setattr(clip, "_load", load_with_known_embeddings)
    reward = build_reward("clip_score", options={"model": str(tiny_clip), **options})
    assert reward(inputs_of(random_images(1))).values.item() == pytest.approx(value, abs=1e-5)


def test_clip_clamp_bounds_from_below(tiny_clip: Path) -> None:
    free = build_reward("clip_score", options={"model": str(tiny_clip)})(clip_inputs()).values
    bound = float(free.median())
    bounded = build_reward("clip_score", options={"model": str(tiny_clip), "clamp_min": bound})(clip_inputs()).values
    torch.testing.assert_close(bounded, free.clamp(min=bound), rtol=0, atol=1e-6)


def test_clip_errors(tiny_clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"there is no folder '\./no-such-folder'"):
        check_reward("clip_score", {"model": "./no-such-folder"})
    with pytest.raises(ValueError, match=r"could not load the CLIP model .*Give model: a folder") as caught:
        build_reward("clip_score", options={"model": str(tmp_path)})
    assert "\n" not in str(caught.value)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"divisor": 0}, "divisor must be positive"),
        ({"clamp_min": math.inf}, "clamp_min must be a finite number"),
        ({"scale": "cosin"}, "option scale must be 'cosine' or 'logits', got 'cosin'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            check_reward("clip_score", options)

    import transformers

    def unreachable(*arguments: Any, **options: Any) -> None:
        raise OSError("We couldn't connect to the hub.\nDetails of three lines.")

    monkeypatch.setattr(transformers.CLIPModel, "from_pretrained", unreachable)
    with pytest.raises(ValueError, match=r"'someone/clip': We couldn't connect to the hub\. Give model"):
        build_reward("clip_score", options={"model": "someone/clip"})
