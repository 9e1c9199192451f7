"""Kernels of attention on tiny networks of every kind of processor: the same numbers, gradients, and ratio 1."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from test_pipeline_families import SETTINGS, save_tiny
from torch import Tensor

from flowrl.pipelines import family
from flowrl.pipelines.family_pipeline import FamilyPipeline
from flowrl.pipelines.lora import Policy
from flowrl.trajectory import Conditioning

FAMILIES = ("sd3", "flux", "qwen_image", "wan", "sd")
EVERY = (*FAMILIES, "cogvideox", "sana", "ltx_video", "z_image", "hunyuan_video")
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}  # of the largest; attention is rounded elsewhere, block after block
WORDS = {torch.float32: ("native", "math"), torch.bfloat16: ("native", "float32", "math")}


@cache
def folder_of(name: str) -> str:
    return str(save_tiny(name, Path(mkdtemp(prefix="flowrl_attention_")) / name))


@cache
def loaded(name: str, word: str, dtype: torch.dtype) -> FamilyPipeline:
    pipeline: Any = family(name).load(folder_of(name), dtype=dtype, attention=word, **SETTINGS.get(name, {}))
    policy = Policy(pipeline.denoiser, rank=2, alpha=4, targets=pipeline.lora_targets, seed=0)
    for place, parameter in enumerate(policy.parameters.values()):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(place))
        parameter.data.copy_(0.1 * drawn)
    return pipeline


def inputs(pipeline: FamilyPipeline) -> tuple[Tensor, Tensor, Conditioning]:
    x = torch.randn(2, *pipeline.latent_shape, generator=torch.Generator().manual_seed(1))
    return x, torch.tensor([500.0, 500.0]), pipeline.encode(["a red circle", "two blue squares and a star"])


def velocity_and_gradient(pipeline: FamilyPipeline) -> tuple[Tensor, Tensor]:
    given = inputs(pipeline)
    trained = [p for p in pipeline.denoiser.parameters() if p.requires_grad]
    velocity = pipeline.network(*given)
    drawn = torch.randn(velocity.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(velocity, trained, drawn, allow_unused=True)
    with torch.no_grad():
        assert torch.equal(pipeline.network(*given), velocity.detach()), "rollout and update differ: ratio is not 1"
    gradient = torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(trained, found)])
    return velocity.detach(), gradient


@cache
def native(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return velocity_and_gradient(loaded(name, "native", dtype))


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_words_give_the_same_velocity_and_gradient(name: str, dtype: torch.dtype) -> None:
    for word in WORDS[dtype][1:]:
        pipeline = loaded(name, word, dtype)
        assert pipeline.attention == word
        velocity, gradient = velocity_and_gradient(pipeline)
        assert off(velocity, native(name, dtype)[0]) < CLOSE[dtype], word
        assert off(gradient, native(name, dtype)[1]) < CLOSE[dtype], word


def test_math_is_math() -> None:
    """Every processor of every kind of network calls the kernel that was chosen, and no other."""
    for name in EVERY:
        pipeline = loaded(name, "math", torch.float32)
        with torch.profiler.profile() as seen, torch.no_grad():
            pipeline.network(*inputs(pipeline))
        called = {event.name for event in seen.events() if "scaled_dot_product" in event.name}
        assert called == {"aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math"}, name
