"""Guidance whose negative half is a constant or is recomputed: exact replay, what is kept, masks of Qwen-Image."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import family_sampling
import pytest
import torch
from diffusers.models.transformers import transformer_qwenimage
from family_sampling import replayed, start_noise
from pretend_gpu import pretend_gpu
from rounding import assert_same_sum
from tiny_folders import SETTINGS, save_tiny
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from flowrl.pipelines import family
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.samplers.guidance import TrainNegative, is_uncounted
from flowrl.trajectory import Conditioning

PROMPTS = ["a red fox", "a red fox"]
WAYS: tuple[TrainNegative, ...] = (True, False, "recompute")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def load(name: str, folders: Path, dtype: torch.dtype = torch.float32, **options: Any) -> FamilyPipeline:
    """A tiny pipeline of a family with a LoRA that does something."""
    folder = folders / name
    if not folder.exists():
        save_tiny(name, folder)
    pipeline = family_sampling.load(family(name), SETTINGS.get(name, {}), folder, dtype, **options)  # type: ignore[arg-type]
    family_sampling.adapted(pipeline)
    return pipeline


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sd3", "flux", "qwen_image", "wan", "sd"])
def test_replay_is_exact_however_the_negative_half_is_trained(folders: Path, name: str, dtype: torch.dtype) -> None:
    pipeline = load(name, folders, dtype)
    cond, negative = pipeline.encode(PROMPTS), pipeline.encode([""])
    for scale, train in ((1.0, False), *((3.0, way) for way in WAYS)):
        velocity = pipeline.guided(pipeline.network, cond, negative, scale, train)
        replayed(pipeline, velocity, len(cond), 2)  # compares bit by bit


class _Held:
    """A tensor that autograd has saved; it lives as long as the graph needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_half_is_kept_and_the_positive_graph_is_gone_when_the_negative_is_recomputed(folders: Path) -> None:
    pipeline = load("sd3", folders)
    cond, negative, x = pipeline.encode(PROMPTS), pipeline.encode([""]), start_noise(pipeline)
    weights = {part.untyped_storage()._cdata for part in pipeline.denoiser.parameters()}
    parameters = [part for part in pipeline.denoiser.parameters() if part.requires_grad]
    held: weakref.WeakSet[_Held] = weakref.WeakSet()

    def kept() -> int:
        """Bytes of all activations that a graph holds on to now."""
        storages = {one.tensor.untyped_storage()._cdata: one.tensor.untyped_storage().nbytes() for one in held}
        return sum(size for storage, size in storages.items() if storage not in weights)

    def pack(tensor: Tensor) -> _Held:
        one = _Held(tensor)
        held.add(one)
        return one

    def watched(x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        if is_uncounted():
            left.append(kept())
        return pipeline.network(x, timestep, cond)

    sizes, gradients, left = {}, {}, list[int]()
    for train in WAYS:
        velocity = pipeline.guided(watched, cond, negative, 3.0, train)
        with saved_tensors_hooks(pack, lambda one: one.tensor):
            loss = velocity(x, torch.tensor(0.7), torch.tensor(700.0)).square().sum()
            sizes[train] = kept()
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradients[train] = torch.cat([part.flatten() for part in found if part is not None])
        del loss
        assert kept() == 0
    assert sizes[False] == pytest.approx(sizes[True] / 2, rel=0.01)
    assert sizes["recompute"] == pytest.approx(sizes[False], rel=0.01)
    assert len(left) == 1
    assert left[0] < 0.05 * sizes["recompute"]
    relative = (gradients["recompute"] - gradients[True]).norm() / gradients[True].norm()
    assert float(relative) < 1e-6
    assert float((gradients[False] - gradients[True]).norm() / gradients[True].norm()) > 0.1


def test_blocks_are_recomputed_inside_of_a_recomputed_half(folders: Path) -> None:
    found, ways = [], list[tuple[bool, TrainNegative]]([(False, True), (True, "recompute")])
    for checkpointing, train in ways:
        pipeline = load("sd3", folders, gradient_checkpointing=checkpointing)
        velocity = pipeline.guided(pipeline.network, pipeline.encode(PROMPTS), pipeline.encode([""]), 3.0, train)
        out = velocity(start_noise(pipeline), torch.tensor(0.7), torch.tensor(700.0))
        parameters = [part for part in pipeline.denoiser.parameters() if part.requires_grad]
        gradient = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
        found.append(torch.cat([part.flatten() for part in gradient if part is not None]))
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-6


# ---- Qwen-Image ------------------------------------------------------------------------------------------------------


def test_prompts_of_one_length_reach_attention_without_a_mask(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guided calls of a group have none, with lengths that differ between its prompt and the negative one."""
    pipeline, masks = load("qwen_image", folders), list[Tensor | None]()
    attention = transformer_qwenimage.dispatch_attention_fn

    def noted(*args: Any, attn_mask: Tensor | None = None, **given: Any) -> Tensor:
        masks.append(attn_mask)
        found: Tensor = attention(*args, attn_mask=attn_mask, **given)
        return found

    monkeypatch.setattr(transformer_qwenimage, "dispatch_attention_fn", noted)
    cond, negative, x = pipeline.encode(PROMPTS), pipeline.encode([""]), start_noise(pipeline)
    lengths = cond.tensors["length_on_host"].tolist(), negative.tensors["length_on_host"].tolist()
    assert lengths[0][0] == lengths[0][1] != lengths[1][0]
    sigma, timestep = torch.tensor(0.7), torch.tensor(700.0)

    @torch.no_grad()
    def answer(cond: Conditioning) -> Tensor:
        masks.clear()
        return pipeline.guided(pipeline.network, cond, negative, 4.0)(x, sigma, timestep)

    plain = answer(cond)
    assert len(masks) == 2 * 2  # two halves of two blocks
    assert masks == [None] * 4
    longer = pipeline.encode(["a red fox", "a red fox that is much longer"])
    both = answer(longer)
    assert [mask is None for mask in masks] == [True, True, False, False]
    assert_same_sum(both[:1], plain[:1])  # the same row, behind a mask


def test_a_call_does_not_wait_for_its_device(folders: Path) -> None:
    with pretend_gpu("cuda") as findings:
        folder = folders / "qwen_image"
        if not folder.exists():
            save_tiny("qwen_image", folder)
        pipeline = family("qwen_image").load(
            str(folder), dtype=torch.float32, device=torch.device("cuda"), **SETTINGS["qwen_image"]
        )
        cond, negative = pipeline.encode(PROMPTS), pipeline.encode([""])
        x = start_noise(pipeline).to("cuda")
        pipeline.guided(pipeline.network, cond, negative, 4.0)(x, torch.tensor(0.7), torch.tensor(700.0))
        before = len(findings.waits)  # tables of positions travel once
        for train in WAYS:
            pipeline.guided(pipeline.network, cond, negative, 4.0, train)(x, torch.tensor(0.7), torch.tensor(700.0))
    assert findings.waits[before:] == []
    assert not findings.faults
