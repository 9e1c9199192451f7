"""The FLUX.1 Kontext pipeline against stock diffusers, its source images, and the replay of its rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FluxKontextPipeline
from family_sampling import adapted, check_targets, fresh_stock, same, start_noise
from rounding import assert_same_sum
from tiny_flux import (
    PROMPTS,
    STEPS,
    check_published_with_lora,
    check_replay,
    check_stock_draws_with_the_saved_lora,
    images,
    sample_ode,
    save_tiny_kontext,
)
from torch import Tensor

from flowrl.pipelines.families import flux
from flowrl.pipelines.families.kontext import FAMILY
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pretraining.tiny_families import build_tiny_kontext
from flowrl.pretraining.tiny_sd3 import CONTEXT

MODEL = "black-forest-labs/FLUX.1-Kontext-dev"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_kontext(tmp_path_factory.mktemp("flux") / "kontext")


def load(folder: Path, dtype: torch.dtype = torch.float32, size: tuple[int, int] = (32, 32)) -> FamilyPipeline:
    return FAMILY.load(str(folder), dtype=dtype, max_sequence_length=CONTEXT, height=size[0], width=size[1])


def sources(count: int, size: tuple[int, int] = (32, 32)) -> list[list[Tensor]]:
    return [[image] for image in images(count, *size)]


def stock_call(folder: Path, latents: Tensor, scale: float, output: str, size: tuple[int, int], **lora: Path) -> Tensor:
    pipe = fresh_stock(FluxKontextPipeline, folder, **lora)
    b, c, h, w = latents.shape
    drawn: Tensor = pipe(
        image=torch.stack(images(b, *size)), prompt=PROMPTS[:b], guidance_scale=scale,
        latents=FluxKontextPipeline._pack_latents(latents, b, c, h, w), num_inference_steps=STEPS,
        max_sequence_length=CONTEXT, output_type=output, height=size[0], width=size[1], max_area=size[0] * size[1],
        _auto_resize=False,
    ).images  # fmt: skip
    return drawn


def ode(pipeline: FamilyPipeline, scale: float, given: list[list[Tensor]]) -> Tensor:
    b = len(given)
    cond = pipeline.encode(PROMPTS[:b], given)
    return sample_ode(pipeline, pipeline.guided(pipeline.network, cond, None, scale), b)


# ---- the same images as stock diffusers ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "size"), [(2.5, (32, 32)), (1.0, (24, 48))])
def test_ode_sampling_equals_the_stock_pipeline(folder: Path, scale: float, size: tuple[int, int]) -> None:
    pipeline = load(folder, size=size)
    start, final = start_noise(pipeline, 2), ode(pipeline, scale, sources(2, size))
    stock = FluxKontextPipeline._unpack_latents(stock_call(folder, start, scale, "latent", size), *size, 4)
    assert_same_sum(final, stock)
    images = stock_call(folder, start, scale, "pt", size)
    assert images.shape == (2, *pipeline.image_shape)
    assert_same_sum(pipeline.decode(final), images)


@pytest.mark.slow
def test_scale_and_source_image_change_what_is_drawn(folder: Path) -> None:
    pipeline, given = load(folder), sources(2)
    assert pipeline.passes(2.5) == 1
    plain = ode(pipeline, 2.5, given)
    assert (plain - ode(pipeline, 1.0, given)).abs().max() > 1e-3
    assert (plain - ode(pipeline, 2.5, given[::-1])).abs().max() > 1e-3


@pytest.mark.slow
def test_the_grid_counts_the_tokens_that_are_drawn_alone(folder: Path) -> None:
    published = [1.0, 0.903736, 0.789705, 0.652489, 0.484218, 0.273003, 0.0]  # at 1024 tokens
    sigma = load(folder, size=(256, 256)).schedule(6, "diffusers").sigma
    torch.testing.assert_close(sigma, torch.tensor(published), atol=1e-6, rtol=0)


# ---- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_source_is_encoded_once_by_the_posteriors_mean(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, ((image,), other) = load(folder), sources(2)
    calls: list[int] = []
    original = AutoencoderKL.encode

    def noted(vae: AutoencoderKL, x: Tensor) -> Any:
        calls.append(len(x))
        return original(vae, x)

    monkeypatch.setattr(AutoencoderKL, "encode", noted)
    cond = pipeline.encode([PROMPTS[0], PROMPTS[1], PROMPTS[0]], [[image], [image], other])
    assert calls == [1, 1]
    assert cond.tensors["image_latents"].shape == (3, *pipeline.latent_shape)
    assert torch.equal(cond.tensors["image_latents"][0], cond.tensors["image_latents"][1])
    posterior = original(pipeline.pipe.vae, 2 * image[None] - 1).latent_dist
    expected = (posterior.mode() - 0.1159) * 0.3611
    torch.testing.assert_close(cond.tensors["image_latents"][:1], expected, atol=1e-6, rtol=0)
    assert torch.equal(cond.tensors["embeds"][0], cond.tensors["embeds"][2])


def test_sources_are_brought_to_the_drawn_size_without_stretching(folder: Path) -> None:
    pipeline = load(folder)
    wide = torch.zeros(3, 64, 128)
    wide[:, :, 32:96] = 0.75  # the middle is what covers a square
    assert torch.equal(common.covering(wide[:, :32, 16:48], 32, 32), wide[:, :32, 16:48])
    fitted = common.covering(wide, 32, 32)
    assert fitted.shape == (3, 32, 32)
    torch.testing.assert_close(fitted[:, :, 3:-3], torch.full((3, 32, 26), 0.75), atol=1e-3, rtol=0)
    given = pipeline.encode(PROMPTS[:1], [[wide]]).tensors["image_latents"]
    assert torch.equal(given, pipeline.encode_images(fitted[None]))
    assert common.covering(torch.ones(3, 7, 5), 32, 24).shape == (3, 32, 24)


@pytest.mark.slow
def test_another_size_encodes_sources_again_also_after_the_text_encoders_are_freed(folder: Path) -> None:
    pipeline, given = load(folder), sources(2, (48, 48))
    pipeline.encode(PROMPTS[:2], given)
    pipeline.free_text_encoders()
    larger = pipeline.resized(48, 48)
    cond = larger.encode(PROMPTS[:2], given)
    assert cond.tensors["image_latents"].shape == (2, *larger.latent_shape) == (2, 4, 12, 12)
    assert same(cond, load(folder, size=(48, 48)).encode(PROMPTS[:2], given))
    assert ode(larger, 2.5, given).shape == (2, 4, 12, 12)
    assert pipeline.encode(PROMPTS[:1], sources(1)).tensors["image_latents"].shape == (1, 4, 8, 8)  # a new source
    with pytest.raises(ValueError, match=r"'a pink star' was not encoded"):
        pipeline.encode(["a pink star"], given[:1])


def test_prompts_without_one_source_are_refused(folder: Path) -> None:
    pipeline, (first, second) = load(folder), sources(2)
    with pytest.raises(ValueError, match="has 0 source images, and kontext takes 1"):
        pipeline.encode(PROMPTS[:1])
    with pytest.raises(ValueError, match="has 2 source images, and kontext takes 1"):
        pipeline.encode(PROMPTS[:1], [[*first, *second]])


@pytest.mark.slow
def test_embeddings_are_those_of_stock(folder: Path) -> None:
    pipeline = load(folder)
    cond = pipeline.encode(PROMPTS, sources(3))
    embeds, pooled, _ = pipeline.pipe.encode_prompt(PROMPTS, max_sequence_length=CONTEXT)
    torch.testing.assert_close(cond.tensors["embeds"], embeds, atol=1e-6, rtol=0)
    torch.testing.assert_close(cond.tensors["pooled"], pooled, atol=1e-6, rtol=0)
    assert same(load(folder).encode(PROMPTS[2:], sources(3)[2:]), cond[2])


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_ratio_is_one_and_every_target_learns(folder: Path, dtype: torch.dtype) -> None:
    pipeline = load(folder, dtype)
    check_replay(pipeline, adapted(pipeline), pipeline.encode(PROMPTS, sources(3)), None, 2.5)


@pytest.mark.slow
def test_a_saved_lora_draws_the_same_in_stock_diffusers(folder: Path, tmp_path: Path) -> None:
    pipeline, given = load(folder), sources(2)

    def stock() -> Tensor:
        latents = stock_call(folder, start_noise(pipeline), 2.5, "latent", (32, 32), lora=tmp_path)
        return FluxKontextPipeline._unpack_latents(latents, 32, 32, 4)

    check_stock_draws_with_the_saved_lora(pipeline, tmp_path, lambda: ode(pipeline, 2.5, given), stock)


# ---- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_embedded_models_parts_load(tmp_path: Path) -> None:
    """64 x 64 images, latents [8, 8, 8] in tokens of 32 channels, as the trained model of the wheel has them."""
    vae = AutoencoderKL(
        latent_channels=8, sample_size=64, layers_per_block=1, norm_num_groups=4, block_out_channels=(4, 4, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0,
        scaling_factor=1.0,
    )  # fmt: skip
    build_tiny_kontext(vae, ["make", "the"], width=32, blocks=(1, 1)).save_pretrained(tmp_path)
    FAMILY.check(str(tmp_path), FAMILY.lora_targets)
    pipeline = load(tmp_path, size=(64, 64))
    assert (pipeline.image_shape, pipeline.latent_shape) == ((3, 64, 64), (8, 8, 8))
    assert pipeline.decode(ode(pipeline, 2.5, sources(1, (64, 64)))).shape == (1, 3, 64, 64)


def test_folders_and_targets_that_do_not_fit_are_refused(folder: Path) -> None:
    check_targets(FAMILY, folder, "proj_mpl")
    with pytest.raises(ValueError, match=r"is a FluxKontextPipeline, and pipeline\.name=flux loads FluxPipeline"):
        flux.FAMILY.check(str(folder), None)
    with pytest.raises(ValueError, match=r"pipeline\.height \(33\) must be a multiple of 8"):
        load(folder, size=(33, 32))


@pytest.mark.slow
def test_the_real_network_and_its_lora() -> None:
    """11.90 billion numbers; `proj_mlp` of 38 single-stream blocks beside FLUX.1's targets."""
    width = 19 * (8 * 2 * 3072 + 4 * 15360) + 38 * (3 * 2 * 3072 + 15360)
    check_published_with_lora(FAMILY, MODEL, 11_901_408_320, width)
