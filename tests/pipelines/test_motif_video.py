"""Motif-Video against stock diffusers, guided as its authors' examples are: each frame by projections that remember."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import video_family as video
from diffusers import AdaptiveProjectedGuidance, FlowMatchEulerDiscreteScheduler, MotifVideoPipeline
from diffusers.pipelines.motif_video.pipeline_motif_video import calculate_shift
from family_sampling import check_published, fresh_stock, idle_tensors, load, replayed_with_memory, start_noise, stock
from flow_family import bare, check_schedule_is_stocks, edited
from rounding import assert_same_sum
from tiny_wan import CHANNELS, OPTIONS, save_tiny_motif_video
from torch import Tensor

from flowrl.pipelines.families.motif_video import FAMILY
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.shared.common import normalise
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline

SCALE, LONGEST = 8.0, 0.3


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_motif_video(tmp_path_factory.mktemp("tiny") / "motif_video")


tiny = partial(load, FAMILY, OPTIONS, longest=LONGEST)
shared = cache(lambda folder: tiny(folder))


def stock_call(pipe: Any, pipeline: FamilyPipeline, scale: float, output: str) -> Tensor:
    """The stock pipeline with the guider of its authors' examples, whose norm is short enough to shorten here."""
    pipe.guider = AdaptiveProjectedGuidance(
        guidance_scale=scale,
        adaptive_projected_guidance_rescale=LONGEST,
        adaptive_projected_guidance_momentum=0.1,
        use_original_formulation=True,
        adaptive_projected_guidance_norm_dim=(-1, -2, -4),
    )
    frames, _, height, width = pipeline.image_shape
    return pipe(
        prompt=video.PROMPTS,
        negative_prompt=[""] * 2,
        latents=start_noise(pipeline),
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=video.STEPS,
        max_sequence_length=OPTIONS["max_sequence_length"],
        output_type=output,
    ).frames


@pytest.mark.slow
def test_clips_are_those_of_the_stock_pipeline_its_scheduler_and_its_guider(folder: Path) -> None:
    pipeline, pipe = shared(folder), stock(MotifVideoPipeline, folder)
    assert (pipeline.latent_shape, pipeline.image_shape) == ((CHANNELS, 2, 4, 6), (5, 3, 32, 48))
    check_schedule_is_stocks(pipeline, mu=0.0)
    schedule = pipeline.schedule(video.STEPS, "diffusers")
    final, latents = video.sample_ode(pipeline, schedule, SCALE), stock_call(pipe, pipeline, SCALE, "latent")
    assert_same_sum(final, latents)
    assert (latents - start_noise(pipeline)).abs().mean() > 0.1  # the network did something
    assert_same_sum(pipeline.decode(final), stock_call(pipe, pipeline, SCALE, "pt"))
    assert [pipeline.passes(scale) for scale in (0, 1, 8)] == [1, 2, 2]


def test_a_shift_by_size_is_that_of_stock(folder: Path) -> None:
    pipeline = tiny(folder)
    pipeline.pipe.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    check_schedule_is_stocks(pipeline, mu=calculate_shift(2 * 2 * 3))  # frames, rows and columns of tokens


@pytest.mark.slow
def test_without_guidance_and_by_the_whole_difference_clips_are_stocks_too(folder: Path) -> None:
    pipeline, pipe = tiny(folder, projected=False), stock(MotifVideoPipeline, folder)
    schedule = pipeline.schedule(video.STEPS, "diffusers")
    assert_same_sum(video.sample_ode(pipeline, schedule, 0), stock_call(pipe, pipeline, 0.0, "latent"))
    final = video.sample_ode(shared(folder), schedule, SCALE)
    for other in ({"longest": 0}, {"momentum": 0.0}, {"projected": False}):
        another = video.sample_ode(tiny(folder, **other), schedule, SCALE)
        assert (another - final).abs().amax(dim=(1, 2, 3, 4)).min() > 1e-3  # of both prompts
    plain = tiny(folder, longest=0, momentum=0.0)  # nothing shortened, all of the parallel part kept
    assert_same_sum(video.sample_ode(pipeline, schedule, 3.0), video.sample_ode(plain, schedule, 3.0))


def test_another_length_of_padding_is_the_same_function(folder: Path) -> None:
    short, long = shared(folder), tiny(folder, max_sequence_length=40)
    schedule = short.schedule(1, "diffusers")
    assert_same_sum(video.sample_ode(short, schedule, SCALE), video.sample_ode(long, schedule, SCALE))


def test_steps_are_evaluated_again_with_what_guidance_had_kept(folder: Path) -> None:
    """As an update does it: the same numbers to the bit, and gradient for every LoRA tensor."""
    pipeline, policy = video.with_lora(tiny(folder, gradient_checkpointing=True))
    answers, guided = [], partial(video.guided, pipeline, SCALE)
    for step, answer, alone in replayed_with_memory(pipeline, guided(), guided(), video.STEPS):
        answers.append(answer)
        assert ((alone - answer).abs().max() > 1e-4) == (step > 0)
    assert not idle_tensors(policy, torch.stack(answers).square().sum())


@pytest.mark.slow
def test_the_stock_network_loads_the_saved_lora(folder: Path, tmp_path: Path) -> None:
    """The stock class has no loader, and its network has."""
    pipeline, policy = video.with_lora(tiny(folder))
    pipe = fresh_stock(MotifVideoPipeline, folder)
    expected = video.sample_ode(pipeline, pipeline.schedule(video.STEPS, "diffusers"), SCALE)
    assert pipeline.save_lora(tmp_path, policy.tensors(), policy.config).is_file()
    without = stock_call(pipe, pipeline, SCALE, "latent")
    pipe.transformer.load_lora_adapter(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    torch.testing.assert_close(stock_call(pipe, pipeline, SCALE, "latent"), expected, atol=2e-5, rtol=1e-5)
    assert (without - expected).abs().max() > 1e-2


@pytest.mark.slow
def test_prompts_and_clips_go_through_their_encoders_by_themselves(folder: Path) -> None:
    pipeline = tiny(folder)
    video.check_autoencoder(pipeline, tiny(folder, vae_slice=1), partial(normalise, pipeline))
    found = video.check_prompts_are_embedded_by_themselves(pipeline, tiny(folder))
    assert {name: tuple(tensor.shape[1:]) for name, tensor in found.items()} == {"embeds": (16, 24), "mask": (16,)}


def test_what_remembers_and_what_is_no_such_network_is_told(folder: Path, tmp_path: Path) -> None:
    copied = bare(folder, tmp_path)
    for options, scale, steps, does in (
        ({}, 8.0, 4, True),
        ({}, 8.0, 1, False),
        ({}, 0.0, 4, False),
        ({"momentum": 0.0}, 8.0, 4, False),
        ({"projected": False}, 8.0, 4, False),
    ):
        assert FAMILY.remembers(str(copied), options, scale, steps) == does
    edited(copied / "transformer/config.json", in_channels=CHANNELS)
    with pytest.raises(ValueError, match="has in_channels 4, and needed is in_channels 9"):
        FAMILY.check(str(copied), None)


@pytest.mark.slow
def test_the_published_network_is_called_without_numbers() -> None:
    """12 blocks of two streams, 16 of one and 8 of a decoder: 2.0 billion weights, of which no two kinds are measured
    by a few."""
    model = "Motif-Technologies/Motif-Video-2B"
    network = check_published(FAMILY, model, 2_037_809_600)
    assert FAMILY.block_kinds(model) == {}
    assert FAMILY.planned_size(model, {}) == Size(height=736, width=1280, num_frames=121, fps=24.0)
    with torch.no_grad():
        call = FAMILY.meta_call(model, Size(height=96, width=96, num_frames=5), 40)
        assert network(**call)[0].shape == (1, 16, 2, 12, 12)
