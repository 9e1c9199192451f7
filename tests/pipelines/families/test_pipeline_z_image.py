"""The Z-Image pipeline against stock diffusers, and the replay of its rollouts."""

from __future__ import annotations

from copy import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import family_sampling
import flow_family as flow
import pytest
import torch
from diffusers import ZImagePipeline
from family_sampling import start_noise
from rounding import assert_same_sum
from tiny_z_image import save_tiny_z_image
from torch import Tensor

from flowrl.pipelines.families.z_image import FAMILY
from flowrl.pipelines.places.known_checkpoints import usual_sampling
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.samplers.schedules import linspace_sigmas

LENGTH, SIZE = 64, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_z_image(tmp_path_factory.mktemp("tiny") / "z")


load = partial(family_sampling.load, FAMILY, {"height": SIZE, "width": SIZE, "max_sequence_length": LENGTH})
shared = cache(load)
stock = partial(family_sampling.stock, ZImagePipeline)


def stock_call(pipe: ZImagePipeline, pipeline: FamilyPipeline, scale: float, output: str, **options: Any) -> Tensor:
    """The stock pipeline on the same prompts and start noise, both prompts at once."""
    pipe.scheduler = flow.OnSchedule(pipeline.schedule(flow.STEPS, "diffusers"))
    return pipe(
        prompt=list(flow.PROMPTS), negative_prompt=[flow.NEGATIVE] * 2, guidance_scale=scale,
        latents=start_noise(pipeline), num_inference_steps=flow.STEPS, output_type=output,
        height=pipeline.image_shape[1], width=pipeline.image_shape[2], max_sequence_length=LENGTH, **options,
    ).images  # fmt: skip


def sampled(pipeline: FamilyPipeline, scale: float) -> Tensor:
    negative = pipeline.encode([flow.NEGATIVE]) if pipeline.passes(scale) == 2 else None
    return flow.sample_ode(pipeline, pipeline.encode(flow.PROMPTS), negative, scale)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_ode_sampling_equals_the_stock_pipeline(folder: Path, scale: float) -> None:
    pipeline = shared(folder)
    assert pipeline.passes(scale) == (1 if scale == 0 else 2)
    final = sampled(pipeline, scale)
    assert_same_sum(final, stock_call(stock(folder), pipeline, scale, "latent"))
    images = stock_call(stock(folder), pipeline, scale, "pt")
    assert_same_sum(pipeline.decode(final), images)
    assert (final - start_noise(pipeline, 2)).abs().mean() > 0.1  # the network did something


@pytest.mark.slow
def test_the_norm_cap_is_stocks_normalisation(folder: Path) -> None:
    pipeline = load(folder, norm_cap=0.9)
    final = sampled(pipeline, 4.0)
    capped = stock_call(stock(folder), pipeline, 4.0, "latent", cfg_normalization=0.9)
    assert_same_sum(final, capped)
    assert (final - sampled(shared(folder), 4.0)).abs().mean() > 1e-3


def test_images_that_are_not_square_keep_height_and_width(folder: Path) -> None:
    pipeline = shared(folder).resized(24, 16)
    assert pipeline.latent_shape == (4, 12, 8)
    assert shared(folder).latent_shape == (4, 8, 8)
    expected = stock_call(stock(folder), pipeline, 4.0, "latent")
    assert_same_sum(sampled(pipeline, 4.0), expected)


def test_a_sample_does_not_depend_on_the_prompts_beside_it(folder: Path) -> None:
    pipeline, x = shared(folder), start_noise(shared(folder), 1).expand(2, -1, -1, -1)
    cond = pipeline.encode(["zq" * 20, "a star"])  # more than 32 tokens, and fewer
    assert cond.tensors["length_on_host"][0] > 32 > cond.tensors["length_on_host"][1]
    with torch.no_grad():
        together = pipeline.network(x, torch.tensor([700.0, 300.0]), cond)
        alone = pipeline.network(x[:1], torch.tensor([300.0]), cond[1])
        other = pipeline.network(x[:1], torch.tensor([300.0]), pipeline.encode(["two blue squares"]))
    assert_same_sum(together[1:], alone)
    assert (other - alone).abs().mean() > 1e-3


@pytest.mark.slow
def test_encoding_equals_stock_and_is_cut_where_stock_cuts(folder: Path) -> None:
    cond = shared(folder).encode(flow.PROMPTS)
    for i, prompt in enumerate(flow.PROMPTS):
        (embeds,), _ = stock(folder).encode_prompt([prompt], max_sequence_length=LENGTH)
        assert cond.tensors["length_on_host"][i] == len(embeds)
        assert torch.equal(cond.tensors["embeds"][i, : len(embeds)], embeds)
        assert not cond.tensors["embeds"][i, len(embeds) :].any()
    (short,), _ = stock(folder).encode_prompt([flow.PROMPTS[1]], max_sequence_length=12)
    cut = load(folder, max_sequence_length=12).encode(flow.PROMPTS)
    assert torch.equal(cut.tensors["embeds"][1], short)
    assert cut.tensors["length_on_host"].tolist() == [12, 12]


@pytest.mark.slow
def test_known_prompts_stay_after_the_encoder_is_freed(folder: Path) -> None:
    flow.check_known_prompts_stay(load(folder))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "checkpointed"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_replay_is_exact_and_every_lora_tensor_has_gradient(
    folder: Path, dtype: torch.dtype, checkpointed: bool
) -> None:
    pipeline = load(folder, dtype, gradient_checkpointing=checkpointed)
    policy = flow.adapted(pipeline)
    assert not flow.check_replay(pipeline, policy, pipeline.encode(flow.PROMPTS), pipeline.encode([flow.NEGATIVE]), 4.0)


@pytest.mark.slow
def test_a_saved_lora_gives_the_same_images_in_stock(folder: Path, tmp_path: Path) -> None:
    pipeline = load(folder)
    policy = flow.adapted(pipeline)
    ours = sampled(pipeline, 4.0)
    assert (ours - sampled(shared(folder), 4.0)).abs().mean() > 1e-3
    assert pipeline.save_lora(tmp_path, policy.tensors(), policy.config).is_file()
    pipe = family_sampling.fresh_stock(ZImagePipeline, folder, tmp_path)
    assert_same_sum(ours, stock_call(pipe, pipeline, 4.0, "latent"))


@pytest.mark.slow
def test_images_go_into_latents_and_back(folder: Path) -> None:
    def normalised(vae: Any, images: Tensor) -> Tensor:
        return (vae.encode(images).latent_dist.mode() - 0.1159) * 0.3611

    flow.check_autoencoder(shared(folder), load(folder, vae_slice=2), normalised)


@pytest.mark.slow
def test_schedules_are_stocks_with_a_static_and_with_a_dynamic_shift(folder: Path, tmp_path: Path) -> None:
    pipeline = shared(folder)
    flow.check_schedule_is_stocks(pipeline, 0.5)
    torch.testing.assert_close(pipeline.schedule(8, "diffusers").sigma, linspace_sigmas(8, 3.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(pipeline.schedule(8, "linspace", shift=6.0).sigma, linspace_sigmas(8, 6.0))
    dynamic = load(save_tiny_z_image(tmp_path, dynamic=True))
    flow.check_schedule_is_stocks(dynamic, 0.5 + 0.65 * (16 - 256) / (4096 - 256))


# ---- what is known and what is refused -------------------------------------------------------------------------------


@pytest.mark.slow
def test_known_checkpoints_have_the_published_size_and_the_targets_bind() -> None:
    for model in flow.published(FAMILY):
        family_sampling.check_published(FAMILY, model, 6_154_908_736)


def test_wrong_folders_targets_and_options_are_refused(folder: Path, tmp_path: Path) -> None:
    family_sampling.check_targets(FAMILY, folder, "attn.to_q")
    flow.check_another_class_is_refused(FAMILY, tmp_path)
    with pytest.raises(ValueError, match=r"pipeline\.width \(18\) must be a multiple of 4"):
        load(folder, width=18)
    with pytest.raises(ValueError, match=r"pipeline\.height \(132\) .* at most 128"):
        load(folder, height=132)
    with pytest.raises(ValueError, match=r"max_sequence_length \(225\) must lie in 1 \.\. 224"):
        load(folder, max_sequence_length=225)
    with pytest.raises(ValueError, match="norm_cap must be positive"):
        load(folder, norm_cap=0.0)
    pipeline = shared(folder)
    with pytest.raises(ValueError, match="z_image takes no source image"):
        pipeline.encode(["a"], [[torch.zeros(3, 4, 4)]])
    for scale, negative in ((4.0, None), (-1.0, pipeline.encode([""]))):
        with pytest.raises(ValueError, match="0 for none"):
            pipeline.guided(pipeline.network, pipeline.encode(["a"]), negative, scale)


@pytest.mark.slow
def test_the_turbo_is_drawn_in_its_eight_steps_as_stock_draws_it(folder: Path) -> None:
    """Steps and scale of the table, at the checkpoint's static shift of 3, by stock's own scheduler."""
    few = usual_sampling("z_image", "Tongyi-MAI/Z-Image-Turbo")
    assert few == {"num_steps": 8, "guidance_scale": 0.0}
    pipeline, cond = shared(folder), shared(folder).encode(flow.PROMPTS)
    velocity = pipeline.guided(pipeline.network, cond, None, few["guidance_scale"])
    ours = family_sampling.sample(pipeline, velocity, pipeline.schedule(few["num_steps"], "diffusers"))
    latents = family_sampling.fresh_stock(ZImagePipeline, folder)(
        prompt=list(flow.PROMPTS), guidance_scale=few["guidance_scale"], num_inference_steps=few["num_steps"],
        latents=start_noise(pipeline), output_type="latent", height=SIZE, width=SIZE, max_sequence_length=LENGTH,
    ).images  # fmt: skip
    torch.testing.assert_close(ours, latents, atol=1e-4, rtol=1e-4)  # timesteps differ in the last bit


def test_guidance_of_a_turbo_is_refused(folder: Path) -> None:
    pipeline = copy(shared(folder))
    cond, negative = pipeline.encode(["a star"]), pipeline.encode([flow.NEGATIVE])
    for name in ("Tongyi-MAI/Z-Image-Turbo", "/models/z-image-turbo/"):
        pipeline.model = name
        for scale in (1.0, 4.0):
            with pytest.raises(ValueError, match=r"set sampler\.guidance_scale=0 and eval\.guidance_scale=0"):
                pipeline.guided(pipeline.network, cond, negative, scale)
        assert [pipeline.passes(scale) for scale in (0.0, 1.0)] == [1, 2]
        x, sigma, time = start_noise(pipeline, 1), torch.tensor([0.5]), torch.tensor([500.0])
        with torch.no_grad():
            plain = pipeline.guided(pipeline.network, cond, None, 0.0)(x, sigma, time)
            assert torch.equal(plain, pipeline.network(x, time, cond))
    pipeline.model = "/turbo/z-image"  # a folder around it is not its name
    pipeline.guided(pipeline.network, cond, negative, 4.0)
