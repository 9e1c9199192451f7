"""The Qwen-Image-2.1 pipeline against stock diffusers, one prompt after the other, and the replay of its rollouts."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import family_sampling
import flow_family as flow
import pytest
import torch
from diffusers import QwenImage21Pipeline
from family_sampling import start_noise
from rounding import assert_same_sum
from tiny_qwen_image_21 import SIZE, TURBO, save_tiny_qwen_image_21
from torch import Tensor, nn

from flowrl.pipelines.families.qwen_image_21 import FAMILY
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline

LENGTH = 48
LONG = [*flow.PROMPTS, "a sea"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen_image_21(tmp_path_factory.mktemp("tiny") / "qwen")


@pytest.fixture(scope="module")
def turbo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen_image_21(tmp_path_factory.mktemp("tiny") / "turbo", turbo=True)


load = partial(family_sampling.load, FAMILY, {"height": SIZE, "width": SIZE, "max_sequence_length": LENGTH})
shared = cache(load)
stock = partial(family_sampling.stock, QwenImage21Pipeline)


def stock_call(
    pipe: QwenImage21Pipeline, pipeline: FamilyPipeline, scale: float, output: str, *, cached: bool = False
) -> Tensor:
    """Stock on the same prompts and start noise, each prompt by itself: a batch moves images of shorter ones."""
    start, found = start_noise(pipeline, len(LONG)), []
    pipe.scheduler = flow.OnSchedule(pipeline.schedule(flow.STEPS, "diffusers"))
    for i, prompt in enumerate(LONG):
        found.append(
            pipe(
                prompt=prompt, negative_prompt=flow.NEGATIVE if scale > 1 else None, true_cfg_scale=scale,
                latents=start[i : i + 1].flatten(2).transpose(1, 2), num_inference_steps=flow.STEPS,
                output_type=output, height=pipeline.image_shape[1], width=pipeline.image_shape[2], use_kv_cache=cached,
            ).images
        )  # fmt: skip
    return torch.cat(found)


def sampled(pipeline: FamilyPipeline, scale: float) -> Tensor:
    negative = pipeline.encode([flow.NEGATIVE]) if pipeline.passes(scale) == 2 else None
    velocity = pipeline.guided(pipeline.network, pipeline.encode(LONG), negative, scale)
    return family_sampling.sample(pipeline, velocity, pipeline.schedule(flow.STEPS, "diffusers"), len(LONG))


def packed(latents: Tensor) -> Tensor:
    return latents.flatten(2).transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_ode_sampling_equals_the_stock_pipeline(folder: Path, scale: float) -> None:
    pipeline = shared(folder)
    assert len(set(pipeline.encode(LONG).tensors["length_on_host"].tolist())) == 3
    final = sampled(pipeline, scale)
    expected = stock_call(stock(folder), pipeline, scale, "latent")
    assert_same_sum(packed(final), expected)
    images = stock_call(stock(folder), pipeline, scale, "pt")
    assert images.shape[1] == 4  # opacity, which images here are without
    drawn = expected.transpose(1, 2).reshape(final.shape)  # the autoencoder enlarges differences in the last bits
    assert_same_sum(pipeline.decode(drawn), images[:, :3])
    assert (final - start_noise(pipeline, len(LONG))).abs().mean() > 0.1  # the network did something


@pytest.mark.slow
def test_stocks_cache_of_the_prompt_changes_nothing_and_sizes_need_not_be_square(folder: Path) -> None:
    pipeline = shared(folder).resized(96, 64)
    assert pipeline.latent_shape == (4, 6, 4)
    expected = stock_call(stock(folder), pipeline, 4.0, "latent", cached=True)
    assert_same_sum(packed(sampled(pipeline, 4.0)), expected)


def test_a_sample_does_not_depend_on_the_prompts_beside_it(folder: Path) -> None:
    pipeline, x = shared(folder), start_noise(shared(folder), 1).expand(3, -1, -1, -1)
    cond, times = pipeline.encode(LONG), torch.tensor([700.0, 300.0, 500.0])
    with torch.no_grad():
        together = pipeline.network(x, times, cond)
        for row in range(3):
            alone = pipeline.network(x[:1], times[row : row + 1], cond[row])
            assert_same_sum(together[row : row + 1], alone)
        same_time = pipeline.network(x, torch.full((3,), 500.0), cond)
    assert (same_time[0] - same_time[1]).abs().mean() > 1e-3


@pytest.mark.slow
def test_encoding_equals_stock_and_is_cut_where_asked(folder: Path) -> None:
    cond = shared(folder).encode(flow.PROMPTS)
    cut = load(folder, max_sequence_length=6).encode(flow.PROMPTS)
    for i, prompt in enumerate(flow.PROMPTS):
        embeds, _mask, _images = stock(folder).encode_prompt(prompt)
        n = embeds.shape[1]
        assert torch.equal(cond.tensors["embeds"][i, :n], embeds[0])
        assert not cond.tensors["embeds"][i, n:].any()
        assert cond.tensors["length_on_host"][i] == n
        assert torch.equal(cut.tensors["embeds"][i], embeds[0, :6])
    assert cut.tensors["length_on_host"].tolist() == [6, 6]


@pytest.mark.slow
def test_known_prompts_stay_after_the_encoder_is_freed(folder: Path) -> None:
    pipeline = load(folder)
    before = pipeline.encode(LONG)
    pipeline.free_text_encoders()
    assert torch.equal(pipeline.resized(96, 64).encode(LONG).tensors["embeds"], before.tensors["embeds"])
    with pytest.raises(ValueError, match="was not encoded"):
        pipeline.encode(["a cube"])


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
    policy = family_sampling.adapted(pipeline, rank=flow.RANK, alpha=flow.ALPHA, scale=0.05)
    ours = sampled(pipeline, 1.0)
    assert (ours - sampled(shared(folder), 1.0)).abs().mean() > 1e-3
    assert pipeline.save_lora(tmp_path, policy.tensors(), policy.config).is_file()
    pipe = family_sampling.fresh_stock(QwenImage21Pipeline, folder, tmp_path)
    assert_same_sum(packed(ours), stock_call(pipe, pipeline, 1.0, "latent"))


@pytest.mark.slow
def test_images_survive_the_autoencoders_normalisation_and_are_opaque(folder: Path) -> None:
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.1, -0.2, 0.3, -0.4], [0.5, 1.5, 2.0, 0.8]))

    def normalised(vae: Any, images: Tensor) -> Tensor:
        opaque = nn.functional.pad(images, (0, 0, 0, 0, 0, 1), value=1.0)
        return (vae.encode(opaque.unsqueeze(2)).latent_dist.mode()[:, :, 0] - mean) / std

    flow.check_autoencoder(shared(folder), load(folder, vae_slice=2), normalised)


def test_the_schedule_is_stocks(folder: Path) -> None:
    flow.check_schedule_is_stocks(shared(folder), 0.5 + 0.4 * (16 - 256) / (8192 - 256))


# ---- distilled to noise levels of its own ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_turbo_is_drawn_at_its_own_levels_as_stock_draws_it(turbo: Path) -> None:
    pipeline, pipe = load(turbo), family_sampling.fresh_stock(QwenImage21Pipeline, turbo)
    schedule = pipeline.schedule(len(TURBO), "diffusers")
    torch.testing.assert_close(schedule.sigma, torch.tensor([*TURBO, 0.0]), atol=1e-6, rtol=0)
    start = start_noise(pipeline, 1)
    latents = pipe("a sea", height=SIZE, width=SIZE, latents=packed(start), output_type="latent").images
    velocity = pipeline.guided(pipeline.network, pipeline.encode(["a sea"]), None, 1.0)
    ours = family_sampling.sample(pipeline, velocity, schedule, 1)
    assert_same_sum(packed(ours), latents)


@pytest.mark.slow
def test_a_turbo_refuses_guidance_and_other_numbers_of_steps(turbo: Path) -> None:
    pipeline = load(turbo)
    cond = pipeline.encode(["a sea"])
    with pytest.raises(ValueError, match=r"distilled and has no guidance, got scale 4: set sampler\.guidance_scale=1"):
        pipeline.guided(pipeline.network, cond, cond, 4.0)
    for steps, shift in ((10, None), (4, 3.0)):
        with pytest.raises(ValueError, match=r"distilled for 4 noise levels.*sampler\.grid=linspace"):
            pipeline.schedule(steps, "diffusers", shift=shift)
    assert pipeline.schedule(10, "linspace").num_steps == 10


# ---- what is known and what is refused -------------------------------------------------------------------------------


@pytest.mark.slow
def test_known_checkpoints_have_the_published_size_and_are_called_without_numbers() -> None:
    for model in flow.published(FAMILY):
        family_sampling.check_published(FAMILY, model, 7_115_124_736)
        family_sampling.check_call(FAMILY, model, Size(height=512, width=384), 60, (1, 60 + 32 * 24, 64))


def test_wrong_folders_targets_and_options_are_refused(folder: Path, tmp_path: Path) -> None:
    family_sampling.check_targets(FAMILY, folder, "attn.to_qkv")
    flow.check_another_class_is_refused(FAMILY, tmp_path)
    with pytest.raises(ValueError, match=r"pipeline\.width \(48\) must be a multiple of 32"):
        load(folder, width=48)
    pipeline = shared(folder)
    with pytest.raises(ValueError, match="qwen_image_21 takes no source image"):
        pipeline.encode(["a"], [[torch.zeros(3, 4, 4)]])
    with pytest.raises(ValueError, match="reads a negative prompt"):
        pipeline.guided(pipeline.network, pipeline.encode(["a"]), None, 4.0)
