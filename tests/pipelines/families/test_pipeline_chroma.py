"""The Chroma pipeline against stock diffusers, its masks, and the replay of its rollouts."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import family_sampling
import flow_family as flow
import pytest
import torch
from diffusers import ChromaPipeline
from family_sampling import check_call, check_targets, fresh_stock, same, start_noise
from flow_family import bare, edited
from rounding import assert_same_sum
from tiny_flux import check_published_with_lora, check_stock_draws_with_the_saved_lora, save_tiny_chroma
from torch import Tensor

from flowrl.pipelines.families.chroma import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.trajectory import Conditioning

LENGTH, SCALE = 16, 3.0
PROMPTS = ["a red circle", "two blue squares left of a big green star"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chroma(tmp_path_factory.mktemp("chroma") / "tiny")


load = partial(family_sampling.load, FAMILY, {"height": 32, "width": 32, "max_sequence_length": LENGTH})
shared = cache(load)


def stock_call(folder: Path, pipeline: FamilyPipeline, scale: float, output: str, **lora: Path) -> Tensor:
    """The stock pipeline on the same prompts and start noise, on its own noise levels."""
    pipe = fresh_stock(ChromaPipeline, folder, **lora)
    height, width = pipeline.image_shape[1:]
    noise = ChromaPipeline._pack_latents(start_noise(pipeline), 2, *pipeline.latent_shape)
    drawn: Tensor = pipe(
        prompt=PROMPTS, negative_prompt=["blur"] * 2, latents=noise, guidance_scale=scale, output_type=output,
        num_inference_steps=flow.STEPS, max_sequence_length=LENGTH, height=height, width=width,
    ).images  # fmt: skip
    return ChromaPipeline._unpack_latents(drawn, height, width, 4) if output == "latent" else drawn


def ode(pipeline: FamilyPipeline, scale: float) -> Tensor:
    negative = pipeline.encode(["blur"]) if pipeline.passes(scale) == 2 else None
    return flow.sample_ode(pipeline, pipeline.encode(PROMPTS), negative, scale)


# ---- the same images as stock diffusers ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "size"), [(1.0, (32, 32)), (3.0, (32, 32)), (5.0, (32, 48))])
def test_ode_sampling_equals_the_stock_pipeline(folder: Path, scale: float, size: tuple[int, int]) -> None:
    pipeline = load(folder, height=size[0], width=size[1])
    assert pipeline.passes(scale) == (1 if scale == 1 else 2)
    final = ode(pipeline, scale)
    assert_same_sum(final, stock_call(folder, pipeline, scale, "latent"))
    assert_same_sum(pipeline.decode(final), stock_call(folder, pipeline, scale, "pt"))
    assert (final - start_noise(pipeline)).abs().mean() > 0.1  # the network did something


@pytest.mark.slow
def test_embeddings_and_masks_are_those_of_stock_and_independent_of_their_batch(folder: Path) -> None:
    pipeline = load(folder)
    cond = pipeline.encode(PROMPTS)
    embeds, _ids, mask, *_ = pipeline.pipe.encode_prompt(
        PROMPTS, do_classifier_free_guidance=False, max_sequence_length=LENGTH
    )
    torch.testing.assert_close(cond.tensors["embeds"], embeds, atol=1e-6, rtol=0)
    assert torch.equal(cond.tensors["mask"], mask)
    assert mask[0].sum() < mask[1].sum() <= LENGTH
    assert same(shared(folder).encode(PROMPTS[1:]), cond[1])
    flow_prompts = pipeline.encode(["a star"])
    pipeline.free_text_encoders()
    assert same(pipeline.resized(48, 32).encode(["a star"]), flow_prompts)
    with pytest.raises(ValueError, match="was not encoded"):
        pipeline.encode(["a cube"])


# ---- masks -----------------------------------------------------------------------------------------------------------


def velocity(pipeline: FamilyPipeline, cond: Conditioning) -> Tensor:
    """At one time, of as many images as there are prompts."""
    with torch.no_grad():
        return pipeline.network(start_noise(pipeline, len(cond)), torch.full((len(cond),), 600.0), cond)


@pytest.mark.slow
def test_hidden_padding_is_as_if_it_were_cut_off(folder: Path) -> None:
    """All tokens of text stand at one position, so that nothing else tells of those behind them."""
    stock, hidden = shared(folder), shared(folder, masking="hidden")
    cond = hidden.encode(PROMPTS[:1])
    count = int(cond.tensors["mask"].sum())
    assert count < LENGTH
    cut = Conditioning({name: tensor[:, :count] for name, tensor in cond.tensors.items()})
    assert_same_sum(velocity(hidden, cond), velocity(hidden, cut))
    assert (velocity(stock, cond) - velocity(stock, cut)).abs().max() > 1e-4  # stock's attention reads padding


@pytest.mark.slow
@pytest.mark.parametrize("masking", ["stock", "hidden"])
def test_recomputed_blocks_see_the_same_masks(folder: Path, masking: str) -> None:
    """The velocity and its gradient, with and without; stock itself drops the mask of half of the blocks."""
    found = []
    for checkpointed in (False, True):
        pipeline = load(folder, masking=masking, gradient_checkpointing=checkpointed)
        cond = pipeline.encode(PROMPTS)
        x = start_noise(pipeline).requires_grad_()
        out = pipeline.network(x, torch.tensor([700.0, 300.0]), cond)
        again = pipeline.network(x, torch.tensor([500.0, 500.0]), cond[[1, 0]])  # another mask before the way back
        gradient = torch.autograd.grad((out * again).sum(), x)[0]
        found.append((out.detach(), gradient))
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, plain, atol=1e-6, rtol=1e-6)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {"gradient_checkpointing": True, "masking": "hidden"})],
    ids=str,
)
def test_the_ratio_is_one_and_every_target_learns(folder: Path, dtype: torch.dtype, options: dict[str, Any]) -> None:
    pipeline = load(folder, dtype, **options)
    cond, negative = pipeline.encode(PROMPTS), pipeline.encode(["blur"])
    idle = flow.check_replay(pipeline, flow.adapted(pipeline), cond, negative, SCALE)
    assert not idle


@pytest.mark.slow
def test_a_saved_lora_draws_the_same_in_stock_diffusers(folder: Path, tmp_path: Path) -> None:
    pipeline = load(folder)
    check_stock_draws_with_the_saved_lora(
        pipeline,
        tmp_path,
        lambda: ode(pipeline, SCALE),
        lambda: stock_call(folder, pipeline, SCALE, "latent", lora=tmp_path),
    )


# ---- refusals, and the real network ----------------------------------------------------------------------------------


def test_folders_targets_sizes_and_options_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    check_targets(FAMILY, folder, "attn.to_w")
    (tmp_path / "other").mkdir()
    flow.check_another_class_is_refused(FAMILY, tmp_path / "other")
    with pytest.raises(ValueError, match=r"pipeline\.width \(36\) must be a multiple of 8"):
        load(folder, width=36)
    with pytest.raises(ValueError, match=r"pipeline\.max_sequence_length \(513\) must lie in 1 \.\. 512"):
        load(folder, max_sequence_length=513)
    with pytest.raises(ValueError, match="masking"):
        FAMILY.check_options({"masking": "soft"})
    copied = bare(folder, tmp_path)
    edited(copied / "transformer" / "config.json", in_channels=24)
    with pytest.raises(ValueError, match="takes 24 channels per token"):
        FAMILY.check(str(copied), None)


@pytest.mark.slow
def test_the_real_network_and_its_lora() -> None:
    """8.90 billion numbers, half the bytes of the published files in bfloat16; r (in + out) numbers per layer."""
    width = 19 * (8 * 2 * 3072 + 4 * (3072 + 12288)) + 38 * 3 * 2 * 3072
    check_published_with_lora(FAMILY, "lodestones/Chroma1-HD", 8_899_983_424, width)
    assert FAMILY.text_tokens("lodestones/Chroma1-HD", {}) == 512
    size = FAMILY.planned_size("lodestones/Chroma1-HD", {})
    assert size is not None
    assert (size.height, size.width) == (1024, 1024)


@pytest.mark.slow
def test_the_real_network_is_called_as_planned() -> None:
    size = FAMILY.planned_size("lodestones/Chroma1-HD", {"height": 512, "width": 768})
    assert size is not None
    check_call(FAMILY, "lodestones/Chroma1-HD", size, 512, (1, 32 * 48, 64))
