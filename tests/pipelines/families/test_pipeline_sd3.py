"""The SD3 pipeline against stock diffusers, and the replay of its rollouts."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from family_sampling import replayed, start_noise
from family_sampling import stock as stock_pipeline
from rounding import assert_same_sum
from tiny_models import PROMPTS, adapted, bound, guided, load_tiny, sample_ode, sample_sde
from torch import Tensor

from flowrl.pipelines import family
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.lora import Policy
from flowrl.pretraining.tiny_sd3 import CONTEXT
from flowrl.recipes import grpo
from flowrl.samplers import Velocity, gaussian_log_prob
from flowrl.samplers.completion import sample_trajectories
from flowrl.samplers.guidance import classifier_free_guidance
from flowrl.training.draws import AskedPrompts
from flowrl.training.learner import NetworkCounter
from flowrl.training.record import Recording
from flowrl.trajectory import Conditioning, Credit

STEPS = 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WITH_DENSITY = ["flow_sde", "dance_sde", "cps", "ddim_flow", "wan_sde", "dpm_sde"]


@cache
def shared(folder: Path, dtype: torch.dtype, gradient_checkpointing: bool) -> tuple[FamilyPipeline, Policy]:
    """Loaded once per setting; the tests that take it leave it as it was."""
    return adapted(folder, dtype, gradient_checkpointing=gradient_checkpointing)


# ---- the same images as stock diffusers ------------------------------------------------------------------------------


def stock_call(folder: Path, latents: Tensor, scale: float, grid: str, output: str, **size: int) -> Tensor:
    pipe = stock_pipeline(StableDiffusion3Pipeline, folder)
    b = len(latents)
    grids = {"diffusers": {}, "linspace": {"sigmas": np.linspace(1, 1 / STEPS, STEPS).tolist()}}
    return pipe(
        prompt=PROMPTS[:b], negative_prompt=[""] * b, latents=latents.clone(), guidance_scale=scale,
        num_inference_steps=STEPS, max_sequence_length=CONTEXT, output_type=output, **grids[grid], **size,
    ).images  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 4.5])
@pytest.mark.parametrize("grid", ["diffusers", "linspace"])
def test_ode_sampling_equals_the_stock_pipeline(tiny_sd3_folder: Path, grid: str, scale: float) -> None:
    pipeline = load_tiny(tiny_sd3_folder)
    start, final = start_noise(pipeline, 2), sample_ode(pipeline, PROMPTS[:2], scale, STEPS, grid)
    stock = stock_call(tiny_sd3_folder, start, scale, grid, "latent")
    assert_same_sum(final, stock)
    images = stock_call(tiny_sd3_folder, start, scale, grid, "pt")
    assert_same_sum(pipeline.decode(final), images)
    assert (stock - start).abs().mean() > 0.1  # the network did something


def test_images_that_are_not_square_keep_height_and_width(tiny_sd3_folder: Path) -> None:
    pipeline = FAMILY.load(str(tiny_sd3_folder), dtype=torch.float32, height=64, width=32, max_sequence_length=CONTEXT)
    assert pipeline.latent_shape == (8, 8, 4)
    images = pipeline.decode(sample_ode(pipeline, PROMPTS[:2], 4.5, STEPS))
    stock = stock_call(tiny_sd3_folder, start_noise(pipeline, 2), 4.5, "diffusers", "pt", height=64, width=32)
    assert images.shape == (2, 3, 64, 32)
    assert_same_sum(images, stock)


# ---- the ratio is exactly 1 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "dtype", "scale", "gradient_checkpointing"),
    [
        *itertools.product(["flow_sde"], DTYPES, [1.0, 4.0], [False, True]),
        *((kernel, torch.bfloat16, 4.0, True) for kernel in WITH_DENSITY if kernel != "flow_sde"),
    ],
    ids=str,
)
def test_replayed_log_probs_equal_the_rollouts(
    tiny_sd3_folder: Path, kernel: str, dtype: torch.dtype, scale: float, gradient_checkpointing: bool
) -> None:
    pipeline, policy = shared(tiny_sd3_folder, dtype, gradient_checkpointing)
    log_prob = replayed(pipeline, guided(pipeline, PROMPTS[:2], scale), 2, STEPS, kernel)
    assert len(log_prob) == 2
    gradients = torch.autograd.grad(log_prob[-1].sum(), list(policy.parameters.values()), allow_unused=True)
    assert sum(float(g.abs().sum()) for g in gradients if g is not None) > 0  # it was a training pass


def test_gradient_checkpointing_is_on_when_asked_for_and_changes_no_gradient(tiny_sd3_folder: Path) -> None:
    found = []
    for checkpointed in (False, True):
        pipeline, policy = shared(tiny_sd3_folder, torch.bfloat16, checkpointed)
        calls: list[int] = []
        block = pipeline.pipe.transformer.transformer_blocks[0]
        # Counted on entry: a recomputation stops as soon as it has what the backward pass asked for.
        hook = block.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        velocity = guided(pipeline, PROMPTS[:2], 4.0)
        output = velocity(start_noise(pipeline, 2), torch.tensor(0.7), torch.tensor(700.0))
        found.append(torch.autograd.grad(output.square().sum(), list(policy.parameters.values()), allow_unused=True))
        hook.remove()
        assert len(calls) == (2 if checkpointed else 1)
    for plain, recomputed in zip(*found, strict=True):
        assert (plain is None) == (recomputed is None)
        assert plain is None or torch.equal(plain, recomputed)


class LoopOfParts:
    """What the replay asks a loop for, around a pipeline that is there already."""

    shards, device = None, torch.device("cpu")

    def __init__(self, pipeline: FamilyPipeline, scale: float) -> None:
        self.network, self.scale = NetworkCounter(pipeline.network, {}), scale
        self.negative = pipeline.encode([""])

    def velocity(self, cond: Conditioning) -> Velocity:
        return classifier_free_guidance(self.network, cond, self.negative, self.scale)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 4.0), (torch.bfloat16, 4.0), (torch.float16, 1.0)], ids=str
)
def test_the_recipes_replay_gives_ratio_one_at_its_own_and_at_another_batch_size(
    tiny_sd3_folder: Path, dtype: torch.dtype, scale: float
) -> None:
    pipeline, _ = shared(tiny_sd3_folder, dtype, False)
    schedule = pipeline.schedule(STEPS, "diffusers")
    kernel, each = bound("flow_sde", schedule), torch.arange(len(PROMPTS))
    sampled = sample_trajectories(sample_sde(pipeline, PROMPTS, scale, schedule, kernel), each, None)
    credit = Credit(raw=torch.zeros(1, len(sampled)), norm=sampled.group)
    keep = torch.ones(len(sampled), dtype=torch.bool)
    rows = grpo.rows_of(sampled, credit, torch.linspace(-1, 1, len(sampled))[None], keep, (1e-4, 1e-4))
    loop: Any = LoopOfParts(pipeline, scale)
    asked = AskedPrompts(groups=each, prompts=(), prompt_ids=(), cond=pipeline.encode(PROMPTS))
    record = Recording(loop, asked, sampled, kernel, schedule)
    for size in (4, 2, 1):
        blocks = grpo.micro_batches(rows, size, 1)
        old = rows if size == 4 else record.with_old_of_updates(rows, blocks)
        (indexes,) = blocks
        assert sorted(torch.cat(indexes).tolist()) == list(range(8))  # every row once
        for index in indexes:
            part = old[index]
            new = record.replay(part)
            assert torch.equal(gaussian_log_prob(sampled.states[part.produced], new), part.old_log_prob)
            assert new.mean.requires_grad
        # Recomputed values stay near the recorded ones: the same rows, in the same order.
        tolerance = 1e-2 if dtype == torch.float32 else 3.0  # of sums over 512 dimensions
        torch.testing.assert_close(old.old_log_prob, rows.old_log_prob, atol=tolerance, rtol=0)


def test_both_guidance_branches_carry_gradient(tiny_sd3_folder: Path) -> None:
    pipeline, policy = shared(tiny_sd3_folder, torch.float32, False)
    x, sigma, timestep = start_noise(pipeline, 2), torch.tensor(0.7), torch.tensor(700.0)
    weights = torch.linspace(-1, 1, x.numel()).view_as(x)

    def gradient(prompts: list[str], scale: float) -> Tensor:
        output = guided(pipeline, prompts, scale)(x, sigma, timestep)
        found = torch.autograd.grad(
            (output * weights).sum(), list(policy.parameters.values()), allow_unused=True, materialize_grads=True
        )
        return torch.cat([g.flatten() for g in found])

    negative, positive = gradient(["", ""], 1.0), gradient(PROMPTS[:2], 1.0)
    assert min(float(negative.norm()), float(positive.norm())) > 0
    assert (negative - positive).norm() > 1e-3 * positive.norm()
    torch.testing.assert_close(gradient(PROMPTS[:2], 4.0), 4 * positive - 3 * negative, atol=1e-3, rtol=1e-3)


# ---- prompts and images ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_embedding_does_not_depend_on_its_batch_and_is_computed_once(
    tiny_sd3_folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, other = load_tiny(tiny_sd3_folder, dtype), load_tiny(tiny_sd3_folder, dtype)
    encoded: list[str] = []
    original = pipeline.embeddings.texts.encode_one

    def noted(prompt: str, sources: Sequence[torch.Tensor]) -> Conditioning:
        encoded.append(prompt)
        return original(prompt, sources)

    monkeypatch.setattr(pipeline.embeddings.texts, "encode_one", noted)
    together = pipeline.encode([*PROMPTS, PROMPTS[0]])
    alone = other.encode([PROMPTS[2]])
    for name, tensor in together.tensors.items():
        assert tensor.dtype == dtype
        assert not tensor.requires_grad
        assert torch.equal(tensor[2:3], alone.tensors[name])
        assert torch.equal(tensor[0], tensor[4])
        assert not torch.equal(tensor[0], tensor[1])
    pipeline.encode(PROMPTS)
    assert encoded == PROMPTS


def test_only_known_prompts_can_be_asked_for_after_the_encoders_are_freed(tiny_sd3_folder: Path) -> None:
    pipeline = load_tiny(tiny_sd3_folder)
    before = pipeline.encode(PROMPTS[:2])
    pipeline.free_text_encoders()
    assert pipeline.pipe.text_encoder_3 is None
    after = pipeline.encode(PROMPTS[1::-1])
    for name, tensor in before.tensors.items():
        assert torch.equal(after.tensors[name], tensor.flip(0))
    with pytest.raises(ValueError, match=r"'three stars' was not encoded.*free_text_encoders=false"):
        pipeline.encode(["three stars"])


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_decoding_in_slices_gives_the_same_float32_images(tiny_sd3_folder: Path, dtype: torch.dtype) -> None:
    whole = FAMILY.load(str(tiny_sd3_folder), dtype=dtype, vae_slice=5)
    sliced = FAMILY.load(str(tiny_sd3_folder), dtype=dtype, vae_slice=2)
    latents = 3 * start_noise(whole, 5)
    images = sliced.decode(latents)
    assert images.shape == (5, 3, 64, 64)
    assert images.dtype == torch.float32
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert_same_sum(images, whole.decode(latents))


def test_scaling_and_shift_of_the_vae_are_undone(tiny_sd3_folder: Path) -> None:
    pipeline = load_tiny(tiny_sd3_folder)
    latents = start_noise(pipeline, 2)
    plain = pipeline.decode(latents)
    pipeline.pipe.vae.register_to_config(scaling_factor=2.0, shift_factor=0.5)
    assert_same_sum(pipeline.decode((latents - 0.5) * 2.0), plain)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder_without_weights(tiny_sd3_folder: Path, tmp_path: Path) -> Path:
    """All configurations and no weights: whatever passes here was known before anything loads."""
    return shutil.copytree(tiny_sd3_folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))


def test_targets_that_bind_to_nothing_are_refused_before_weights_load(folder_without_weights: Path) -> None:
    model = str(folder_without_weights)
    FAMILY.check(model, FAMILY.lora_targets)
    with pytest.raises(ValueError, match=r"'attn\.to_qq' matches no linear layer.*attn\.to_q\b"):
        FAMILY.check(model, [*FAMILY.lora_targets, "attn.to_qq"])
    with pytest.raises(ValueError, match=r"'tn\.to_q' matches no linear layer"):
        FAMILY.check(model, ["tn.to_q"])  # names are matched at their dots
    with pytest.raises(ValueError, match=r"'attn\.norm_q' matches no linear layer"):
        FAMILY.check(model, ["attn.norm_q"])  # there, but it has no weight matrix


def test_folders_of_another_kind_are_refused(folder_without_weights: Path, tmp_path: Path) -> None:
    index = folder_without_weights / "model_index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    index.write_text(json.dumps({**content, "_class_name": "FluxPipeline"}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"is a FluxPipeline, and .*StableDiffusion3Pipeline"):
        FAMILY.check(str(folder_without_weights), None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        FAMILY.check(str(tmp_path / "empty"), None)
    with pytest.raises(ValueError, match=r"empty is not a diffusers pipeline.*give the folder"):
        FAMILY.load(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"unknown pipeline\.name 'sd4' \(did you mean 'sd"):
        family("sd4")


@pytest.mark.parametrize(
    ("height", "width", "message"),
    [
        (60, None, r"pipeline\.height \(60\) must be a multiple of 8"),
        (None, 4, r"pipeline\.width \(4\) must be a multiple of 8"),
        (None, 72, r"pipeline\.width \(72\) .* at most 64"),
    ],
)
def test_sizes_the_model_cannot_draw_are_refused(
    tiny_sd3_folder: Path, height: int | None, width: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FAMILY.load(str(tiny_sd3_folder), dtype=torch.float32, height=height, width=width)
