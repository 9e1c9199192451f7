"""The FLUX.1 pipeline against stock diffusers, and the replay of its rollouts."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import family_sampling
import pytest
import torch
from diffusers import FluxPipeline
from family_sampling import adapted, check_targets, fresh_stock, same, start_noise
from flow_family import bare, edited
from rounding import assert_same_sum
from tiny_flux import (
    PROMPTS,
    STEPS,
    check_published_with_lora,
    check_replay,
    check_stock_draws_with_the_saved_lora,
    sample_ode,
    save_tiny_flux,
)
from torch import Tensor

from flowrl.pipelines.families.flux import FAMILY, token_ids
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pretraining.tiny_sd3 import CONTEXT

DEV, SCHNELL = "black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-schnell"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_flux(tmp_path_factory.mktemp("flux") / "dev")


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_flux(tmp_path_factory.mktemp("flux") / "schnell", distilled=True)


load = partial(family_sampling.load, FAMILY, {"height": 32, "width": 32, "max_sequence_length": CONTEXT})


def stock_call(folder: Path, latents: Tensor, scale: float, output: str, size: tuple[int, int], **lora: Path) -> Tensor:
    pipe = fresh_stock(FluxPipeline, folder, **lora)
    b, c, h, w = latents.shape
    images: Tensor = pipe(
        prompt=PROMPTS[:b], latents=FluxPipeline._pack_latents(latents, b, c, h, w), guidance_scale=scale,
        num_inference_steps=STEPS, max_sequence_length=CONTEXT, output_type=output, height=size[0], width=size[1],
    ).images  # fmt: skip
    return images


def ode(pipeline: FamilyPipeline, scale: float, b: int = 2) -> Tensor:
    return sample_ode(pipeline, pipeline.guided(pipeline.network, pipeline.encode(PROMPTS[:b]), None, scale), b)


# ---- the same images as stock diffusers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "scale", "size"), [("dev", 3.5, (32, 32)), ("dev", 1.0, (32, 48)), ("schnell", 1.0, (32, 32))]
)
def test_ode_sampling_equals_the_stock_pipeline(
    folder: Path, distilled: Path, kind: str, scale: float, size: tuple[int, int]
) -> None:
    where = folder if kind == "dev" else distilled
    pipeline = load(where, height=size[0], width=size[1])
    assert pipeline.latent_shape == (4, size[0] // 4, size[1] // 4)
    start, final = start_noise(pipeline, 2), ode(pipeline, scale)
    stock = FluxPipeline._unpack_latents(stock_call(where, start, scale, "latent", size), *size, 4)
    assert_same_sum(final, stock)
    images = stock_call(where, start, scale, "pt", size)
    assert images.shape == (2, *pipeline.image_shape)
    assert_same_sum(pipeline.decode(final), images)
    assert (stock - start).abs().mean() > 0.1  # the network did something


def test_the_scale_is_an_input_of_the_network(folder: Path) -> None:
    pipeline = load(folder)
    assert pipeline.passes(3.5) == pipeline.passes(1) == 1
    assert (ode(pipeline, 3.5) - ode(pipeline, 1.0)).abs().max() > 1e-3


def test_tokens_are_two_by_two_pixels_row_by_row() -> None:
    x = torch.arange(2 * 4 * 6).float().view(1, 2, 4, 6)
    tokens = common.pack(x)
    assert torch.equal(tokens, FluxPipeline._pack_latents(x, 1, 2, 4, 6))
    assert tokens[0, 1].tolist() == [2, 3, 8, 9, 26, 27, 32, 33]
    assert torch.equal(common.unpack(tokens, (2, 4, 6)), x)
    assert token_ids((2, 4, 6), 1).tolist() == [[1, r, c] for r in range(2) for c in range(3)]


def test_the_grid_is_the_published_one(folder: Path, distilled: Path) -> None:
    pipeline, static = load(folder), load(distilled)
    published = [1.0, 0.903736, 0.789705, 0.652489, 0.484218, 0.273003, 0.0]  # FLUX.1-dev at 512 x 512: mu 0.63
    large = load(folder, height=256, width=256)  # as many tokens as 512 x 512 has with FLUX's own VAE
    torch.testing.assert_close(large.schedule(6, "diffusers").sigma, torch.tensor(published), atol=1e-6, rtol=0)
    assert torch.equal(large.schedule(6, "linspace").sigma, large.schedule(6, "diffusers").sigma)
    shifted = pipeline.schedule(4, "diffusers", math.exp(0.63)).sigma
    torch.testing.assert_close(shifted, large.schedule(4, "diffusers").sigma)
    assert static.schedule(4, "diffusers").sigma.tolist() == [1, 0.75, 0.5, 0.25, 0]
    torch.testing.assert_close(static.schedule(2, "linspace", 3.0).sigma, torch.tensor([1, 0.75, 0]))
    torch.testing.assert_close(static.schedule(4, "diffusers").timestep, torch.tensor([1000.0, 750, 500, 250]))


def test_shifts_and_grids_that_do_not_exist_are_refused(folder: Path, distilled: Path) -> None:
    with pytest.raises(ValueError, match=r"shift must be positive, got -1"):
        load(folder).schedule(4, "diffusers", -1.0)
    with pytest.raises(ValueError, match=r"shift must be positive, got 0"):
        load(distilled).schedule(4, "diffusers", 0.0)
    with pytest.raises(ValueError, match=r"unknown sigma grid 'karras'"):
        load(folder).schedule(4, "karras")


def test_encoding_images_is_the_inverse_of_what_the_vae_decodes(folder: Path) -> None:
    pipeline = load(folder)
    images = torch.linspace(0, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
    mode = pipeline.pipe.vae.encode(2 * images - 1).latent_dist.mode()
    torch.testing.assert_close(pipeline.encode_images(images), (mode - 0.1159) * 0.3611, atol=1e-6, rtol=0)


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_embeddings_are_those_of_stock_and_independent_of_their_batch(folder: Path) -> None:
    pipeline, other = load(folder), load(folder)
    cond = pipeline.encode(PROMPTS)
    embeds, pooled, ids = other.pipe.encode_prompt(PROMPTS, max_sequence_length=CONTEXT)
    torch.testing.assert_close(cond.tensors["embeds"], embeds, atol=1e-6, rtol=0)
    torch.testing.assert_close(cond.tensors["pooled"], pooled, atol=1e-6, rtol=0)
    assert not ids.any()
    assert same(other.encode([PROMPTS[1]]), cond[1])
    pipeline.free_text_encoders()
    assert pipeline.pipe.text_encoder is pipeline.pipe.text_encoder_2 is None
    assert same(pipeline.resized(48, 32).encode(PROMPTS[::-1]), cond[[2, 1, 0]])
    with pytest.raises(ValueError, match=r"'a pink star' was not encoded"):
        pipeline.encode(["a pink star"])


def test_source_images_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="flux takes no source image"):
        load(folder).encode(PROMPTS[:1], [[torch.zeros(3, 32, 32)]])


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "checkpointed"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_the_ratio_is_one_and_every_target_learns(folder: Path, dtype: torch.dtype, checkpointed: bool) -> None:
    pipeline = load(folder, dtype, gradient_checkpointing=checkpointed)
    check_replay(pipeline, adapted(pipeline), pipeline.encode(PROMPTS), None, 3.5)


@pytest.mark.slow
def test_a_saved_lora_draws_the_same_in_stock_diffusers(folder: Path, tmp_path: Path) -> None:
    pipeline = load(folder)

    def stock() -> Tensor:
        latents = stock_call(folder, start_noise(pipeline), 3.5, "latent", (32, 32), lora=tmp_path)
        return FluxPipeline._unpack_latents(latents, 32, 32, 4)

    check_stock_draws_with_the_saved_lora(pipeline, tmp_path, lambda: ode(pipeline, 3.5), stock)


# ---- refusals, and the real networks ---------------------------------------------------------------------------------


def test_guidance_of_a_model_that_has_none_is_refused(distilled: Path) -> None:
    pipeline = load(distilled)
    cond = pipeline.encode(PROMPTS[:1])
    with pytest.raises(ValueError, match=r"distilled and has no guidance, got scale 3\.5: set sampler\.guidance_scale"):
        pipeline.guided(pipeline.network, cond, None, 3.5)
    with pytest.raises(ValueError, match="has no guidance, got scale 0"):
        pipeline.guided(pipeline.network, cond, None, 0.0)
    assert pipeline.passes(2.0) == pipeline.passes(1.0) == 1


def test_a_prompt_has_as_many_tokens_as_the_model_was_released_for(folder: Path, distilled: Path) -> None:
    own: dict[str, Any] = {"dtype": torch.float32, "height": 32, "width": 32}
    assert FAMILY.load(str(folder), **own).max_sequence_length == 512
    assert FAMILY.load(str(folder), **own, max_sequence_length=300).max_sequence_length == 300
    schnell = FAMILY.load(str(distilled), **own)
    assert schnell.encode(PROMPTS[:1]).tensors["embeds"].shape[:2] == (1, 256)
    assert FAMILY.load(str(distilled), **own, max_sequence_length=256).max_sequence_length == 256
    assert [FAMILY.text_tokens(model, {}) for model in (DEV, SCHNELL, "someone/unknown")] == [512, 256, 512]
    assert [FAMILY.text_tokens(str(where), {}) for where in (folder, distilled)] == [512, 256]
    assert [FAMILY.text_tokens(model, {"max_sequence_length": 200}) for model in (DEV, SCHNELL)] == [200, 200]


def test_more_tokens_than_a_distilled_model_was_released_for_are_refused(distilled: Path) -> None:
    with pytest.raises(ValueError, match=r"pipeline\.max_sequence_length \(257\) must be at most 256 for "):
        load(distilled, max_sequence_length=257)
    with pytest.raises(ValueError, match=r"max_sequence_length \(512\) must be at most 256 for black-forest-labs"):
        FAMILY.text_tokens(SCHNELL, {"max_sequence_length": 512})


def test_folders_targets_and_sizes_that_do_not_fit_are_refused(
    folder: Path, tiny_sd3_folder: Path, tmp_path: Path
) -> None:
    check_targets(FAMILY, folder, "attn.to_w")
    with pytest.raises(ValueError, match=r"is a StableDiffusion3Pipeline, and pipeline\.name=flux loads FluxPipeline"):
        FAMILY.check(str(tiny_sd3_folder), None)
    with pytest.raises(ValueError, match=r"pipeline\.width \(36\) must be a multiple of 8"):
        load(folder, width=36)
    copied = bare(folder, tmp_path)
    edited(copied / "transformer" / "config.json", in_channels=24)
    for refusal in (lambda: FAMILY.check(str(copied), None), lambda: load(copied)):
        with pytest.raises(ValueError, match=r"takes 24 channels per token, .* have 16: it is a fill or control model"):
            refusal()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "count"), [(DEV, 11_901_408_320), (SCHNELL, 11_891_178_560)])
def test_the_real_network_and_its_lora(model: str, count: int) -> None:
    """11.90 billion numbers; r (in + out) numbers per layer, of width 3072 and 12288 inside the feed-forward layers."""
    width = 19 * (8 * 2 * 3072 + 4 * (3072 + 12288)) + 38 * 3 * 2 * 3072
    check_published_with_lora(FAMILY, model, count, width)
