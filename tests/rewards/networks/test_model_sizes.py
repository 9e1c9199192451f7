"""Sizes of rewards' models that are reckoned from their published dimensions, counted on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flowrl.rewards import models_of, reward_options
from flowrl.rewards.edit_reward import TwoHeads
from flowrl.rewards.hpsv3 import ModulatedHead
from flowrl.rewards.networks.pretrained import model_of


def edit_reward() -> list[nn.Module]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
    text = {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064,
    }  # fmt: skip
    return [Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=text, vision_config=vision)), TwoHeads(3584)]


def hpsv3_plus() -> list[nn.Module]:
    from transformers import Qwen3VLConfig, Qwen3VLModel

    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096}
    text = {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }  # fmt: skip
    # The width of what modulates is cond_dim of the repository's checkpoints/config.json.
    return [Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision)), ModulatedHead(4096, 256)]


def clap() -> list[nn.Module]:
    from transformers import ClapConfig, ClapModel

    return [ClapModel(ClapConfig())]


def flan_t5(width: int, wide: int, heads: int) -> list[nn.Module]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32128, d_model=width, d_kv=64, d_ff=wide, num_layers=24, num_heads=heads,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    output = nn.Linear(width, 32128, bias=False)  # its own in the checkpoint, which a configuration alone ties
    projector = nn.Sequential(nn.Linear(1024, width), nn.GELU(), nn.Linear(width, width))
    return [T5ForConditionalGeneration(config), output, projector]


def image_tower() -> list[nn.Module]:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=336,
        patch_size=14,
    )  # fmt: skip
    return [CLIPVisionModel(config)]


def foresight(width: int, heads: int, layers: int, wider: float) -> list[nn.Module]:
    from transformers import VJEPA2Config, VJEPA2Model

    config = VJEPA2Config(
        hidden_size=width,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        mlp_ratio=wider,
        pred_hidden_size=384,
        pred_num_attention_heads=12,
        pred_num_hidden_layers=12,
    )
    return [VJEPA2Model(config)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make", "given"), [
    ("TIGER-Lab/EditReward-Qwen2.5-VL-7B", edit_reward, ()),
    ("Junjun2333/HPSv3-PlusPlus", hpsv3_plus, ()),
    ("laion/clap-htsat-unfused", clap, ()),
    ("zhiqiulin/clip-flant5-xxl", flan_t5, (4096, 10240, 64)),
    ("zhiqiulin/clip-flant5-xl", flan_t5, (2048, 5120, 32)),
    ("openai/clip-vit-large-patch14-336", image_tower, ()),
    ("facebook/vjepa2-vitl-fpc64-256", foresight, (1024, 16, 24, 4)),
    ("facebook/vjepa2-vitg-fpc64-256", foresight, (1408, 22, 40, 48 / 11)),
])  # fmt: skip
def test_a_size_is_that_of_the_published_dimensions(
    name: str, make: Callable[..., list[nn.Module]], given: tuple[Any, ...]
) -> None:
    with torch.device("meta"):
        parts = make(*given)
    assert sum(weight.numel() for part in parts for weight in part.parameters()) == model_of(name).parameters


@pytest.mark.parametrize(("reward", "width"), [
    ("clap_score", 4), ("edit_reward", 2), ("hpsv3_plus", 2), ("vqa_score", 2),
])  # fmt: skip
def test_a_reward_says_how_large_its_models_are(reward: str, width: int) -> None:
    models = models_of(reward_options(reward, {}))
    assert models
    assert all(model.parameters is not None and model.bytes_per_weight == width for model in models)


@pytest.mark.parametrize("reward", ["loudness", "sound_sync"])
def test_a_closed_form_holds_no_model(reward: str) -> None:
    assert models_of(reward_options(reward, {})) == ()
