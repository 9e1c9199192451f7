"""Lucy Edit against stock diffusers: a clip changed as a text says."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LucyEditPipeline
from family_sampling import check_published, fresh_stock, load, start_noise, stock
from flow_family import OnSchedule, edited
from PIL import Image
from rounding import assert_same_sum
from tiny_wan import CHANNELS, OPTIONS, save_tiny_wan
from torch import Tensor
from video_family import PROMPTS, STEPS, Sources, check_ratio_is_one, image, sample_ode, with_lora

from flowrl.generation.prompt_checks import source_faults, sources_taken
from flowrl.media.images import to_pixels
from flowrl.pipelines import family_for
from flowrl.pipelines.families.lucy_edit import FAMILY
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.prompts.prompt_files import Prompt

MODEL = "decart-ai/Lucy-Edit-Dev"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_wan(tmp_path_factory.mktemp("lucy") / "model", "lucy")


tiny = partial(load, FAMILY, OPTIONS)
shared = cache(lambda folder: tiny(folder))
CLIP = torch.stack([image(1, 32, 48).roll(5 * number, dims=2) for number in range(5)])


def both(clip: Tensor) -> Sources:
    return [[clip]] * len(PROMPTS)


def stock_call(pipe: Any, pipeline: FamilyPipeline, scale: float, output: str) -> Tensor:
    """The stock pipeline, which takes one clip in a call, and feeds every token its time."""
    pipe.scheduler = OnSchedule(pipeline.schedule(STEPS, "diffusers"))
    clip = [Image.fromarray(to_pixels(frame)) for frame in CLIP]
    drawn = [
        pipe(
            clip,
            prompt=prompt,
            negative_prompt="",
            latents=noise[None],
            guidance_scale=scale,
            height=32,
            width=48,
            num_frames=5,
            num_inference_steps=STEPS,
            max_sequence_length=OPTIONS["max_sequence_length"],
            output_type=output,
        ).frames
        for prompt, noise in zip(PROMPTS, start_noise(pipeline), strict=True)
    ]
    return torch.cat(drawn)


@pytest.mark.slow
def test_clips_are_those_of_the_stock_pipeline_and_go_by_the_clip_that_is_edited(folder: Path) -> None:
    pipeline, pipe = shared(folder), stock(LucyEditPipeline, folder)
    assert (pipeline.latent_shape, pipeline.image_shape) == ((CHANNELS, 2, 4, 6), (5, 3, 32, 48))
    schedule = pipeline.schedule(STEPS, "diffusers")
    final = sample_ode(pipeline, schedule, 4.0, both(CLIP))
    assert_same_sum(final, stock_call(pipe, pipeline, 4.0, "latent"))
    assert (final - start_noise(pipeline)).abs().mean() > 0.1  # the network did something
    clips = stock_call(pipe, pipeline, 4.0, "pt")
    torch.testing.assert_close(pipeline.decode(final), clips, atol=2e-4, rtol=0)  # stock divides by an inverse
    other = sample_ode(pipeline, schedule, 4.0, both(1 - CLIP))
    assert (other - final).abs().amax(dim=(1, 2, 3, 4)).min() > 1e-2  # of both prompts


@pytest.mark.slow
def test_replayed_log_probs_equal_the_rollouts_and_stock_loads_the_lora(folder: Path, tmp_path: Path) -> None:
    pipeline, policy = with_lora(tiny(folder))
    check_ratio_is_one(pipeline, policy, 4.0, both(CLIP))
    schedule = pipeline.schedule(STEPS, "diffusers")
    final = sample_ode(pipeline, schedule, 1.0, both(CLIP))
    assert (final - sample_ode(shared(folder), schedule, 1.0, both(CLIP))).abs().max() > 1e-2
    assert pipeline.save_lora(tmp_path, policy.tensors(), policy.config).is_file()
    pipe = fresh_stock(LucyEditPipeline, folder, tmp_path)
    assert_same_sum(stock_call(pipe, pipeline, 1.0, "latent"), final)


def test_clips_decode_with_gradient_and_are_encoded_as_sources_are(folder: Path) -> None:
    pipeline = shared(folder)
    latents = start_noise(pipeline, 1).requires_grad_()
    pipeline.decode(latents, gradient=True).square().sum().backward()
    assert latents.grad is not None
    assert (latents.grad.flatten(2).abs().amax(2) > 0).all()
    beside = pipeline.encode(PROMPTS[:1], [[CLIP]]).tensors["beside"]
    torch.testing.assert_close(pipeline.encode_images(CLIP[None]), beside, atol=1e-5, rtol=0)


def test_rows_without_a_clip_and_networks_of_other_channels_are_refused(folder: Path, tmp_path: Path) -> None:
    known = family_for("lucy_edit", MODEL)
    assert sources_taken(known, MODEL, {}) == (0, 0)
    row = Prompt(text="a fox", metadata={}, sources=(), videos={"source_video": "run.mp4"})
    assert source_faults([row], known, (0, 0)) == []
    lacking = Prompt(text="a fox", metadata={}, sources=())
    assert "has no source_video, and family lucy_edit" in source_faults([lacking], known, (0, 0))[0]
    with pytest.raises(ValueError, match="has 4 frames, and 5 are drawn"):
        shared(folder).encode(PROMPTS[:1], [[CLIP[:4]]])
    for part in ("model_index.json", "transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).write_bytes((folder / part).read_bytes())
    edited(tmp_path / "transformer/config.json", in_channels=CHANNELS)
    with pytest.raises(ValueError, match=f"has in_channels {CHANNELS}, and needed is in_channels {2 * CHANNELS}"):
        FAMILY.check(str(tmp_path), None)
    assert json.loads((folder / "model_index.json").read_text())["expand_timesteps"]


@pytest.mark.slow
def test_the_published_network_is_called_without_numbers() -> None:
    check_published(FAMILY, MODEL, 5_000_377_536)
    network = FAMILY.meta_denoiser(MODEL, {"num_layers": 2})
    assert network is not None
    call = FAMILY.meta_call(MODEL, Size(height=480, width=832, num_frames=81), 512)
    with torch.no_grad():
        assert network(**call)[0].shape == (1, 48, 21, 30, 52)
