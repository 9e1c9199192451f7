"""Stable Diffusion 3.5 Large, its Turbo, and the second attention of Medium, on the family of Stable Diffusion 3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from family_sampling import adapted, check_call, fresh_stock, start_noise
from flow_family import check_replay
from rounding import assert_same_sum
from tiny_flux import check_published_with_lora, check_stock_draws_with_the_saved_lora
from tiny_models import PROMPTS
from tiny_models import sample_ode as sampled
from torch import Tensor

from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.places.known_checkpoints import usual_sampling
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pretraining.tiny_sd3 import CONTEXT, build_tiny_sd3

MEDIUM, LARGE = "stabilityai/stable-diffusion-3.5-medium", "stabilityai/stable-diffusion-3.5-large"
TURBO = "stabilityai/stable-diffusion-3.5-large-turbo"


def save(folder: Path, dual: list[int]) -> Path:
    """Three blocks, and a second attention in some; stronger weights, so that it is seen."""
    pipe = build_tiny_sd3(0, width=32, num_layers=3, vae_channels=(8, 8, 16, 16))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = {name: value for name, value in pipe.transformer.config.items() if not name.startswith("_")}
        network = SD3Transformer2DModel(**{**config, "dual_attention_layers": tuple(dual)})
        for parameter in network.parameters():
            parameter.data.mul_(2.0) if parameter.ndim == 2 else None
    pipe.register_modules(transformer=network)
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("sd35") / "medium", [0, 1])


@pytest.fixture(scope="module")
def turbo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("sd35") / "tiny-large-turbo", [])


def load(folder: Path, dtype: torch.dtype = torch.float32) -> FamilyPipeline:
    return FAMILY.load(str(folder), dtype=dtype, max_sequence_length=CONTEXT)


def stock_call(folder: Path, latents: Tensor, scale: float, steps: int, **lora: Path) -> Tensor:
    pipe = fresh_stock(StableDiffusion3Pipeline, folder, **lora)
    drawn: Tensor = pipe(
        prompt=PROMPTS[:2], negative_prompt=[""] * 2, latents=latents.clone(), guidance_scale=scale,
        num_inference_steps=steps, max_sequence_length=CONTEXT, output_type="latent",
    ).images  # fmt: skip
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_blocks_with_a_second_attention_draw_what_stock_draws(medium: Path, scale: float) -> None:
    pipeline = load(medium)
    blocks = [pipeline.denoiser.get_submodule(f"transformer_blocks.{place}") for place in range(3)]
    assert [block.attn2 is not None for block in blocks] == [True, True, False]
    final = sampled(pipeline, PROMPTS[:2], scale, 4)
    wanted = stock_call(medium, start_noise(pipeline), scale, 4)
    assert_same_sum(final, wanted)
    assert (final - start_noise(pipeline)).abs().mean() > 0.1  # the network did something


@pytest.mark.slow
def test_turbo_draws_in_four_steps_what_stock_draws_at_its_scale_zero(turbo: Path) -> None:
    pipeline = load(turbo)
    assert pipeline.passes(1.0) == 1
    wanted = stock_call(turbo, start_noise(pipeline), 0.0, 4)
    assert_same_sum(sampled(pipeline, PROMPTS[:2], 1.0, 4), wanted)
    levels = [1.0, 0.9, 0.75, 0.5, 0.0]  # 3 s / (1 + 2 s) of 1, 3/4, 1/2 and 1/4
    assert pipeline.schedule(4, "linspace").sigma.tolist() == pytest.approx(levels, abs=1e-6)


@pytest.mark.slow
def test_guidance_and_stocks_word_for_none_are_refused_for_turbo(turbo: Path, medium: Path) -> None:
    pipeline = load(turbo)
    cond, negative = pipeline.encode(PROMPTS[:1]), pipeline.encode([""])
    for scale in (0.0, 2.0):
        said = rf"without guidance, which is scale 1 .* got scale {scale:g}: set sampler\.guidance"
        with pytest.raises(ValueError, match=said):
            pipeline.guided(pipeline.network, cond, negative, scale)
    pipeline.guided(pipeline.network, cond, negative, 1.0)
    load(medium).guided(pipeline.network, cond, negative, 0.5)  # between both prompts, as in any other checkpoint
    assert usual_sampling("sd3", TURBO) == {"num_steps": 4, "guidance_scale": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_ratio_is_one_and_every_target_learns(medium: Path, dtype: torch.dtype) -> None:
    """But for the prompt's side of the last block, which nothing reads."""
    pipeline = load(medium, dtype)
    cond, negative = pipeline.encode(PROMPTS[:2]), pipeline.encode([""])
    idle = check_replay(pipeline, adapted(pipeline), cond, negative, 3.5)
    assert {name.split(".attn.")[0] for name in idle} <= {"transformer_blocks.2"}
    assert all("add_q_proj" in name or "to_add_out" in name for name in idle)


@pytest.mark.slow
def test_a_saved_lora_draws_the_same_in_stock_diffusers(medium: Path, tmp_path: Path) -> None:
    pipeline = load(medium)
    check_stock_draws_with_the_saved_lora(
        pipeline,
        tmp_path,
        lambda: sampled(pipeline, PROMPTS[:2], 3.5, 4),
        lambda: stock_call(medium, start_noise(pipeline), 3.5, 4, lora=tmp_path),
    )


def test_the_second_attention_can_be_trained_where_there_is_one() -> None:
    FAMILY.check(MEDIUM, [*FAMILY.lora_targets, "attn2.to_q"])
    for model in (LARGE, TURBO):
        with pytest.raises(ValueError, match=r"'attn2\.to_q' matches no linear layer"):
            FAMILY.check(model, [*FAMILY.lora_targets, "attn2.to_q"])


@pytest.mark.slow
@pytest.mark.parametrize("model", [LARGE, TURBO])
def test_the_real_network_and_its_lora(model: str) -> None:
    """8.06 billion numbers; joint attention of 38 blocks of width 2432, the last one without an output for the text."""
    check_published_with_lora(FAMILY, model, 8_056_627_520, 2 * 2432 * (38 * 8 - 1))


@pytest.mark.slow
@pytest.mark.parametrize("model", [MEDIUM, LARGE])
def test_the_real_network_is_called_as_planned(model: str) -> None:
    size = FAMILY.planned_size(model, {"height": 512, "width": 768})
    assert size is not None
    check_call(FAMILY, model, size, FAMILY.text_tokens(model, {}), (1, 16, 64, 96))
