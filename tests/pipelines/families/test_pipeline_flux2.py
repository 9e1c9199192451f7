"""The FLUX.2 pipelines, dev and klein, against stock diffusers, and the replay of their rollouts."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from family_sampling import adapted, fresh_stock, same, start_noise
from PIL import Image
from rounding import assert_same_sum
from tiny_flux import (
    PROMPTS,
    STEPS,
    check_published_with_lora,
    check_replay,
    check_stock_draws_with_the_saved_lora,
    images,
    sample_ode,
)
from tiny_flux2 import LENGTH, save_tiny_flux2, save_tiny_flux2_dev
from torch import Tensor

from flowrl.media.images import to_pixels
from flowrl.pipelines.families.flux2 import FAMILY, empirical_mu, pack, token_ids
from flowrl.pipelines.places.known_checkpoints import checkpoints
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline

Images = list[list[Tensor]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("flux2")
    return {
        "dev": save_tiny_flux2_dev(root / "dev"),
        "base": save_tiny_flux2(root / "base"),
        "klein": save_tiny_flux2(root / "klein", distilled=True),
    }


def load(
    folder: Path, dtype: torch.dtype = torch.float32, size: tuple[int, int] = (64, 64), **options: Any
) -> FamilyPipeline:
    return FAMILY.load(
        str(folder), dtype=dtype, max_sequence_length=LENGTH, height=size[0], width=size[1], **options
    )  # fmt: skip


def ode(pipeline: FamilyPipeline, scale: float, sources: Images | None = None, b: int = 2) -> Tensor:
    """Finished latents of the first prompts, guided away from the empty one."""
    cond, negative = pipeline.encode(PROMPTS[:b], sources), pipeline.encode([""])
    return sample_ode(pipeline, pipeline.guided(pipeline.network, cond, negative, scale), b)


@cache
def shared(folder: Path, **options: Any) -> FamilyPipeline:
    """Loaded once; the tests that take it leave it as it was."""
    return load(folder, **options)


@cache
def stock(folder: Path, lora: Path | None = None) -> Any:
    return fresh_stock(Flux2Pipeline if "dev" in folder.name else Flux2KleinPipeline, folder, lora)


def stock_call(
    folder: Path, latents: Tensor, scale: float, output: str, size: tuple[int, int], sources: Images | None = None,
    lora: Path | None = None,
) -> Tensor:  # fmt: skip
    """One call per prompt, since stock gives all prompts of a call the same references."""
    images = []
    for row, x in enumerate(latents):
        files = [Image.fromarray(to_pixels(image)) for image in sources[row]] if sources else []
        images.append(
            stock(folder, lora)(
                image=files or None, prompt=PROMPTS[row], guidance_scale=scale, latents=x[None],
                num_inference_steps=STEPS, max_sequence_length=LENGTH, output_type=output, height=size[0],
                width=size[1],
            ).images
        )  # fmt: skip
    return torch.cat(images)


def as_stock(pipeline: FamilyPipeline, latents: Tensor) -> Tensor:
    """Our latents as stock returns them: packed by dev; by klein, those that the VAE decodes."""
    if pipeline.card.stock == "Flux2Pipeline":
        return pack(latents)
    bn = pipeline.pipe.vae.bn
    std = (bn.running_var + 1e-4).sqrt().view(1, -1, 1, 1)
    return Flux2KleinPipeline._unpatchify_latents(latents * std + bn.running_mean.view(1, -1, 1, 1))


# ---- the same images as stock diffusers ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scale", "size"),
    [("dev", 4.0, (64, 64)), ("dev", 1.0, (64, 96)), ("base", 4.0, (64, 96)), ("base", 1.0, (64, 64)),
     ("klein", 1.0, (64, 64))],
)  # fmt: skip
def test_ode_sampling_equals_the_stock_pipeline(
    folders: dict[str, Path], kind: str, scale: float, size: tuple[int, int]
) -> None:
    pipeline = shared(folders[kind], size=size)
    assert pipeline.latent_shape == (16, size[0] // 16, size[1] // 16)
    start, final = start_noise(pipeline, 2), ode(pipeline, scale)
    theirs = stock_call(folders[kind], start, scale, "latent", size)
    assert_same_sum(as_stock(pipeline, final), theirs)
    images = stock_call(folders[kind], start, scale, "pt", size)
    assert images.shape == (2, *pipeline.image_shape)
    assert_same_sum(pipeline.decode(final), images)
    assert (final - start).abs().mean() > 0.1  # the network did something


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scale"), [("dev", 4.0), ("base", 4.0), ("klein", 1.0)])
def test_sampling_with_references_equals_the_stock_pipeline(folders: dict[str, Path], kind: str, scale: float) -> None:
    pipeline, (first, second, third) = shared(folders[kind], max_references=2), images(3, 64, 64)
    assert pipeline.num_sources == (0, 2)
    for sources in ([[first], [second]], [[first, second], []], [[], [third], [second, first]]):
        start, final = start_noise(pipeline, len(sources)), ode(pipeline, scale, sources, len(sources))
        theirs = stock_call(folders[kind], start, scale, "latent", (64, 64), sources)
        assert_same_sum(as_stock(pipeline, final), theirs)
    plain = ode(pipeline, scale, [[first, second], []])
    assert (plain - ode(pipeline, scale, [[second, first], []]))[0].abs().max() > 1e-4  # their order counts


@pytest.mark.slow
def test_guidance_is_what_the_model_was_made_for(folders: dict[str, Path]) -> None:
    dev, base = shared(folders["dev"]), shared(folders["base"])
    assert (dev.passes(4.0), dev.passes(1.0), base.passes(4.0), base.passes(1.0)) == (1, 1, 2, 1)
    for pipeline in (dev, base):
        assert FAMILY.rows(pipeline.model, 4.0) == pipeline.passes(4.0)
        assert (ode(pipeline, 4.0) - ode(pipeline, 1.0)).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"scale 4\.0 reads a negative prompt"):
        base.guided(base.network, base.encode(PROMPTS[:1]), None, 4.0)


def test_latents_are_folded_and_packed_as_stock_does() -> None:
    x = torch.arange(2 * 3 * 4 * 6).float().view(2, 3, 4, 6)
    folded = Flux2Pipeline._patchify_latents(x)
    assert torch.equal(pack(folded), Flux2Pipeline._pack_latents(folded))
    for image in range(3):  # references stand at 10, 20, ... in time
        ids = Flux2Pipeline._prepare_image_ids([folded[:1]] * 3)[0].view(3, 6, 4)
        expected = ids[image - 1] if image else Flux2Pipeline._prepare_latent_ids(folded)[0]
        assert torch.equal(token_ids(folded.shape[1:], image), expected.float())


@pytest.mark.slow
def test_images_are_encoded_as_stock_encodes_references(folders: dict[str, Path]) -> None:
    pipeline = shared(folders["dev"])
    given = torch.stack(images(2, 64, 64))
    expected = pipeline.pipe._encode_vae_image(2 * given - 1, generator=None)
    assert_same_sum(pipeline.encode_images(given), expected)


@pytest.mark.parametrize(("tokens", "steps"), [(16, 4), (1024, 28), (4096, 50), (4300, 200), (4301, 4), (8192, 50)])
def test_the_shift_is_the_fitted_one(tokens: int, steps: int) -> None:
    assert empirical_mu(tokens, steps) == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-12)


@pytest.mark.slow
def test_the_grid_is_shifted_once_by_size_and_number_of_steps(folders: dict[str, Path]) -> None:
    pipeline = shared(folders["base"])
    assert empirical_mu(16, 10) == pytest.approx(8.73809524e-5 * 16 + 1.89833333)
    shift = math.exp(empirical_mu(16, 4))
    expected = [shift * u / (1 + (shift - 1) * u) for u in (1, 0.75, 0.5, 0.25, 0)]
    torch.testing.assert_close(pipeline.schedule(4, "diffusers").sigma, torch.tensor(expected))
    assert torch.equal(pipeline.schedule(4, "linspace").sigma, pipeline.schedule(4, "diffusers").sigma)
    assert pipeline.schedule(4, "diffusers", 1.0).sigma.tolist() == [1, 0.75, 0.5, 0.25, 0]


# ---- prompts and references ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dev", "base"])
def test_embeddings_are_those_of_stock_and_independent_of_their_batch(folders: dict[str, Path], kind: str) -> None:
    pipeline, other = load(folders[kind]), load(folders[kind])
    cond = pipeline.encode(PROMPTS)
    assert list(cond.tensors) == ["embeds"]
    embeds, _ = other.pipe.encode_prompt(PROMPTS, max_sequence_length=LENGTH)
    assert_same_sum(cond.tensors["embeds"], embeds)
    assert (embeds[0] - embeds[1]).abs().max() > 0.1
    assert same(other.encode([PROMPTS[1]]), cond[1])
    pipeline.free_text_encoders()
    assert pipeline.pipe.text_encoder is None
    assert same(pipeline.encode(PROMPTS[::-1]), cond[[2, 1, 0]])
    with pytest.raises(ValueError, match=r"'a pink star' was not encoded"):
        pipeline.encode(["a pink star"])


@pytest.mark.slow
def test_references_have_one_shape_and_another_size_encodes_them_again(folders: dict[str, Path]) -> None:
    pipeline, (first, second) = load(folders["base"], max_references=3), images(2, 96, 96)
    cond = pipeline.encode(PROMPTS[:2], [[first, second], []])
    assert cond.tensors["references"].shape == (2, 3, 16, 4, 4)
    assert cond.tensors["num_references_on_host"].tolist() == [2, 0]
    assert not cond.tensors["references"][0, 2].any()
    assert not cond.tensors["references"][1].any()
    pipeline.free_text_encoders()
    larger = pipeline.resized(96, 96)
    again = larger.encode(PROMPTS[:2], [[first, second], []])
    assert again.tensors["references"].shape == (2, 3, 16, 6, 6)
    torch.testing.assert_close(again.tensors["references"][0, :2], larger.encode_images(torch.stack([first, second])))
    assert torch.equal(again.tensors["embeds"], cond.tensors["embeds"])


def test_more_references_than_room_was_made_for_are_refused(folders: dict[str, Path]) -> None:
    image = images(1, 64, 64)[0]
    with pytest.raises(ValueError, match=r"takes no source image: set pipeline\.options\.max_references=1"):
        shared(folders["base"]).encode(PROMPTS[:1], [[image]])
    with pytest.raises(ValueError, match=r"max_references must be at least 0, got -1"):
        load(folders["base"], max_references=-1)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scale", "dtype"),
    [("dev", 4.0, torch.bfloat16), ("base", 4.0, torch.float32), ("klein", 1.0, torch.bfloat16)],
    ids=str,
)
def test_the_ratio_is_one_and_every_target_learns(
    folders: dict[str, Path], kind: str, scale: float, dtype: torch.dtype
) -> None:
    pipeline, (first, second) = load(folders[kind], dtype, max_references=2), images(2, 64, 64)
    cond = pipeline.encode(PROMPTS, [[first], [], [second, first]])
    check_replay(pipeline, adapted(pipeline), cond, pipeline.encode([""]), scale)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dev", "base"])
def test_a_saved_lora_draws_the_same_in_stock_diffusers(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    pipeline = load(folders[kind])
    start = start_noise(pipeline)
    check_stock_draws_with_the_saved_lora(
        pipeline, tmp_path, lambda: as_stock(pipeline, ode(pipeline, 4.0)),
        lambda: stock_call(folders[kind], start, 4.0, "latent", (64, 64), lora=tmp_path),
    )  # fmt: skip


# ---- refusals, and the real networks ---------------------------------------------------------------------------------


def test_guidance_of_a_model_that_has_none_is_refused(folders: dict[str, Path]) -> None:
    pipeline = shared(folders["klein"])
    assert pipeline.passes(2.0) == pipeline.passes(1.0) == 1
    with pytest.raises(ValueError, match="distilled and has no guidance, got scale 4"):
        pipeline.guided(pipeline.network, pipeline.encode(PROMPTS[:1]), None, 4.0)


def test_folders_targets_and_sizes_that_do_not_fit_are_refused(
    folders: dict[str, Path], tiny_sd3_folder: Path, tmp_path: Path
) -> None:
    for folder in folders.values():
        FAMILY.check(str(folder), FAMILY.lora_targets)
    for refusal in (lambda: FAMILY.check(str(tiny_sd3_folder), None), lambda: FAMILY.load(str(tiny_sd3_folder))):
        with pytest.raises(ValueError, match=r"is a StableDiffusion3Pipeline, .* Flux2Pipeline or Flux2KleinPipeline"):
            refusal()
    with pytest.raises(ValueError, match=r"'ff\.net\.2' matches no linear layer of Flux2Transformer2DModel"):
        FAMILY.check(str(folders["dev"]), ["ff.net.2"])
    with pytest.raises(ValueError, match=r"pipeline\.height \(72\) must be a multiple of 16"):
        load(folders["base"], size=(72, 64))
    with pytest.raises(ValueError, match=r"is not a diffusers pipeline: it has no model_index\.json"):
        FAMILY.load(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "count", "width", "blocks"),
    [("dev", 32_223_281_152, 6144, (8, 48)), ("klein-base-9B", 9_078_581_248, 4096, (8, 24)),
     ("klein-4B", 3_875_544_576, 3072, (5, 20))],
)  # fmt: skip
def test_the_real_network_and_its_lora(model: str, count: int, width: int, blocks: tuple[int, int]) -> None:
    """32, 9 and 4 billion numbers; feed-forward layers are 3 widths wide, behind a gated input of 6."""
    name = f"black-forest-labs/FLUX.2-{model}"
    widths = width * (blocks[0] * (8 * 2 + 2 * (7 + 4)) + blocks[1] * (1 + 3 + 6))
    check_published_with_lora(FAMILY, name, count, widths)
    assert [FAMILY.rows(name, scale) for scale in (1.0, 4.0)] == [1, 2 if "base" in name else 1]
    assert checkpoints()[name].gated == ("4B" not in name)
