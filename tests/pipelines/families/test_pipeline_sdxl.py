"""Stable Diffusion XL in flow coordinates against stock diffusers, and the replay of its rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from family_sampling import check_targets, fresh_stock, start_noise
from flow_family import bare, edited, published
from rounding import assert_same_sum
from tiny_sd import (
    PROMPTS,
    assert_same,
    check_autoencoder,
    check_lora_binds,
    check_replay,
    check_stock_loads_the_saved_lora,
    sample_ode,
    save_tiny_sdxl,
)
from torch import Tensor

from flowrl.pipelines.families.sdxl import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline

STEPS = 3
# The stock scheduler hands a tensor to numpy in a way that numpy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sdxl(tmp_path_factory.mktemp("sdxl"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> FamilyPipeline:
    """For tests that leave it as it was."""
    return FAMILY.load(str(folder), dtype=torch.float32)


def stock(folder: Path) -> Any:
    """The stock pipeline with its own scheduler: Euler steps in another scale of the latents, which are DDIM's."""
    return fresh_stock(StableDiffusionXLPipeline, folder, add_watermarker=False)


def drawn(pipe: Any, latents: Tensor, scale: float, output: str = "latent", **more: Any) -> Tensor:
    return pipe(
        prompt=PROMPTS, latents=latents.clone(), guidance_scale=scale, num_inference_steps=STEPS, output_type=output,
        **more,
    ).images  # fmt: skip


# ---- the same images as stock diffusers ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("negative", [None, "a green star"], ids=["none", "explicit"])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_ode_sampling_equals_the_stock_pipeline(
    folder: Path, shared: FamilyPipeline, scale: float, negative: str | None
) -> None:
    """Without a negative prompt stock guides away from zeros, with one from its embeddings."""
    schedule, start = shared.schedule(STEPS, "diffusers"), start_noise(shared, 2)
    final = sample_ode(shared, scale, schedule, negative=negative or "")
    given: dict[str, Any] = {} if negative is None else {"negative_prompt": [negative] * 2}
    pipe = stock(folder)
    assert_same(final, drawn(pipe, start, scale, **given))
    assert_same_sum(shared.decode(final), drawn(pipe, start, scale, "pt", **given))


@pytest.mark.slow
def test_the_drawn_size_is_told_to_the_network(folder: Path, shared: FamilyPipeline) -> None:
    wide = shared.resized(64, 32)
    assert (wide.latent_shape, wide.image_shape, shared.latent_shape) == ((4, 8, 4), (3, 64, 32), (4, 8, 8))
    final = sample_ode(wide, 1.0, wide.schedule(STEPS, "diffusers"))
    assert_same(final, drawn(stock(folder), start_noise(wide, 2), 1.0, height=64, width=32))
    x, cond, timestep = start_noise(wide, 2), wide.encode(PROMPTS), torch.tensor([500.0, 500.0])
    with torch.no_grad():
        told = wide.network(x, timestep, cond)
        wide.positions = shared.positions
        assert (wide.network(x, timestep, cond) - told).abs().max() > 1e-3


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_encode_equals_stock_and_the_empty_prompt_is_zeros(folder: Path, shared: FamilyPipeline) -> None:
    embeds, negative, pooled, negative_pooled = stock(folder).encode_prompt(PROMPTS)
    found, empty = shared.encode(PROMPTS).tensors, shared.encode(["", ""]).tensors
    assert_same_sum(found["embeds"], embeds)
    assert_same_sum(found["pooled"], pooled)
    assert torch.equal(empty["embeds"], negative)
    assert torch.equal(empty["pooled"], negative_pooled)
    assert float(empty["embeds"].abs().sum() + empty["pooled"].abs().sum()) == 0


@pytest.mark.slow
def test_the_empty_prompt_is_embedded_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    folder = save_tiny_sdxl(tmp_path, force_zeros=False)
    _, negative, _, negative_pooled = stock(folder).encode_prompt(PROMPTS)
    pipeline = FAMILY.load(str(folder), dtype=torch.float32)
    empty = pipeline.encode(["", ""]).tensors
    assert_same_sum(empty["embeds"], negative)
    assert_same_sum(empty["pooled"], negative_pooled)
    assert float(empty["embeds"].abs().sum()) > 0
    pipeline.free_text_encoders()
    assert pipeline.pipe.text_encoder is pipeline.pipe.text_encoder_2 is None
    assert torch.equal(pipeline.encode([""]).tensors["pooled"], empty["pooled"][:1])


# ---- the ratio is exactly 1, LoRA ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "checkpointed"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_replayed_log_probs_equal_the_rollouts(folder: Path, dtype: torch.dtype, checkpointed: bool) -> None:
    pipeline = FAMILY.load(str(folder), dtype=dtype, gradient_checkpointing=checkpointed)
    check_replay(pipeline, "ddim_flow", 5.0)


@pytest.mark.slow
def test_stock_loads_the_saved_lora(folder: Path, tmp_path: Path) -> None:
    pipeline = FAMILY.load(str(folder), dtype=torch.float32)
    pipe = stock(folder)
    check_stock_loads_the_saved_lora(pipeline, tmp_path, pipe, drawn, 5.0, STEPS)


def test_images_are_encoded_as_decode_undoes_it(shared: FamilyPipeline) -> None:
    check_autoencoder(shared)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_check_refuses_what_cannot_be_trained_before_weights_load(
    folder: Path, shared: FamilyPipeline, tmp_path: Path
) -> None:
    copied = bare(folder, tmp_path)
    check_targets(FAMILY, copied, "to_qq")
    edited(copied / "model_index.json", _class_name="StableDiffusionPipeline")
    with pytest.raises(ValueError, match=r"is a StableDiffusionPipeline, and .*sdxl loads StableDiffusionXLPipeline"):
        FAMILY.check(str(copied), None)
    with pytest.raises(ValueError, match=r"always have 16 tokens, got max_sequence_length 77"):
        FAMILY.load(str(folder), max_sequence_length=77)
    with pytest.raises(ValueError, match="no shift"):
        shared.schedule(4, "diffusers", 2.0)


@pytest.mark.slow
def test_lora_binds_to_the_real_network() -> None:
    """Seventy transformer blocks: 2 x 2 and 2 x 10 down, 10 in the middle, 3 x 10 and 3 x 2 up."""
    (model,) = published(FAMILY)
    check_lora_binds(FAMILY, model, 2_567_463_684, 70 * 2 * 4)
