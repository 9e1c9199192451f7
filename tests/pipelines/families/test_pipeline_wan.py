"""Wan against stock diffusers: text to video and image to video, one network and two experts."""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline
from family_sampling import load, start_noise
from flow_family import OnSchedule
from PIL import Image
from rounding import assert_same_sum
from tiny_wan import BOUNDARY, CHANNELS, OPTIONS, Kind, save_tiny_wan
from torch import Tensor, nn
from video_family import (
    PROMPTS,
    STEPS,
    Sources,
    check_ratio_is_one,
    guided,
    image,
    sample_ode,
    with_lora,
)

from flowrl.media.images import to_pixels
from flowrl.pipelines.families.wan import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.lora import check_targets
from flowrl.samplers.schedules import build_schedule
from flowrl.trajectory import Schedule

KINDS: list[Kind] = ["t2v", "t2v-a14b", "ti2v-5b", "i2v", "i2v-a14b"]
WITH_IMAGE = "ti2v-5b with an image"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("wan")
    return {kind: save_tiny_wan(root / kind, kind) for kind in KINDS}


tiny = partial(load, FAMILY, OPTIONS)
shared = cache(lambda folder, dtype, image: with_lora(tiny(folder, dtype, image_to_video=image)))


def sources_of(pipeline: FamilyPipeline) -> Sources | None:
    return [[image(1, 40, 36)]] * 2 if pipeline.num_sources == (1, 1) else None


# ---- the same clips as stock diffusers -------------------------------------------------------------------------------


def stock_call(
    pipe: Any, pipeline: FamilyPipeline, schedule: Schedule, scale: float, output: str, **more: Any
) -> Tensor:
    pipe.scheduler = OnSchedule(schedule)
    pipe.set_progress_bar_config(disable=True)
    if pipeline.num_sources[1]:
        more["image"] = Image.fromarray(to_pixels(image(1, 40, 36)))
    frames, _, height, width = pipeline.image_shape
    # Image attention counts its tokens off 512; beyond the prompt all lengths are zeros.
    length = 512 if pipe.transformer.config.added_kv_proj_dim else OPTIONS["max_sequence_length"]
    return pipe(
        prompt=PROMPTS, negative_prompt=[""] * 2, latents=start_noise(pipeline), guidance_scale=scale, height=height,
        width=width, num_frames=frames, num_inference_steps=STEPS, max_sequence_length=length, output_type=output,
        **more,
    ).frames  # fmt: skip


def stock_pipe(folder: Path, pipeline: FamilyPipeline) -> Any:
    return (WanImageToVideoPipeline if pipeline.num_sources[1] else WanPipeline).from_pretrained(folder)


@pytest.mark.parametrize("kind", [*KINDS, WITH_IMAGE])
def test_ode_sampling_equals_the_stock_pipeline(folders: dict[str, Path], kind: str) -> None:
    folder = folders[kind.split()[0]]
    pipeline = tiny(folder, image_to_video=True if kind == WITH_IMAGE else None)
    pipe, schedule = stock_pipe(folder, pipeline), pipeline.schedule(STEPS, "diffusers")
    finals = []
    for scale in (1.0, 4.0):
        finals.append(sample_ode(pipeline, schedule, scale, sources_of(pipeline)))
        stock = stock_call(pipe, pipeline, schedule, scale, "latent")
        assert_same_sum(finals[-1], stock)
    assert (stock - start_noise(pipeline)).abs().mean() > 0.1  # the network did something
    assert (finals[0] - finals[1]).abs().max() > 1e-3  # and so did guidance
    clips = stock_call(pipe, pipeline, schedule, 4.0, "pt")
    assert_same_sum(pipeline.decode(stock), clips)
    assert clips.shape == (2, *pipeline.image_shape)


def test_each_expert_has_its_guidance(folders: dict[str, Path]) -> None:
    pipeline = tiny(folders["t2v-a14b"], guidance_scale_2=1.5)
    schedule = pipeline.schedule(STEPS, "diffusers")
    high = schedule.timestep >= BOUNDARY * 1000
    assert high.tolist() == [True, True, False, False]
    stock = stock_call(
        stock_pipe(folders["t2v-a14b"], pipeline), pipeline, schedule, 4.0, "latent", guidance_scale_2=1.5
    )
    final = sample_ode(pipeline, schedule, 4.0)
    assert_same_sum(final, stock)
    assert (final - sample_ode(tiny(folders["t2v-a14b"]), schedule, 4.0)).abs().max() > 1e-3
    velocity, x = guided(pipeline, 4.0), start_noise(pipeline)
    times = torch.tensor([900.0, 500.0])
    mixed = velocity(x, times / 1000, times)
    for row, time in enumerate(times):
        assert_same_sum(mixed[row], velocity(x, time / 1000, time)[row])


def test_rows_of_a_batch_go_to_the_expert_of_their_time(folders: dict[str, Path]) -> None:
    pipeline = tiny(folders["t2v-a14b"])
    x, cond = start_noise(pipeline, 4), pipeline.encode([*PROMPTS, *PROMPTS])
    times = torch.tensor([700.0, 999.0, 100.0, 800.0])
    mixed = pipeline.network(x, times, cond)
    for row in range(4):
        alone = pipeline.network(x[row : row + 1], times[row : row + 1], cond[row])
        assert_same_sum(mixed[row : row + 1], alone)
    low = {name: part for name, part in pipeline.denoiser.named_children()}["transformer_2"]
    low.load_state_dict(pipeline.pipe.transformer.state_dict())
    changed = (pipeline.network(x, times, cond) - mixed).flatten(1).abs().amax(1) > 1e-3
    assert changed.tolist() == [True, False, True, False]  # the boundary itself is the first expert's


def test_a_held_first_frame_arrives_whatever_the_network_says(folders: dict[str, Path]) -> None:
    pipeline, policy = shared(folders["ti2v-5b"], torch.float32, True)
    schedule, sources = pipeline.schedule(STEPS, "diffusers"), sources_of(pipeline)
    first = pipeline.encode(PROMPTS, sources).tensors["first_frame"]
    assert first.shape == (2, CHANNELS, 1, 4, 6)
    assert_same_sum(sample_ode(pipeline, schedule, 4.0, sources)[:, :, :1], first)
    x, time = start_noise(pipeline), torch.tensor([500.0, 250.0])
    held = pipeline.network(x, time, pipeline.encode(PROMPTS, sources))[:, :, :1]
    assert_same_sum(x[:, :, :1] - held * time.view(2, 1, 1, 1, 1) / 1000, first)
    gradients = torch.autograd.grad(held.square().sum(), list(policy.parameters.values()))
    assert all(float(gradient.abs().sum()) == 0 for gradient in gradients)  # nothing is trained there


# ---- noise levels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [None, 5.0])
def test_grids(folders: dict[str, Path], shift: float | None) -> None:
    pipeline = tiny(folders["t2v"])
    wanted = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift or 3.0, num_train_timesteps=1000
    )
    wanted.set_timesteps(20)
    stock = pipeline.schedule(20, "diffusers", shift)
    assert torch.equal(stock.sigma, wanted.sigmas.float())
    assert torch.equal(stock.timestep, wanted.timesteps.float())
    assert 0.999 < float(stock.sigma[0]) < 1  # kernels that are singular at 1 count it as the start
    for grid in ("unipc_flow", "linspace"):
        config = {"flow_shift": shift or 3.0, "shift": shift or 3.0}
        assert torch.equal(pipeline.schedule(20, grid, shift).sigma, build_schedule(config, 20, grid=grid).sigma)
    for steps, grid in ((0, "diffusers"), (20, "sd3")):
        with pytest.raises(ValueError, match=r"T >= 1 steps|unknown sigma grid 'sd3'"):
            pipeline.schedule(steps, grid)


def test_an_euler_scheduler_in_the_folder_keeps_its_own_grid(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["t2v"], tmp_path / "euler")
    pipe = WanPipeline.from_pretrained(folder, scheduler=FlowMatchEulerDiscreteScheduler(shift=8.0))
    pipe.save_pretrained(folder)
    pipeline, wanted = tiny(folder), FlowMatchEulerDiscreteScheduler(shift=8.0)
    wanted.set_timesteps(STEPS)
    assert torch.equal(pipeline.schedule(STEPS, "diffusers").sigma, wanted.sigmas)
    scale = build_schedule({"flow_shift": 8.0}, STEPS, grid="unipc_flow")
    assert torch.equal(pipeline.schedule(STEPS, "unipc_flow").sigma, scale.sigma)


# ---- the ratio is exactly 1 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"),
    list(zip([*KINDS, WITH_IMAGE], itertools.cycle([torch.float32, torch.bfloat16]), strict=False)),
    ids=str,
)
def test_replayed_log_probs_equal_the_rollouts(folders: dict[str, Path], kind: str, dtype: torch.dtype) -> None:
    pipeline, policy = shared(folders[kind.split()[0]], dtype, True if kind == WITH_IMAGE else None)
    names = {name.split(".blocks.")[0] for name in policy.parameters} if kind.endswith("a14b") else None
    assert names in (None, {"transformer", "transformer_2"})
    kernel = "wan_sde" if dtype == torch.float32 else "flow_sde"
    check_ratio_is_one(pipeline, policy, 4.0, sources_of(pipeline), kernel)


def test_low_precision_keeps_what_stock_keeps_in_float32(folders: dict[str, Path]) -> None:
    pipeline, _ = shared(folders["t2v-a14b"], torch.bfloat16, None)
    for expert in pipeline.experts.values():
        kept = {name for name, p in expert.named_parameters() if p.dtype == torch.float32 and "lora" not in name}
        assert {
            "scale_shift_table",
            "blocks.1.norm2.weight",
            "condition_embedder.time_embedder.linear_1.weight",
        } <= kept
        assert expert.patch_embedding.weight.dtype == torch.bfloat16
    high = pipeline.experts["transformer"]
    seen: list[Tensor] = []
    hook = high.condition_embedder.time_embedder.register_forward_hook(
        lambda module, given, output: seen.append(output)
    )
    pipeline.network(start_noise(pipeline), torch.full((2,), 999.0), pipeline.encode(PROMPTS))
    hook.remove()
    assert [output.dtype for output in seen] == [torch.float32]
    # A copy computes with weights of its own, in float32 too.
    time, own = torch.ones(1, high.config.freq_dim), high.condition_embedder.time_embedder
    copied = deepcopy(own)
    copied.linear_2.bias.data += 1
    with torch.autocast("cpu", torch.bfloat16):
        apart = copied(time) - own(time)
    assert apart.dtype == torch.float32
    torch.testing.assert_close(apart, torch.ones_like(apart))
    assert {p.dtype for p in pipeline.pipe.vae.parameters()} == {torch.float32}


# ---- LoRA files ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t2v", "t2v-a14b", "i2v"])
def test_stock_loads_the_saved_lora(folders: dict[str, Path], tmp_path: Path, kind: Kind) -> None:
    pipeline, policy = shared(folders[kind], torch.float32, None)
    schedule = pipeline.schedule(STEPS, "diffusers")
    final = sample_ode(pipeline, schedule, 4.0, sources_of(pipeline))
    assert pipeline.save_lora(tmp_path, policy.tensors(), policy.config).is_file()
    pipe = stock_pipe(folders[kind], pipeline)
    without = stock_call(pipe, pipeline, schedule, 4.0, "latent")
    with warnings.catch_warnings():  # stock adds zeros for the image's keys and values, and remarks on it
        warnings.filterwarnings("ignore", message=r"While injecting the PEFT adapters.*add_k_proj")
        pipe.load_lora_weights(tmp_path)
    if kind == "t2v-a14b":
        one = stock_call(pipe, pipeline, schedule, 4.0, "latent")
        pipe.load_lora_weights(tmp_path / "transformer_2", load_into_transformer_2=True)
        assert (one - final).abs().max() > 1e-3
    torch.testing.assert_close(stock_call(pipe, pipeline, schedule, 4.0, "latent"), final, atol=2e-5, rtol=1e-5)
    assert (without - final).abs().max() > 1e-2


# ---- prompts, images and clips ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_texts_and_images_are_each_encoded_once(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = tiny(folders["i2v"])
    encoded: list[tuple[int, ...]] = []
    encode = pipeline.pipe.vae.encode

    def noted(clips: Tensor) -> Any:
        encoded.append(tuple(clips.shape))
        return encode(clips)

    monkeypatch.setattr(pipeline.pipe.vae, "encode", noted)
    one, other = image(1, 40, 36), image(2, 24, 24)
    together = pipeline.encode([*PROMPTS, "", PROMPTS[0]], [[one], [one], [one], [other]])
    assert encoded == [(1, 3, 5, 32, 48)] * 2
    assert {name: tuple(t.shape) for name, t in together.tensors.items()} == {
        "embeds": (4, 512, 24), "beside": (4, 4 + CHANNELS, 2, 4, 6), "image": (4, 5, 16),
    }  # fmt: skip
    alone = tiny(folders["i2v"]).encode([PROMPTS[1]], [[one]])
    for name, tensor in together.tensors.items():
        assert torch.equal(tensor[1:2], alone.tensors[name])
    assert not torch.equal(together.tensors["beside"][0], together.tensors["beside"][3])
    pipeline.free_text_encoders()
    pipeline.encode([PROMPTS[0]], [[image(0, 16, 16)]])  # images can still be new
    with pytest.raises(ValueError, match="'three stars' was not encoded before"):
        pipeline.encode(["three stars"], [[one]])
    with pytest.raises(ValueError, match=r"has 0 source images, and wan takes 1"):
        pipeline.encode(PROMPTS)
    with pytest.raises(ValueError, match=r"has 1 source images, and wan takes no source image"):
        tiny(folders["t2v"]).encode(PROMPTS, [[one], [one]])


def test_another_size_is_drawn_by_the_same_networks(folders: dict[str, Path]) -> None:
    pipeline = tiny(folders["i2v"])
    before = pipeline.encode(PROMPTS, sources_of(pipeline))
    other = pipeline.resized(16, 32)
    assert (other.latent_shape, other.image_shape) == ((CHANNELS, 2, 2, 4), (5, 3, 16, 32))
    assert other.encode(PROMPTS, sources_of(other)).tensors["beside"].shape == (2, 4 + CHANNELS, 2, 2, 4)
    assert other.denoiser is pipeline.denoiser
    again = pipeline.encode(PROMPTS, sources_of(pipeline))
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in before.tensors.items())


def test_clips_go_through_the_autoencoder_in_slices_and_with_gradient(folders: dict[str, Path]) -> None:
    pipeline, sliced = tiny(folders["t2v"], vae_slice=3), tiny(folders["t2v"], vae_slice=1)
    latents = start_noise(pipeline, 3)
    clips = pipeline.decode(latents)
    assert (clips.shape, clips.dtype) == ((3, 5, 3, 32, 48), torch.float32)
    assert 0 <= float(clips.min()) < float(clips.max()) <= 1
    assert_same_sum(sliced.decode(latents), clips)
    raw = pipeline.pipe.vae.encode(2 * clips.transpose(1, 2) - 1).latent_dist.mode()
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in ([0.1, -0.2, 0.3, 0.0], [1.5, 0.5, 2.0, 1.0]))
    assert_same_sum(sliced.encode_images(clips), (raw - mean) / std)
    assert sliced.encode_images(clips).shape[1:] == sliced.latent_shape
    with pytest.raises(ValueError, match=r"shape \[b, 5, 3, 32, 48\]"):
        pipeline.encode_images(clips[:, 1:])
    leaf = latents.requires_grad_()
    sliced.decode(leaf, gradient=True).square().sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad.flatten(2).abs().amax(2) > 0).all()
    assert tiny(folders["t2v"], vae_tiling=True).pipe.vae.use_tiling


# ---- refusals and real sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": 6}, r"num_frames \(6\) must be 1 plus a multiple of 4 .* nearest are 5 and 9"),
        ({"num_frames": 0}, r"nearest are 1 and 5"),
        ({"height": 24}, r"pipeline\.height \(24\) must be a multiple of 16 and at most 256"),
        ({"guidance_scale_2": 3.0}, r"guidance_scale_2 \(3\.0\) is for two experts"),
        ({"image_to_video": True}, r"reads 4 channels, and WanImageToVideoPipeline gives it 12"),
    ],
)
def test_options_the_checkpoint_does_not_have_are_refused(
    folders: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(folders["t2v"], **options)


def test_folders_are_refused_before_weights_load(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["t2v-a14b"], tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    FAMILY.check(str(folder), FAMILY.lora_targets)
    with pytest.raises(ValueError, match=r"'attn1\.to_w' matches no linear layer"):
        FAMILY.check(str(folder), ["attn1.to_w"])
    with pytest.raises(ValueError, match=r"'transformer_2\.blocks\.0\.attn1\.to_q' matches no linear layer"):
        FAMILY.check(str(folder), ["transformer_2.blocks.0.attn1.to_q"])  # not in each of the two
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))

    def rewritten(path: str, content: dict[str, Any]) -> str:
        (folder / path).write_text(json.dumps(content), encoding="utf-8")
        return str(folder)

    with pytest.raises(ValueError, match=r"boundary_ratio None, a transformer and a transformer_2"):
        FAMILY.check(rewritten("model_index.json", {**index, "boundary_ratio": None}), None)
    with pytest.raises(ValueError, match=r"boundary_ratio 0\.8, a transformer and no transformer_2"):
        FAMILY.check(rewritten("model_index.json", {**index, "transformer_2": [None, None]}), None)
    with pytest.raises(ValueError, match=r"is a FluxPipeline, and pipeline\.name=wan loads WanPipeline or"):
        FAMILY.check(rewritten("model_index.json", {**index, "_class_name": "FluxPipeline"}), None)
    rewritten("model_index.json", index)
    with pytest.raises(ValueError, match=r"UniPCMultistepScheduler without use_flow_sigmas"):
        FAMILY.check(rewritten("scheduler/scheduler_config.json", {**scheduler, "use_flow_sigmas": False}), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 1.419),
        ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", 16.40),
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", 2 * 14.29),
        ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", 5.00),
    ],
)
def test_published_sizes(name: str, billions: float) -> None:
    """Billions of parameters; 1.419 and 14.29 are counted elsewhere, the others are the sizes in the names, to 3 %."""
    network = FAMILY.meta_denoiser(name)
    assert isinstance(network, nn.Module)
    assert sum(p.numel() for p in network.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)
    for expert in network.values() if isinstance(network, nn.ModuleDict) else [network]:
        check_targets(expert, FAMILY.lora_targets)


@pytest.mark.parametrize(
    ("name", "frames", "fps"),
    [("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 81, 16.0), ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", 121, 24.0)],
)
def test_each_checkpoint_draws_its_published_five_seconds(name: str, frames: int, fps: float) -> None:
    own = FAMILY.planned_size(name, {})
    assert own is not None
    assert (own.num_frames, own.fps) == (frames, fps)


@pytest.mark.slow
def test_lora_on_the_real_network() -> None:
    """23.6 million numbers at rank 32: 8 projections of 1536 in each of 30 blocks."""
    FAMILY.check("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", FAMILY.lora_targets)
    network = FAMILY.meta_denoiser("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    assert network is not None
    bound = [part for name, part in network.named_modules() if name.endswith(FAMILY.lora_targets)]
    assert sum(32 * (p.in_features + p.out_features) for p in bound) == 8 * 30 * 32 * (1536 + 1536) == 23_592_960
