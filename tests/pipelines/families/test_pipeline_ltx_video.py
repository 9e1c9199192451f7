"""LTX-Video against stock diffusers: packed tokens, a frame rate that the network reads, a grid shifted by tokens."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import video_family as video
from diffusers import LTXPipeline
from family_sampling import check_published, check_targets, fresh_stock, load, start_noise
from flow_family import bare, edited, published
from rounding import assert_same_sum
from tiny_ltx_video import CHANNELS, OPTIONS, save_tiny_ltx_video
from torch import Tensor

from flowrl.pipelines.families.ltx_video import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_ltx_video(tmp_path_factory.mktemp("tiny") / "ltx_video")


tiny = partial(load, FAMILY, OPTIONS)
shared = cache(lambda folder, dtype: video.with_lora(tiny(folder, dtype)))


def stock_call(pipe: Any, pipeline: FamilyPipeline, scale: float, output: str, **more: Any) -> Tensor:
    """Latents go in as tokens of one latent pixel each, and come back as ours are."""
    frames, _, height, width = pipeline.image_shape
    tokens = start_noise(pipeline).flatten(2).transpose(1, 2)
    found = pipe(
        prompt=video.PROMPTS, negative_prompt=[""] * 2, latents=tokens, guidance_scale=scale, height=height,
        width=width, num_frames=frames, frame_rate=pipeline.fps, num_inference_steps=video.STEPS,
        max_sequence_length=OPTIONS["max_sequence_length"], output_type=output, **more,
    ).frames  # fmt: skip
    return found.transpose(1, 2).unflatten(2, pipeline.latent_shape[1:]) if output == "latent" else found


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_ode_sampling_equals_the_stock_pipeline_and_its_own_scheduler(folder: Path, scale: float) -> None:
    pipeline, pipe = tiny(folder), fresh_stock(LTXPipeline, folder)
    schedule = pipeline.schedule(video.STEPS, "diffusers")
    assert float(schedule.sigma[-2]) == pytest.approx(0.1, abs=1e-6)  # shift_terminal
    final = video.sample_ode(pipeline, schedule, scale)
    stock = stock_call(pipe, pipeline, scale, "latent")
    assert_same_sum(final, stock)
    assert (final - start_noise(pipeline)).abs().mean() > 0.1  # the network did something
    clips = stock_call(pipe, pipeline, scale, "pt")
    torch.testing.assert_close(pipeline.decode(final), clips, atol=2e-5, rtol=0)
    assert clips.shape == (2, 9, 3, 64, 32)
    slower = tiny(folder, fps=25.0)
    assert (video.sample_ode(slower, schedule, scale) - final).abs().max() > 1e-5  # the frame rate is read


@pytest.mark.slow
def test_a_decoder_that_reads_a_timestep(tmp_path: Path) -> None:
    folder = save_tiny_ltx_video(tmp_path / "later", timestep_conditioning=True)
    pipeline, pipe = tiny(folder, decode_timestep=0.05), fresh_stock(LTXPipeline, folder)
    final = video.sample_ode(pipeline, pipeline.schedule(video.STEPS, "diffusers"), 1.0)
    clips = stock_call(pipe, pipeline, 1.0, "pt", decode_timestep=0.05, decode_noise_scale=0.0)
    torch.testing.assert_close(pipeline.decode(final), clips, atol=2e-5, rtol=0)
    assert (tiny(folder).decode(final) - clips).abs().max() > 1e-5


def test_a_shift_replaces_the_tokens(folder: Path) -> None:
    pipeline = tiny(folder)
    u = torch.linspace(1, 1 / 8, 8, dtype=torch.float64)
    sigma = 3 * u / (1 + 2 * u)
    stretched = 1 - (1 - sigma) * 0.9 / (1 - sigma[-1])
    for grid in ("diffusers", "linspace"):
        found = pipeline.schedule(8, grid, 3.0)
        torch.testing.assert_close(found.sigma[:-1].double(), stretched, atol=1e-6, rtol=0)
        torch.testing.assert_close(found.timestep, 1000 * found.sigma[:-1])
    with pytest.raises(ValueError, match="shift must be positive, got -1"):
        pipeline.schedule(8, "diffusers", -1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "dtype"), [(1.0, torch.float32), (3.0, torch.bfloat16)], ids=str)
def test_replayed_log_probs_equal_the_rollouts(folder: Path, scale: float, dtype: torch.dtype) -> None:
    pipeline, policy = shared(folder, dtype)
    video.check_ratio_is_one(pipeline, policy, scale)


@pytest.mark.slow
def test_stock_loads_the_saved_lora(folder: Path, tmp_path: Path) -> None:
    pipe = fresh_stock(LTXPipeline, folder)
    video.check_stock_loads_the_saved_lora(*shared(folder, torch.float32), tmp_path, pipe, stock_call, 3.0)


@pytest.mark.slow
def test_prompts_are_embedded_by_themselves(folder: Path) -> None:
    found = video.check_prompts_are_embedded_by_themselves(tiny(folder), tiny(folder))
    assert found["mask"].sum(1).tolist() == [7, 4, 7]  # words, and the end


@pytest.mark.slow
def test_clips_go_through_the_autoencoder_in_slices_and_with_gradient(folder: Path) -> None:
    pipeline, sliced = tiny(folder, vae_slice=3), tiny(folder, vae_slice=1)
    assert (pipeline.latent_shape, pipeline.image_shape) == ((CHANNELS, 2, 2, 1), (9, 3, 64, 32))
    mean, std = (torch.linspace(*ends, CHANNELS).view(1, -1, 1, 1, 1) for ends in ((-0.3, 0.3), (0.5, 1.5)))
    video.check_autoencoder(pipeline, sliced, lambda raw: (raw - mean) / std)
    assert tiny(folder, vae_tiling=True).pipe.vae.use_tiling
    other = pipeline.resized(32, 96)
    assert (other.latent_shape, other.image_shape) == ((CHANNELS, 2, 1, 3), (9, 3, 32, 96))


def test_what_the_family_cannot_do_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_frames \(5\) must be 1 plus a multiple of 8 .* nearest are 1 and 9"):
        tiny(folder, num_frames=5)
    with pytest.raises(ValueError, match=r"pipeline\.width \(48\) must be a multiple of 32"):
        tiny(folder, width=48)
    with pytest.raises(ValueError, match=r"max_sequence_length \(0\) must be at least 1 for "):
        tiny(folder, max_sequence_length=0)
    with pytest.raises(ValueError, match=r"decode_timestep \(0\.05\) has no effect"):
        tiny(folder, decode_timestep=0.05)
    copied = bare(folder, tmp_path)
    check_targets(FAMILY, copied, "attn1.to_w")
    edited(copied / "model_index.json", _class_name="LTX2Pipeline")
    with pytest.raises(ValueError, match=r"is a LTX2Pipeline, and pipeline\.name=ltx_video loads"):
        FAMILY.check(str(copied), None)


@pytest.mark.slow
def test_published_size() -> None:
    """1.92 billion parameters ("2B"), and LoRA targets that bind there."""
    (name,) = published(FAMILY)
    check_published(FAMILY, name, 1.92e9, rel=0.005)
