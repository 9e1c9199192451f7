"""Kernels of attention on tiny networks of every kind of processor: the same numbers, gradients, and ratio 1."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tiny_folders import SETTINGS, save_tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.pipelines import family
from flowrl.pipelines.arithmetic import attention
from flowrl.pipelines.arithmetic.attention import backends_here, check_backward, give_kernel
from flowrl.pipelines.arithmetic.attention_words import Known
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.lora import Policy

FAMILIES = ("sd3", "flux", "qwen_image", "wan", "sd")
EVERY = (
    *FAMILIES, "cogvideox", "sana", "sana_video", "ltx_video", "z_image", "hunyuan_video", "hunyuan_video15",
    "qwen_image_21",
)  # fmt: skip
PROMPTS = ["a red circle", "two blue squares and a star"]
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}  # of the largest; attention is rounded elsewhere, block after block
ROOM = TemporaryDirectory(prefix="flowrl_attention_")
WORDS = {torch.float32: ("native", "math"), torch.bfloat16: ("native", "auto", "math")}


class Called(TorchDispatchMode):
    """Dtypes of queries of every fused attention on the CPU that runs within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", autouse=True)
def emptied_room() -> Iterator[None]:
    """Removes the folders of models at the end, and the models from memory."""
    yield
    ROOM.cleanup()
    loaded.cache_clear()


@cache
def folder_of(name: str) -> str:
    return str(save_tiny(name, Path(ROOM.name) / name))


@cache
def loaded(name: str, word: str, dtype: torch.dtype, **options: Any) -> FamilyPipeline:
    settings = SETTINGS.get(name, {}) | options
    pipeline: Any = family(name).load(folder_of(name), dtype=dtype, attention=word, **settings)
    policy = Policy(pipeline.denoiser, rank=2, alpha=4, targets=pipeline.lora_targets, seed=0)
    for place, parameter in enumerate(policy.parameters.values()):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(place))
        parameter.data.copy_(0.1 * drawn)
    return pipeline


def velocity_of(pipeline: FamilyPipeline) -> Tensor:
    x = torch.randn(2, *pipeline.latent_shape, generator=torch.Generator().manual_seed(1))
    cond = pipeline.encode(PROMPTS)
    unguided = 0 if pipeline.family.name == "z_image" else 1
    found: Tensor = pipeline.guided(pipeline.network, cond, None, unguided)(
        x, torch.tensor([500.0, 500.0]), torch.tensor([0.5, 0.5])
    )
    return found


def velocity_and_gradient(pipeline: FamilyPipeline) -> tuple[Tensor, Tensor]:
    trained = [p for p in pipeline.denoiser.parameters() if p.requires_grad]
    velocity = velocity_of(pipeline)
    drawn = torch.randn(velocity.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(velocity, trained, drawn, allow_unused=True)
    with torch.no_grad():
        assert torch.equal(velocity_of(pipeline), velocity.detach()), "rollout and update differ: the ratio is not 1"
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]
    return velocity.detach(), torch.cat([part.flatten() for part in parts])


@cache
def native(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return velocity_and_gradient(loaded(name, "native", dtype))


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_words_give_the_same_velocity_and_gradient(name: str, dtype: torch.dtype) -> None:
    for word in WORDS[dtype][1:]:
        velocity, gradient = velocity_and_gradient(loaded(name, word, dtype))
        assert off(velocity, native(name, dtype)[0]) < CLOSE[dtype], word
        assert off(gradient, native(name, dtype)[1]) < CLOSE[dtype], word


@pytest.mark.parametrize("name", EVERY)
def test_every_attention_is_computed_by_the_kernel_and_other_models_keep_theirs(name: str) -> None:
    """Torch's fused attention runs nowhere under math, and in float32 alone under float32, what auto is here.

    A family of each kind is loaded with each word; the others change theirs, which is what loading does.
    """
    seen, kernels = {}, []
    for word in ("native", "math", "auto"):
        pipeline = loaded(name, word if name in FAMILIES else "auto", torch.bfloat16)
        if name in FAMILIES:
            kernels.append(pipeline.attention)
        else:
            known = pipeline.family.attends(pipeline.model)
            kernels.append(give_kernel([pipeline.denoiser], word, known, torch.bfloat16, "cpu"))
        pipeline.encode(PROMPTS)  # which keeps them: text encoders attend by themselves
        with torch.no_grad(), Called() as called:
            velocity_of(pipeline)
        seen[word] = called.dtypes
    assert kernels == ["native", "math", "float32"]
    assert seen["native"], "tokens attend"
    assert set(seen["native"]) == {torch.bfloat16}
    assert seen["math"] == []
    assert seen["auto"] == [torch.float32] * len(seen["native"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "sd"])
def test_a_kernel_can_be_changed_for_another(name: str) -> None:
    pipeline: Any = family(name).load(folder_of(name), dtype=torch.bfloat16, **SETTINGS.get(name, {}))
    seen = []
    for word in ("math", "float32", "native", "float32", "native"):
        give_kernel([pipeline.denoiser], word, pipeline.family.attends(pipeline.model), torch.bfloat16, "cpu")
        pipeline.encode(PROMPTS)
        with torch.no_grad(), Called() as called:
            velocity_of(pipeline)
        seen.append(set(called.dtypes))
    assert seen == [set(), {torch.float32}, {torch.bfloat16}, {torch.float32}, {torch.bfloat16}]


@pytest.mark.slow
def test_auto_in_float32_is_native_bit_for_bit() -> None:
    for name in ("sd3", "sd"):
        found = velocity_and_gradient(loaded(name, "auto", torch.float32))
        assert all(torch.equal(own, wanted) for own, wanted in zip(found, native(name, torch.float32), strict=True))


def test_a_kernel_survives_recomputed_blocks() -> None:
    """The backward pass calls the processors once more."""
    plain, recomputed = (
        velocity_and_gradient(loaded("flux", "auto", torch.bfloat16, **options))
        for options in ({}, {"gradient_checkpointing": True})
    )
    assert torch.equal(plain[0], recomputed[0])
    assert torch.equal(plain[1], recomputed[1])


@pytest.mark.parametrize("word", ["native", "float32"])
def test_a_kernel_takes_torchs_arguments_by_place(word: str) -> None:
    """A stock processor may give the mask as the fourth."""
    q, k, v = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(5) < 3).expand(1, 1, 5, 5)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    assert not torch.equal(wanted, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    torch.testing.assert_close(attention.attention_of(word)(q, k, v, mask), wanted)


def test_a_kernel_without_a_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any of the three, and one that is another's; a kernel that computes something else, too."""
    own = attention.attention_of("native")
    faulty = {
        "d key": lambda q, k, v, **kw: own(q, k.detach(), v, **kw),
        "d value": lambda q, k, v, **kw: own(q, k, v.detach(), **kw),
        "d query": lambda q, k, v, **kw: own(q, k, v, **kw).detach(),
        "output that is": lambda q, k, v, **kw: own(q, k, v, scale=1.0, **kw),
        "cannot run": lambda q, k, v, **kw: own(q, k, v, nonsense=True),
    }
    for said, function in faulty.items():
        monkeypatch.setattr(attention, "attention_of", lambda word, function=function: function)
        with pytest.raises(ValueError, match=said):
            check_backward("native", dtype=torch.float32, device="cpu", head_size=16)


def test_a_kernel_that_fails_on_long_masked_or_extreme_inputs_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.nn.functional.scaled_dot_product_attention

    def overflowing(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        return scores.exp() / scores.exp().sum(-1, keepdim=True) @ v  # without the largest score taken off

    def short(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return own(q[:, :, :512], k, v, **options).repeat(1, 1, 2, 1)[:, :, : q.shape[2]]

    def blind(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        few = attn_mask is not None and int(attn_mask.sum(-1).min()) < 8
        return own(q, k, v, attn_mask=None if few else attn_mask)

    faulty: list[tuple[Any, Any]] = [(overflowing, "none"), (short, "none"), (blind, "keys")]
    for function, mask in faulty:
        monkeypatch.setattr(attention, "attention_of", lambda word, function=function: function)
        with pytest.raises(ValueError, match="off here"):
            check_backward("native", dtype=torch.float32, device="cpu", head_size=16, mask=mask)


def test_kernels_of_this_machine() -> None:
    for mask in ("none", "keys", "bias"):
        assert backends_here("cpu", torch.float32, 24, mask) == ["native", "math"]
        assert backends_here("cpu", torch.bfloat16, 24, mask) == ["native", "float32", "math"]


def test_a_network_without_attention_has_no_kernel_to_choose() -> None:
    network, known = torch.nn.Linear(2, 2), Known(head_sizes=(16,))
    assert give_kernel([network], "native", known, torch.float32, "cpu") == "native"
    with pytest.raises(ValueError, match="no attention whose kernel can be chosen"):
        give_kernel([network], "math", known, torch.float32, "cpu")
