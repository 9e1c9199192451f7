"""HunyuanVideo against stock diffusers: guidance as an input of the network."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import video_family as video
from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline
from family_sampling import check_published, check_targets, fresh_stock, load, start_noise
from flow_family import OnSchedule, bare, edited, published
from rounding import assert_same_sum
from tiny_hunyuan_video import OPTIONS, save_tiny_hunyuan_video
from torch import Tensor

from flowrl.pipelines.families.hunyuan_video import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_hunyuan_video(tmp_path_factory.mktemp("tiny") / "hunyuan_video")


tiny = partial(load, FAMILY, OPTIONS)
shared = cache(lambda folder, dtype: video.with_lora(tiny(folder, dtype)))


def stock_call(pipe: Any, pipeline: FamilyPipeline, scale: float, output: str) -> Tensor:
    frames, _, height, width = pipeline.image_shape
    return pipe(
        prompt=video.PROMPTS, latents=start_noise(pipeline), guidance_scale=scale, height=height, width=width,
        num_frames=frames, num_inference_steps=video.STEPS, max_sequence_length=16, output_type=output,
    ).frames  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_ode_sampling_equals_the_stock_pipeline_and_its_own_scheduler(folder: Path, scale: float) -> None:
    pipeline, pipe = tiny(folder), fresh_stock(HunyuanVideoPipeline, folder)
    final = video.sample_ode(pipeline, pipeline.schedule(video.STEPS, "diffusers"), scale)
    stock = stock_call(pipe, pipeline, scale, "latent")
    assert_same_sum(final, stock)
    assert (stock - start_noise(pipeline)).abs().mean() > 0.1  # the network did something
    clips = stock_call(pipe, pipeline, scale, "pt")
    assert_same_sum(pipeline.decode(stock), clips)
    assert clips.shape == (2, 5, 3, 16, 32)
    assert (
        video.sample_ode(pipeline, pipeline.schedule(video.STEPS, "diffusers"), scale + 1) - stock
    ).abs().max() > 1e-4
    assert pipeline.passes(scale) == 1


@pytest.mark.slow
@pytest.mark.parametrize("shift", [None, 5.0])
def test_grid_is_evenly_spaced_and_shifted_once(folder: Path, shift: float | None) -> None:
    wanted = FlowMatchEulerDiscreteScheduler(shift=shift or 7.0)
    wanted.set_timesteps(sigmas=np.linspace(1.0, 0.0, 17)[:-1])
    for grid in ("diffusers", "linspace"):
        schedule = tiny(folder).schedule(16, grid, shift)
        torch.testing.assert_close(schedule.sigma, wanted.sigmas, atol=1e-6, rtol=0)
        torch.testing.assert_close(schedule.timestep, wanted.timesteps, atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "dtype"), [("flow_sde", torch.float32), ("dance_sde", torch.bfloat16)], ids=str)
def test_replayed_log_probs_equal_the_rollouts(folder: Path, kernel: str, dtype: torch.dtype) -> None:
    pipeline, policy = shared(folder, dtype)
    video.check_ratio_is_one(pipeline, policy, 6.0, kernel=kernel)


@pytest.mark.slow
def test_low_precision_rounds_the_scale_as_stock_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = tiny(folder, torch.bfloat16)
    seen: list[float] = []
    embedder = pipeline.pipe.transformer.time_text_embed
    hook = embedder.register_forward_pre_hook(lambda module, given: seen.append(float(given[2][0])))
    velocity = pipeline.guided(pipeline.network, pipeline.encode(video.PROMPTS), None, 6.0)
    velocity(start_noise(pipeline), torch.tensor(0.5), torch.tensor(500.0))
    hook.remove()
    assert seen == [6016.0]  # 6000 has no neighbour nearer in bfloat16


@pytest.mark.slow
def test_stock_loads_the_saved_lora(folder: Path, tmp_path: Path) -> None:
    pipe = fresh_stock(HunyuanVideoPipeline, folder)
    video.check_stock_loads_the_saved_lora(*shared(folder, torch.float32), tmp_path, pipe, stock_call, 6.0)


@pytest.mark.slow
def test_prompts_are_embedded_by_themselves(folder: Path) -> None:
    found = video.check_prompts_are_embedded_by_themselves(tiny(folder), tiny(folder))
    shapes = {"embeds": (3, 16, 24), "mask": (3, 16), "pooled": (3, 16)}
    assert {name: tuple(t.shape) for name, t in found.items()} == shapes


@pytest.mark.slow
def test_clips_go_through_the_autoencoder_in_slices_and_with_gradient(folder: Path) -> None:
    pipeline, sliced = tiny(folder, vae_slice=3), tiny(folder, vae_slice=1)
    assert (pipeline.latent_shape, pipeline.image_shape) == ((4, 2, 2, 4), (5, 3, 16, 32))
    video.check_autoencoder(pipeline, sliced, lambda raw: 0.476986 * raw)
    assert tiny(folder, vae_tiling=True).pipe.vae.use_tiling
    other = pipeline.resized(32, 16)
    assert (other.latent_shape, other.image_shape) == ((4, 2, 4, 2), (5, 3, 32, 16))


def test_what_the_family_cannot_do_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_frames \(6\) must be 1 plus a multiple of 4 .* nearest are 5 and 9"):
        tiny(folder, num_frames=6)
    with pytest.raises(ValueError, match=r"pipeline\.width \(24\) must be a multiple of 16"):
        tiny(folder, width=24)
    copied = bare(folder, tmp_path)
    check_targets(FAMILY, copied, "attn.to_w")
    edited(copied / "transformer" / "config.json", guidance_embeds=False)
    with pytest.raises(ValueError, match="guidance_embeds false"):
        FAMILY.check(str(copied), None)
    edited(copied / "model_index.json", _class_name="WanPipeline")
    with pytest.raises(ValueError, match=r"is a WanPipeline, and pipeline\.name=hunyuan_video loads"):
        FAMILY.check(str(copied), None)


@pytest.mark.slow
def test_published_size() -> None:
    """12.8 billion parameters ("13B"), and LoRA targets that bind there."""
    (name,) = published(FAMILY)
    check_published(FAMILY, name, 12.8e9, rel=0.004)


@pytest.mark.slow
def test_the_stock_scheduler_can_be_replaced(folder: Path) -> None:
    """The same steps at another shift, which the stock pipeline would take from its scheduler."""
    pipeline, pipe = tiny(folder), fresh_stock(HunyuanVideoPipeline, folder)
    schedule = pipeline.schedule(video.STEPS, "linspace", 3.0)
    pipe.scheduler = OnSchedule(schedule)
    assert_same_sum(video.sample_ode(pipeline, schedule, 6.0), stock_call(pipe, pipeline, 6.0, "latent"))
