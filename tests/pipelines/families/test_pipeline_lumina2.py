"""The Lumina Image 2.0 pipeline against stock diffusers, its prompts, and the replay of its rollouts."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import family_sampling
import flow_family as flow
import pytest
import torch
from diffusers import Lumina2Pipeline
from family_sampling import check_call, check_targets, fresh_stock, same, start_noise
from rounding import assert_same_sum
from tiny_flux import check_published_with_lora, check_stock_draws_with_the_saved_lora
from tiny_lumina2 import save_tiny_lumina2
from torch import Tensor

from flowrl.pipelines.families.lumina2 import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline

MODEL, LENGTH, SCALE = "Alpha-VLLM/Lumina-Image-2.0", 200, 4.0
PROMPTS = ["a red circle", "two big blue squares"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_lumina2(tmp_path_factory.mktemp("lumina") / "tiny")


load = partial(family_sampling.load, FAMILY, {"height": 32, "width": 32, "max_sequence_length": LENGTH})
shared = cache(load)


def stock_call(
    folder: Path, pipeline: FamilyPipeline, scale: float, output: str, lora: Path | None = None, **options: Any
) -> Tensor:
    """The stock pipeline on the same prompts and start noise, on its own noise levels."""
    drawn: Tensor = fresh_stock(Lumina2Pipeline, folder, lora)(
        prompt=PROMPTS, negative_prompt=["", ""], latents=start_noise(pipeline), guidance_scale=scale,
        output_type=output, num_inference_steps=flow.STEPS, max_sequence_length=LENGTH,
        height=pipeline.image_shape[1], width=pipeline.image_shape[2], **options,
    ).images  # fmt: skip
    return drawn


def ode(pipeline: FamilyPipeline, scale: float) -> Tensor:
    negative = pipeline.encode([""]) if pipeline.passes(scale) == 2 else None
    return flow.sample_ode(pipeline, pipeline.encode(PROMPTS), negative, scale)


# ---- the same images as stock diffusers ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "size"), [(1.0, (32, 32)), (4.0, (32, 48))])
def test_ode_sampling_equals_the_stock_pipeline(folder: Path, scale: float, size: tuple[int, int]) -> None:
    pipeline = load(folder, height=size[0], width=size[1])
    assert pipeline.passes(scale) == (1 if scale == 1 else 2)
    final = ode(pipeline, scale)
    assert_same_sum(final, stock_call(folder, pipeline, scale, "latent"))
    assert_same_sum(pipeline.decode(final), stock_call(folder, pipeline, scale, "pt"))
    assert (final - start_noise(pipeline)).abs().mean() > 0.1  # the network did something


@pytest.mark.slow
def test_norms_are_left_alone_where_that_is_asked_for(folder: Path) -> None:
    pipeline = load(folder, normalise=False)
    final = ode(pipeline, SCALE)
    plain = stock_call(folder, pipeline, SCALE, "latent", cfg_normalization=False)
    assert_same_sum(final, plain)
    assert (final - ode(shared(folder), SCALE)).abs().max() > 1e-3


@pytest.mark.slow
def test_a_sample_does_not_depend_on_the_prompts_beside_it(folder: Path) -> None:
    pipeline, x = shared(folder), start_noise(shared(folder), 1).expand(2, -1, -1, -1)
    cond = pipeline.encode(PROMPTS)
    assert cond.tensors["mask"][0].sum() < cond.tensors["mask"][1].sum() < LENGTH
    with torch.no_grad():
        together = pipeline.network(x, torch.tensor([700.0, 300.0]), cond)
        alone = pipeline.network(x[:1], torch.tensor([700.0]), cond[0])
        other = pipeline.network(x[:1], torch.tensor([700.0]), cond[1])
    assert_same_sum(together[:1], alone)
    assert (other - alone).abs().max() > 1e-4


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_prompts_are_read_behind_stocks_sentence_and_the_empty_one_alone(folder: Path) -> None:
    pipeline = load(folder)
    yes, mask, no, no_mask = pipeline.pipe.encode_prompt(
        PROMPTS, negative_prompt=["", "blur"], max_sequence_length=LENGTH
    )
    found, empty = pipeline.encode(PROMPTS), pipeline.encode([""])
    torch.testing.assert_close(found.tensors["embeds"], yes, atol=1e-6, rtol=0)
    torch.testing.assert_close(empty.tensors["embeds"], no[:1], atol=1e-6, rtol=0)
    assert torch.equal(found.tensors["mask"], mask)
    assert torch.equal(empty.tensors["mask"], no_mask[:1])
    bare = load(folder, system_prompt=False).encode(["blur"])
    torch.testing.assert_close(bare.tensors["embeds"], no[1:], atol=1e-6, rtol=0)
    assert not same(pipeline.encode(["blur"]), bare)
    pipeline.free_text_encoders()
    assert same(pipeline.resized(48, 32).encode(PROMPTS[1:]), found[1])
    with pytest.raises(ValueError, match="was not encoded"):
        pipeline.encode(["a cube"])


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "checkpointed"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_the_ratio_is_one_and_every_target_learns(folder: Path, dtype: torch.dtype, checkpointed: bool) -> None:
    pipeline = load(folder, dtype, gradient_checkpointing=checkpointed)
    cond, negative = pipeline.encode(PROMPTS), pipeline.encode([""])
    assert not flow.check_replay(pipeline, flow.adapted(pipeline), cond, negative, SCALE)


@pytest.mark.slow
def test_a_saved_lora_draws_the_same_in_stock_diffusers(folder: Path, tmp_path: Path) -> None:
    pipeline = load(folder)
    check_stock_draws_with_the_saved_lora(
        pipeline,
        tmp_path,
        lambda: ode(pipeline, SCALE),
        lambda: stock_call(folder, pipeline, SCALE, "latent", tmp_path),
    )


# ---- refusals, and the real network ----------------------------------------------------------------------------------


def test_folders_targets_sizes_and_lengths_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    check_targets(FAMILY, folder, "attn.to_w")
    flow.check_another_class_is_refused(FAMILY, tmp_path)
    with pytest.raises(ValueError, match=r"pipeline\.width \(40\) must be a multiple of 16"):
        load(folder, width=40)
    with pytest.raises(ValueError, match=r"pipeline\.height \(528\) .* at most 512"):
        load(folder, height=528)
    with pytest.raises(ValueError, match=r"pipeline\.max_sequence_length \(300\) must lie in 1 \.\. 299"):
        load(folder, max_sequence_length=300)


@pytest.mark.slow
def test_the_real_network_and_its_lora() -> None:
    """2.61 billion numbers, a quarter of the published bytes; 30 blocks, whose keys have a third of the heads."""
    check_published_with_lora(FAMILY, MODEL, 2_609_769_152, 30 * (2 * 2 * 2304 + 2 * (2304 + 768)))


@pytest.mark.slow
def test_the_real_network_is_called_as_planned() -> None:
    size = FAMILY.planned_size(MODEL, {"height": 512, "width": 768})
    assert size is not None
    check_call(FAMILY, MODEL, size, 256, (1, 16, 64, 96))
