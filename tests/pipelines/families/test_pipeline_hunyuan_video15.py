"""HunyuanVideo 1.5 against stock diffusers: a guider, quoted text, and no tokens of an image that is not there."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import video_family as video
from diffusers import ClassifierFreeGuidance, HunyuanVideo15Pipeline
from family_sampling import (
    check_call,
    check_published,
    check_targets,
    fresh_stock,
    idle_tensors,
    load,
    replayed,
    start_noise,
)
from flow_family import bare, edited, published
from rounding import assert_same_sum
from tiny_hunyuan_video15 import OPTIONS, save_tiny_hunyuan_video15
from torch import Tensor

from flowrl.pipelines.families.hunyuan_video15 import FAMILY
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_hunyuan_video15(tmp_path_factory.mktemp("tiny") / "hunyuan_video15")


tiny = partial(load, FAMILY, OPTIONS)
shared = cache(lambda folder, dtype: video.with_lora(tiny(folder, dtype)))


def stock_call(pipe: Any, pipeline: FamilyPipeline, scale: float, output: str, prompts: Any = video.PROMPTS) -> Tensor:
    """Its autoencoder takes one clip at a time, so only latents can be asked for of several prompts."""
    frames, _, height, width = pipeline.image_shape
    pipe.tokenizer_max_length = 16
    pipe.guider = ClassifierFreeGuidance(guidance_scale=scale)
    return pipe(
        prompt=prompts, latents=start_noise(pipeline, len(prompts)), height=height, width=width, num_frames=frames,
        num_inference_steps=video.STEPS, output_type=output,
    ).frames  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_ode_sampling_equals_the_stock_pipeline_its_scheduler_and_its_guider(folder: Path, scale: float) -> None:
    pipeline, pipe = tiny(folder), fresh_stock(HunyuanVideo15Pipeline, folder)
    final = video.sample_ode(pipeline, pipeline.schedule(video.STEPS, "diffusers"), scale)
    stock = stock_call(pipe, pipeline, scale, "latent")
    assert_same_sum(final, stock)
    assert (stock - start_noise(pipeline)).abs().mean() > 0.1  # the network did something
    assert (stock_call(pipe, pipeline, scale + 1, "latent") - stock).abs().max() > 1e-4  # and guidance
    assert (stock_call(pipe, pipeline, scale, "latent", video.PROMPTS[::-1]) - stock).abs().max() > 1e-4  # and text
    assert pipeline.passes(scale) == (1 if scale == 1 else 2)


@pytest.mark.slow
def test_quoted_text_is_read_by_the_second_encoder(folder: Path) -> None:
    """In a batch with a prompt that quotes nothing, as the stock pipeline has it."""
    prompts = ['a red circle "GO"', "two blue squares"]
    pipeline, pipe = tiny(folder), fresh_stock(HunyuanVideo15Pipeline, folder)
    cond = pipeline.encode(prompts)
    assert cond.tensors["glyph_mask"].bool().sum(1).tolist() == [len('Text "GO". ') + 1, 0]
    velocity = pipeline.guided(pipeline.network, cond, pipeline.encode(["", ""]), 6.0)
    schedule = pipeline.schedule(1, "diffusers")
    x = start_noise(pipeline)
    with torch.no_grad():
        found = x - velocity(x, schedule.sigma[0], schedule.timestep[0])
    frames, _, height, width = pipeline.image_shape
    pipe.tokenizer_max_length = 16
    wanted = pipe(
        prompt=prompts, latents=x, height=height, width=width, num_frames=frames, num_inference_steps=1,
        output_type="latent",
    ).frames  # fmt: skip
    assert_same_sum(found, wanted)


@pytest.mark.slow
def test_another_length_is_the_same_function(folder: Path) -> None:
    short, long = tiny(folder), tiny(folder, max_sequence_length=40)
    schedule = short.schedule(video.STEPS, "diffusers")
    first, second = (video.sample_ode(one, schedule, 6.0) for one in (short, long))
    assert_same_sum(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replayed_log_probs_equal_the_rollouts(folder: Path, dtype: torch.dtype) -> None:
    """Every LoRA tensor is trained, but for the last block's answers to the text, which nobody reads."""
    pipeline, policy = shared(folder, dtype)
    log_prob = replayed(pipeline, video.guided(pipeline, 6.0), len(video.PROMPTS), video.STEPS)
    idle = idle_tensors(policy, (log_prob * torch.tensor([1.0, -2.0])).sum())
    last = "transformer_blocks.1.attn"
    assert idle == {name for name in policy.parameters if name.startswith((f"{last}.add_q_", f"{last}.to_add_out"))}
    assert len(idle) == 4


@pytest.mark.slow
def test_the_stock_network_loads_the_saved_lora(folder: Path, tmp_path: Path) -> None:
    """The stock class has no loader, and its network has."""
    (pipeline, policy), pipe = shared(folder, torch.float32), fresh_stock(HunyuanVideo15Pipeline, folder)
    expected = video.sample_ode(pipeline, pipeline.schedule(video.STEPS, "diffusers"), 6.0)
    assert pipeline.save_lora(tmp_path, policy.tensors(), policy.config).is_file()
    without = stock_call(pipe, pipeline, 6.0, "latent")
    pipe.transformer.load_lora_adapter(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    torch.testing.assert_close(stock_call(pipe, pipeline, 6.0, "latent"), expected, atol=2e-5, rtol=1e-5)
    assert (without - expected).abs().max() > 1e-2


@pytest.mark.slow
def test_prompts_are_embedded_by_themselves(folder: Path) -> None:
    found = video.check_prompts_are_embedded_by_themselves(tiny(folder), tiny(folder))
    shapes = {"embeds": (3, 16, 24), "mask": (3, 16), "glyphs": (3, 256, 16), "glyph_mask": (3, 256)}
    assert {name: tuple(t.shape) for name, t in found.items()} == shapes


@pytest.mark.slow
def test_clips_go_through_the_autoencoder_one_by_one_and_with_gradient(folder: Path) -> None:
    pipeline, pipe = tiny(folder), fresh_stock(HunyuanVideo15Pipeline, folder)
    assert (pipeline.latent_shape, pipeline.image_shape) == ((4, 2, 2, 3), (5, 3, 32, 48))
    one = video.PROMPTS[:1]
    clip = stock_call(pipe, pipeline, 6.0, "pt", one)
    latents = torch.cat([stock_call(pipe, pipeline, 6.0, "latent", one), start_noise(pipeline)]).requires_grad_()
    clips = pipeline.decode(latents, gradient=True)
    assert_same_sum(clips[:1].detach(), clip)
    assert clips.shape == (3, 5, 3, 32, 48)
    (gradient,) = torch.autograd.grad(clips.square().sum(), latents)
    assert (gradient.abs().amax(dim=(1, 3, 4)) > 0).all()
    raw = torch.cat([pipe.vae.encode(2 * x[None].transpose(1, 2) - 1).latent_dist.mode() for x in clips.detach()])
    assert_same_sum(pipeline.encode_images(clips.detach()), 1.03682 * raw)
    assert tiny(folder, vae_tiling=True).pipe.vae.use_tiling
    with pytest.raises(ValueError, match=r"pipeline\.vae_slice \(2\) must be 1"):
        tiny(folder, vae_slice=2)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("guider/guider_config.json", {"guidance_rescale": 0.7}, r"with \{'guidance_rescale': 0\.7\}"),
        ("guider/guider_config.json", {"stop": 0.5}, r"with \{'stop': 0\.5\}"),
        ("guider/guider_config.json", {"_class_name": "AdaptiveProjectedGuidance"}, "is AdaptiveProjectedGuidance"),
        ("transformer/config.json", {"use_meanflow": True}, "reads a second time"),
        ("transformer/config.json", {"in_channels": 4}, "has in_channels 4, and needed is in_channels 9"),
        ("model_index.json", {"_class_name": "HunyuanVideoPipeline"}, "loads HunyuanVideo15Pipeline"),
    ],
)
def test_what_the_family_does_not_draw_is_refused(
    folder: Path, tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    copied = bare(folder, tmp_path)
    check_targets(FAMILY, copied, "attn.to_w")
    edited(copied / file, **changes)
    with pytest.raises(ValueError, match=message):
        FAMILY.check(str(copied), None)


@pytest.mark.slow
def test_published_sizes() -> None:
    """8.3 billion parameters, 121 frames at 480 x 848 or 720 x 1280, and LoRA targets that bind there."""
    own = []
    for name in published(FAMILY):
        check_published(FAMILY, name, 8.33e9, rel=0.001)
        own.append(FAMILY.planned_size(name, {}))
        check_call(FAMILY, name, Size(height=96, width=96, num_frames=5), 40, (1, 32, 2, 6, 6))
    small, large = (
        Size(height=480, width=848, num_frames=121, fps=24.0),
        Size(height=720, width=1280, num_frames=121, fps=24.0),
    )
    assert own == [small, large, small, large]  # from text, and from a first frame
