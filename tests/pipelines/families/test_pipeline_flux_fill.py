"""The FLUX.1 Fill pipeline against stock diffusers, its images and masks, and the replay of its rollouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import family_sampling
import pytest
import torch
from diffusers import FluxFillPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from family_sampling import adapted, check_call, check_targets, fresh_stock, same, start_noise
from rounding import assert_same_sum
from tiny_flux import (
    PROMPTS,
    STEPS,
    check_published_with_lora,
    check_replay,
    check_stock_draws_with_the_saved_lora,
    images,
    sample_ode,
    save_tiny_flux,
    save_tiny_flux_fill,
)
from torch import Tensor

from flowrl.pipelines.families import flux
from flowrl.pipelines.families.flux_fill import FAMILY, mark_drawn
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pretraining.tiny_sd3 import CONTEXT

MODEL = "black-forest-labs/FLUX.1-Fill-dev"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_flux_fill(tmp_path_factory.mktemp("flux") / "fill")


load = partial(family_sampling.load, FAMILY, {"height": 32, "width": 32, "max_sequence_length": CONTEXT})


def masks(height: int, width: int) -> list[Tensor]:
    """Two masks `[3, h, w]`: a band whose edges are no latent's, and greys about the half."""
    band, greys = torch.zeros(2, 3, height, width)
    band[:, 5:19, 3:] = 1.0
    greys[:] = torch.linspace(0.2, 0.9, width)
    return [band, greys]


def sources(size: tuple[int, int] = (32, 32)) -> list[list[Tensor]]:
    return [list(pair) for pair in zip(images(2, *size), masks(*size), strict=True)]


def stock_call(folder: Path, latents: Tensor, scale: float, output: str, size: tuple[int, int], **lora: Path) -> Tensor:
    """The stock pipeline; what it encodes is the posterior's mode instead of a sample of it."""
    pipe, given = fresh_stock(FluxFillPipeline, folder, **lora), sources(size)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
        drawn: Tensor = pipe(
            image=torch.stack([image for image, _ in given]), mask_image=torch.stack([mask[:1] for _, mask in given]),
            prompt=PROMPTS[:2], guidance_scale=scale, latents=FluxFillPipeline._pack_latents(latents, *latents.shape),
            num_inference_steps=STEPS, max_sequence_length=CONTEXT, output_type=output, height=size[0], width=size[1],
        ).images  # fmt: skip
    return FluxFillPipeline._unpack_latents(drawn, *size, 4) if output == "latent" else drawn


def ode(pipeline: FamilyPipeline, scale: float, given: list[list[Tensor]]) -> Tensor:
    cond = pipeline.encode(PROMPTS[: len(given)], given)
    return sample_ode(pipeline, pipeline.guided(pipeline.network, cond, None, scale), len(given))


# ---- the same images as stock diffusers ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "size"), [(30.0, (32, 32)), (1.0, (24, 48))])
def test_ode_sampling_equals_the_stock_pipeline(folder: Path, scale: float, size: tuple[int, int]) -> None:
    pipeline = load(folder, height=size[0], width=size[1])
    assert pipeline.latent_shape == (4, size[0] // 4, size[1] // 4)
    start, final = start_noise(pipeline), ode(pipeline, scale, sources(size))
    assert_same_sum(final, stock_call(folder, start, scale, "latent", size))
    assert_same_sum(pipeline.decode(final), stock_call(folder, start, scale, "pt", size))
    assert (final - start).abs().mean() > 0.1  # the network did something


@pytest.mark.slow
def test_scale_image_and_mask_change_what_is_drawn(folder: Path) -> None:
    pipeline, given = load(folder), sources()
    plain = ode(pipeline, 30.0, given)
    assert pipeline.passes(30.0) == 1
    assert (plain - ode(pipeline, 1.0, given)).abs().max() > 1e-3
    (first, band), (second, greys) = given
    for other in ([[second, band], [first, greys]], [[first, greys], [second, band]]):
        assert (plain - ode(pipeline, 30.0, other)).abs().max() > 1e-3


# ---- images and masks ------------------------------------------------------------------------------------------------


def test_what_is_drawn_new_is_not_read(folder: Path) -> None:
    """Two images that differ under the white part of the mask alone are one; a pixel beside it is seen."""
    pipeline, ((image, band), _) = load(folder), sources()
    hidden, seen = image.clone(), image.clone()
    hidden[:, 6:18, 4:] = 0.25
    seen[:, 4, 3] = 1 - seen[:, 4, 3]
    plain, same_kept, other = (pipeline.encode(PROMPTS[:1], [[one, band]]) for one in (image, hidden, seen))
    assert same(plain, same_kept)
    assert not same(plain, other)


def test_a_masks_pixels_are_folded_into_channels(folder: Path) -> None:
    """One white pixel is one channel of one token: row 1 and column 2 of tokens of 8 x 8 pixels."""
    pipeline, (image, *_) = load(folder), images(1, 32, 32)
    mask = torch.zeros(3, 32, 32)
    mask[:, 8 + 5, 16 + 2] = 1.0
    tokens = pipeline.encode(PROMPTS[:1], [[image, mask]]).tensors["kept"][0]
    assert tokens.shape == (16, 16 + 64)
    (place,) = tokens[:, 16:].nonzero().tolist()
    y, x = 5, 2  # of 8 x 8: latent (1, 0) of 2 x 2, pixel (1, 2) of 4 x 4; channels count pixels first
    assert place == [1 * 4 + 2, (4 * (y % 4) + x % 4) * 4 + 2 * (y // 4) + x // 4]


def test_masks_are_made_black_and_white_at_half_grey() -> None:
    colours = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0.5, 0.5, 0.5], [0.499, 0.499, 0.499], [1, 1, 1]]).T[:, None]
    assert mark_drawn(colours).tolist() == [[[0, 1, 1, 0, 1]]]


def test_prompts_without_image_and_mask_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="has 1 source images, and flux_fill takes 2"):
        load(folder).encode(PROMPTS[:1], [images(1, 32, 32)])


def test_a_mask_of_another_shape_than_its_image_is_refused(folder: Path) -> None:
    pipeline, (image,) = load(folder), images(1, 48, 64)
    with pytest.raises(ValueError, match=r"mask of 32 x 32 pixels .* does not fit a source image of 48 x 64: give it"):
        pipeline.encode(PROMPTS[:1], [[image, masks(32, 32)[0]]])
    half = masks(24, 32)[0]  # a smaller one of the same shape lies where it should
    whole = half.repeat_interleave(2, 1).repeat_interleave(2, 2)
    found = [pipeline.encode(PROMPTS[:1], [[image, mask]]).tensors["kept"] for mask in (half, whole)]
    assert ((found[0] - found[1]).abs() > 0.5).float().mean() < 0.05


@pytest.mark.slow
def test_another_size_encodes_sources_again_also_after_the_text_encoders_are_freed(folder: Path) -> None:
    pipeline, given = load(folder), sources((48, 48))
    pipeline.encode(PROMPTS[:2], given)
    pipeline.free_text_encoders()
    cond = pipeline.resized(48, 48).encode(PROMPTS[:2], given)
    assert same(cond, load(folder, height=48, width=48).encode(PROMPTS[:2], given))


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_ratio_is_one_and_every_target_learns(folder: Path, dtype: torch.dtype) -> None:
    pipeline = load(folder, dtype)
    check_replay(pipeline, adapted(pipeline), pipeline.encode(PROMPTS[:2], sources()), None, 30.0)


@pytest.mark.slow
def test_a_saved_lora_draws_the_same_in_stock_diffusers(folder: Path, tmp_path: Path) -> None:
    pipeline, given = load(folder), sources()
    check_stock_draws_with_the_saved_lora(
        pipeline,
        tmp_path,
        lambda: ode(pipeline, 30.0, given),
        lambda: stock_call(folder, start_noise(pipeline), 30.0, "latent", (32, 32), lora=tmp_path),
    )


# ---- refusals, and the real network ----------------------------------------------------------------------------------


def test_folders_and_targets_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    check_targets(FAMILY, folder, "attn.to_w")
    with pytest.raises(ValueError, match=r"is a FluxFillPipeline, and pipeline\.name=flux loads FluxPipeline"):
        flux.FAMILY.check(str(folder), None)
    plain = save_tiny_flux(tmp_path / "plain")
    index = plain / "model_index.json"
    index.write_text(index.read_text(encoding="utf-8").replace("FluxPipeline", "FluxFillPipeline"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"has out_channels None, in_channels 16, and .* in_channels 96"):
        FAMILY.check(str(plain), None)


@pytest.mark.slow
def test_the_real_network_and_its_lora() -> None:
    """FLUX.1-dev's 11.90 billion numbers, and 320 more inputs of width 3072."""
    width = 19 * (8 * 2 * 3072 + 4 * (3072 + 12288)) + 38 * 3 * 2 * 3072
    check_published_with_lora(FAMILY, MODEL, 11_901_408_320 + 320 * 3072, width)


@pytest.mark.slow
def test_the_real_network_is_called_as_planned() -> None:
    size = FAMILY.planned_size(MODEL, {"height": 512, "width": 768})
    assert size is not None
    check_call(FAMILY, MODEL, size, 512, (1, 32 * 48, 64))
