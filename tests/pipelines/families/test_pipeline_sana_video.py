"""SANA-Video against stock diffusers: linear attention with rotations, an instruction, two autoencoders."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import video_family as video
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, SanaVideoPipeline
from family_sampling import check_published, check_targets, fresh_stock, load, start_noise
from flow_family import bare, edited, published
from rounding import assert_same_sum
from tiny_sana_video import CHANNELS, OPTIONS, PUBLISHED, save_tiny_sana_video
from torch import Tensor

from flowrl.pipelines.arithmetic.attention import LinearAttention, rotary_linear_attention
from flowrl.pipelines.families.sana_video import FAMILY
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.runtime.private_names import SanaLinearAttnProcessor3_0, sana_instruction
from flowrl.runtime.randomness import counter_normal

NEGATIVE = "jerky"
# The stock scheduler hands a tensor to numpy in a way that numpy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sana_video(tmp_path_factory.mktemp("tiny") / "sana_video")


tiny = partial(load, FAMILY, OPTIONS)
shared = cache(lambda folder, dtype: video.with_lora(tiny(folder, dtype)))


def first_order(folder: Path) -> Any:
    """Stock, whose published solver is the Euler step at order 1."""
    scheduler = DPMSolverMultistepScheduler(**PUBLISHED | {"solver_order": 1})
    return fresh_stock(SanaVideoPipeline, folder, scheduler=scheduler)


def stock_call(pipe: Any, pipeline: FamilyPipeline, scale: float, output: str, **more: Any) -> Tensor:
    frames, _, height, width = pipeline.image_shape
    given = {
        "prompt": video.PROMPTS, "latents": start_noise(pipeline), "guidance_scale": scale, "height": height,
        "width": width, "frames": frames, "num_inference_steps": video.STEPS, "output_type": output,
        "max_sequence_length": OPTIONS["max_sequence_length"], "use_resolution_binning": False,
    } | more  # fmt: skip
    found: Tensor = pipe(**given).frames
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_ode_sampling_equals_stocks_solver_of_order_one(folder: Path, scale: float) -> None:
    pipeline, pipe = tiny(folder), first_order(folder)
    final = video.sample_ode(pipeline, pipeline.schedule(video.STEPS, "diffusers"), scale)
    stock = stock_call(pipe, pipeline, scale, "latent")
    assert_same_sum(final, stock)
    assert (final - start_noise(pipeline)).abs().mean() > 0.1  # the network did something
    clips = stock_call(pipe, pipeline, scale, "pt")
    torch.testing.assert_close(pipeline.decode(final), clips, atol=2e-5, rtol=0)
    assert clips.shape == (2, 5, 3, 32, 64)
    other = stock_call(pipe, pipeline, scale, "latent", complex_human_instruction=None)
    assert (other - stock).abs().max() > 1e-4  # the instruction is read


@pytest.mark.slow
def test_the_autoencoder_of_ltx_2_as_at_720p(tmp_path: Path) -> None:
    folder = save_tiny_sana_video(tmp_path / "later", "ltx2")
    pipeline, pipe = tiny(folder, height=64, num_frames=9), first_order(folder)
    assert (pipeline.latent_shape, pipeline.fps) == ((CHANNELS, 2, 2, 2), 16.0)
    final = video.sample_ode(pipeline, pipeline.schedule(video.STEPS, "diffusers"), 6.0)
    assert_same_sum(final, stock_call(pipe, pipeline, 6.0, "latent"))
    torch.testing.assert_close(pipeline.decode(final), stock_call(pipe, pipeline, 6.0, "pt"), atol=2e-5, rtol=0)
    card = FAMILY.card(str(folder))
    assert card is not None
    assert FAMILY.own_size(card) == Size(height=704, width=1280, num_frames=81, fps=16.0)


@pytest.mark.slow
def test_a_flow_scheduler_in_its_place(folder: Path) -> None:
    """As image to video's, with the published shift: S_8(u) = 8u / (1 + 7u)."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=8.0)
    pipeline, pipe = tiny(folder), fresh_stock(SanaVideoPipeline, folder, scheduler=scheduler)
    pipeline.pipe.scheduler = scheduler
    final = video.sample_ode(pipeline, pipeline.schedule(video.STEPS, "diffusers"), 6.0)
    assert_same_sum(final, stock_call(pipe, pipeline, 6.0, "latent"))
    u = torch.tensor([1, 0.75, 0.5, 0.25, 0])
    torch.testing.assert_close(pipeline.schedule(4, "linspace").sigma, 8 * u / (1 + 7 * u))


# ---- linear attention ------------------------------------------------------------------------------------------------


def attentions(folder: Path, dtype: torch.dtype) -> tuple[Any, tuple[Tensor, Tensor]]:
    """A self-attention with our processor, and rotations of its 2 x 2 x 4 tokens."""
    network = tiny(folder, dtype).denoiser
    rotary = network.rope(torch.zeros(1, CHANNELS, 2, 4, 8))  # type: ignore[operator]
    return network.transformer_blocks[0].attn1, rotary  # type: ignore[index,union-attr]


def test_linear_attention_equals_stock_bit_for_bit_in_float32(folder: Path) -> None:
    module, rotary = attentions(folder, torch.float32)
    assert isinstance(module.processor, LinearAttention)
    x = counter_normal((3, 16, 24), "tokens")
    found = module(x, rotary_emb=rotary)
    module.set_processor(SanaLinearAttnProcessor3_0())
    assert torch.equal(found, module(x, rotary_emb=rotary))
    assert found.abs().mean() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_attention_is_float32_under_autocast(folder: Path, dtype: torch.dtype) -> None:
    _, rotary = attentions(folder, torch.float32)
    query, key, value = (counter_normal((2, 16, 2, 12), "core", name).to(dtype) for name in "qkv")
    query, key = query.relu(), key.relu()
    with torch.autocast("cpu", dtype):
        found = rotary_linear_attention(query, key, value, rotary)
    wanted = rotary_linear_attention(query, key, value.float(), rotary)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_prompts_are_read_as_stock_reads_them(folder: Path) -> None:
    """Behind the instruction of videos and with a motion score as its callers add it; negative ones alone."""
    pipe = first_order(folder)
    instruction = sana_instruction("SanaVideoPipeline")
    assert "video generation" in instruction[0]
    assert instruction != sana_instruction()

    def embedded(texts: list[str], lines: list[str] | None) -> tuple[Tensor, Tensor]:
        positive, mask, negative, negative_mask = pipe.encode_prompt(
            texts, negative_prompt=NEGATIVE, complex_human_instruction=lines,
            max_sequence_length=OPTIONS["max_sequence_length"],
        )  # fmt: skip
        against.update(embeds=negative, mask=negative_mask)
        return positive, mask

    against: dict[str, Tensor] = {}
    scored = [f"{prompt} motion score: 30." for prompt in video.PROMPTS]
    cases: list[tuple[list[str], list[str] | None, dict[str, Any]]] = [
        (video.PROMPTS, instruction, {}),
        (scored, instruction, {"motion_score": 30}),
        (scored, None, {"motion_score": 30, "instruction": False}),
    ]
    for texts, lines, options in cases:
        pipeline = tiny(folder, negative_prompt=NEGATIVE, **options)
        found, (embeds, mask) = pipeline.encode(video.PROMPTS).tensors, embedded(texts, lines)
        assert_same_sum(found["embeds"], embeds)
        assert torch.equal(found["mask"], mask)
        alone = pipeline.encode([NEGATIVE, NEGATIVE]).tensors
        assert_same_sum(alone["embeds"], against["embeds"])
        assert torch.equal(alone["mask"], against["mask"])
    final = video.sample_ode(tiny(folder, motion_score=30), pipeline.schedule(video.STEPS, "diffusers"), 6.0)
    assert_same_sum(final, stock_call(pipe, pipeline, 6.0, "latent", prompt=scored))


@pytest.mark.slow
def test_prompts_are_embedded_by_themselves(folder: Path) -> None:
    video.check_prompts_are_embedded_by_themselves(tiny(folder), tiny(folder))


# ---- the ratio is exactly 1, LoRA, the autoencoder -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "dtype"), [(1.0, torch.float32), (6.0, torch.bfloat16)], ids=str)
def test_replayed_log_probs_equal_the_rollouts(folder: Path, scale: float, dtype: torch.dtype) -> None:
    pipeline, policy = shared(folder, dtype)
    video.check_ratio_is_one(pipeline, policy, scale)


@pytest.mark.slow
def test_replayed_log_probs_equal_with_recomputed_blocks(folder: Path) -> None:
    pipeline, policy = video.with_lora(tiny(folder, torch.bfloat16, gradient_checkpointing=True))
    video.check_ratio_is_one(pipeline, policy, 6.0, kernel="cps")


@pytest.mark.slow
def test_stock_loads_the_saved_lora(folder: Path, tmp_path: Path) -> None:
    pipe = first_order(folder)
    video.check_stock_loads_the_saved_lora(*shared(folder, torch.float32), tmp_path, pipe, stock_call, 6.0)


@pytest.mark.slow
def test_clips_go_through_the_autoencoder_in_slices_and_with_gradient(folder: Path) -> None:
    pipeline, sliced = tiny(folder, vae_slice=3), tiny(folder, vae_slice=1)
    assert (pipeline.latent_shape, pipeline.image_shape) == ((CHANNELS, 2, 4, 8), (5, 3, 32, 64))
    config = pipeline.pipe.vae.config
    mean, std = (torch.tensor(part).view(1, -1, 1, 1, 1) for part in (config.latents_mean, config.latents_std))
    video.check_autoencoder(pipeline, sliced, lambda raw: (raw - mean) / std)
    assert pipeline.resized(64, 32).latent_shape == (CHANNELS, 2, 8, 4)


# ---- refusals, published dimensions ----------------------------------------------------------------------------------


def test_what_the_family_cannot_do_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_frames \(4\) must be 1 plus a multiple of 4"):
        tiny(folder, num_frames=4)
    with pytest.raises(ValueError, match=r"pipeline\.width \(48\) must be a multiple of 32"):
        tiny(folder, width=48)
    with pytest.raises(ValueError, match=r"motion_score \(-1\) must be at least 0"):
        tiny(folder, motion_score=-1)
    copied = bare(folder, tmp_path)
    check_targets(FAMILY, copied, "attn1.to_w")
    config, index = copied / "transformer" / "config.json", copied / "model_index.json"
    edited(config, guidance_embeds=True)
    with pytest.raises(ValueError, match="takes the guidance scale as an input"):
        FAMILY.check(str(copied), None)
    edited(config, guidance_embeds=False, out_channels=2 * CHANNELS)
    with pytest.raises(ValueError, match="gives 8 channels for latents of 4"):
        FAMILY.check(str(copied), None)
    edited(config, out_channels=CHANNELS)
    edited(index, vae=["diffusers", "AutoencoderDC"])
    with pytest.raises(ValueError, match="AutoencoderDC, which decodes images alone"):
        FAMILY.check(str(copied), None)
    edited(index, _class_name="SanaPipeline")
    with pytest.raises(ValueError, match=r"is a SanaPipeline, and pipeline\.name=sana_video loads"):
        FAMILY.check(str(copied), None)


@pytest.mark.slow
def test_published_size() -> None:
    """As counted once ("2B"), and LoRA targets that bind there."""
    (name,) = published(FAMILY)
    check_published(FAMILY, name, 2_056_862_144)
