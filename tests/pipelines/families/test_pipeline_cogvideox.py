"""CogVideoX against stock diffusers: v-prediction in flow coordinates, and a schedule that ends at noise alone."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import video_family as video
from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline
from family_sampling import check_published, check_targets, fresh_stock, load, start_noise
from flow_family import bare, edited, published
from rounding import assert_same_sum
from tiny_cogvideox import OPTIONS, save_tiny_cogvideox
from torch import Tensor

from flowrl.pipelines.families.cogvideox import FAMILY
from flowrl.pipelines.shared import stock_schedules
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pretraining.tiny_sd3 import CONTEXT
from flowrl.samplers.flow_coordinates import alpha_bars, flow_sigma


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_cogvideox(tmp_path_factory.mktemp("tiny") / "cogvideox")


tiny = partial(load, FAMILY, OPTIONS)
shared = cache(lambda folder, dtype: video.with_lora(tiny(folder, dtype)))


def stock_call(pipe: Any, pipeline: FamilyPipeline, scale: float, output: str) -> Tensor:
    """Latents come back as ours are, [b, C, F, h, w]."""
    frames, _, height, width = pipeline.image_shape
    found = pipe(
        prompt=video.PROMPTS, negative_prompt=[""] * 2, latents=start_noise(pipeline).transpose(1, 2),
        guidance_scale=scale, height=height, width=width, num_frames=frames, num_inference_steps=video.STEPS,
        max_sequence_length=OPTIONS["max_sequence_length"], output_type=output,
    ).frames  # fmt: skip
    return found.transpose(1, 2) if output == "latent" else found


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize("rotary", [True, False], ids=["5b", "2b"])
def test_ode_sampling_equals_the_stock_pipeline_and_its_own_scheduler(
    tmp_path: Path, rotary: bool, scale: float
) -> None:
    folder = save_tiny_cogvideox(tmp_path / "tiny", rotary=rotary)
    pipeline, pipe = tiny(folder), fresh_stock(CogVideoXPipeline, folder)
    schedule = pipeline.schedule(video.STEPS, "diffusers")
    assert (float(schedule.sigma[0]), schedule.start_scale) == (1.0, 1.0)  # noise alone
    assert schedule.timestep.tolist() == [999, 749, 499, 249]
    final = video.sample_ode(pipeline, schedule, scale)
    stock = stock_call(pipe, pipeline, scale, "latent")
    assert_same_sum(final, stock)
    assert (final - start_noise(pipeline)).abs().mean() > 0.1  # the network did something
    clips = stock_call(pipe, pipeline, scale, "pt")
    assert_same_sum(pipeline.decode(stock), clips)
    assert clips.shape == (2, 9, 3, 16, 32)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("zero_snr", [True, False])
def test_noise_levels_are_the_stock_schedulers(scale: float, zero_snr: bool) -> None:
    stock = CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=zero_snr, snr_shift_scale=scale, clip_sample=False
    )
    found = alpha_bars(stock_schedules.plain_config(stock.config))
    torch.testing.assert_close(flow_sigma(found), flow_sigma(stock.alphas_cumprod.double()), atol=1e-9, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "dtype"), [("flow_sde", torch.float32), ("ddim_flow", torch.bfloat16)], ids=str)
def test_replayed_log_probs_equal_the_rollouts(folder: Path, kernel: str, dtype: torch.dtype) -> None:
    pipeline, policy = shared(folder, dtype)
    video.check_ratio_is_one(pipeline, policy, 6.0, kernel=kernel)


@pytest.mark.slow
def test_stock_loads_the_saved_lora(folder: Path, tmp_path: Path) -> None:
    pipe = fresh_stock(CogVideoXPipeline, folder)
    video.check_stock_loads_the_saved_lora(*shared(folder, torch.float32), tmp_path, pipe, stock_call, 6.0)


@pytest.mark.slow
def test_prompts_are_embedded_by_themselves(folder: Path) -> None:
    video.check_prompts_are_embedded_by_themselves(tiny(folder), tiny(folder))


@pytest.mark.slow
def test_clips_go_through_the_autoencoder_in_slices_and_with_gradient(folder: Path) -> None:
    pipeline, sliced = tiny(folder, vae_slice=3), tiny(folder, vae_slice=1)
    assert (pipeline.latent_shape, pipeline.image_shape) == ((4, 3, 2, 4), (9, 3, 16, 32))
    video.check_autoencoder(pipeline, sliced, lambda raw: 0.7 * raw)
    assert tiny(folder, vae_tiling=True).pipe.vae.use_tiling
    other = pipeline.resized(32, 16)
    assert (other.latent_shape, other.image_shape) == ((4, 3, 4, 2), (9, 3, 32, 16))
    assert video.sample_ode(other, other.schedule(2, "linspace"), 1.0).shape == (2, 4, 3, 4, 2)


def test_what_the_family_cannot_do_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_frames \(5\) must be 1 plus a multiple of 8 .* nearest are 1 and 9"):
        tiny(folder, num_frames=5)
    with pytest.raises(ValueError, match=r"pipeline\.width \(24\) must be a multiple of 16"):
        tiny(folder, width=24)
    with pytest.raises(ValueError, match=r"fixed noise levels, which have no shift \(got 3\)"):
        tiny(folder).schedule(video.STEPS, "diffusers", 3.0)
    copied = bare(folder, tmp_path)
    check_targets(FAMILY, copied, "attn1.to_w")
    with pytest.raises(ValueError, match=rf"max_sequence_length \({CONTEXT - 1}\) must be {CONTEXT} for .*bare: "):
        tiny(copied, max_sequence_length=CONTEXT - 1)  # before weights load: there are none
    for name in ("THUDM/CogVideoX-2b", "zai-org/CogVideoX-5b"):
        with pytest.raises(ValueError, match=rf"max_sequence_length \(225\) must be 226 for {name}"):
            FAMILY.load(name, max_sequence_length=225)
        with pytest.raises(ValueError, match=rf"max_sequence_length \(225\) must be 226 for {name}"):
            FAMILY.meta_call(name, Size(height=480, width=720, num_frames=49), 225)
    edited(copied / "transformer" / "config.json", patch_size_t=2)
    with pytest.raises(ValueError, match=r"is a CogVideoX 1\.5 \(patch_size_t 2\)"):
        FAMILY.check(str(copied), None)
    edited(copied / "model_index.json", _class_name="WanPipeline")
    with pytest.raises(ValueError, match=r"is a WanPipeline, and pipeline\.name=cogvideox loads"):
        FAMILY.check(str(copied), None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "billions"), list(zip(published(FAMILY), (1.69, 5.57) * 2, strict=True)))
def test_published_sizes(name: str, billions: float) -> None:
    """Billions of parameters ("2b", "5b"), and LoRA targets that bind there."""
    check_published(FAMILY, name, billions * 1e9, rel=0.006)
