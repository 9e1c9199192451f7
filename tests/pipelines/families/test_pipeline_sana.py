"""Sana against stock diffusers, and the replay of its rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, SanaPipeline
from diffusers.models.attention_processor import Attention, SanaLinearAttnProcessor2_0
from family_sampling import check_targets, fresh_stock, start_noise
from flow_family import bare, edited
from rounding import assert_same_sum
from tiny_sana import PUBLISHED, save_tiny_sana
from tiny_sd import (
    PROMPTS,
    check_autoencoder,
    check_lora_binds,
    check_replay,
    check_stock_loads_the_saved_lora,
    sample_ode,
)
from torch import Tensor

from flowrl.pipelines.arithmetic.attention import LinearAttention, linear_attention
from flowrl.pipelines.families.sana import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.runtime.private_names import sana_instruction
from flowrl.runtime.randomness import counter_normal

STEPS, CONTEXT = 5, 40
# The stock scheduler hands a tensor to numpy in a way that numpy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sana(tmp_path_factory.mktemp("sana"))


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> FamilyPipeline:
    return FAMILY.load(str(folder), dtype=dtype, max_sequence_length=CONTEXT, **options)


@pytest.fixture(scope="module")
def shared(folder: Path) -> FamilyPipeline:
    """For tests that leave it as it was."""
    return loaded(folder)


def stock(folder: Path, scheduler: Any) -> Any:
    return fresh_stock(SanaPipeline, folder, scheduler=scheduler)


def drawn(pipe: Any, latents: Tensor, scale: float, output: str = "latent", **more: Any) -> Tensor:
    size = {"height": 64, "width": 64, "num_inference_steps": STEPS, "output_type": output} | more
    return pipe(
        prompt=PROMPTS, latents=latents.clone(), guidance_scale=scale, max_sequence_length=CONTEXT,
        use_resolution_binning=False, **size,
    ).images  # fmt: skip


# ---- the same images as stock diffusers ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_ode_sampling_equals_stocks_solver_of_order_one(folder: Path, shared: FamilyPipeline, scale: float) -> None:
    """DPM-Solver++ of order 1 is the Euler step; noise levels, timesteps and instruction are the published ones."""
    pipe, start = stock(folder, DPMSolverMultistepScheduler(**PUBLISHED | {"solver_order": 1})), start_noise(shared, 2)
    final = sample_ode(shared, scale, shared.schedule(STEPS, "diffusers"))
    wanted = drawn(pipe, start, scale)
    assert_same_sum(final, wanted)
    assert_same_sum(shared.decode(final), drawn(pipe, start, scale, "pt"))
    assert (wanted - start).abs().mean() > 0.1


@pytest.mark.slow
def test_solver_dpm2_equals_the_published_scheduler(folder: Path, shared: FamilyPipeline) -> None:
    final = sample_ode(shared, 4.5, shared.schedule(STEPS, "diffusers"), solver="dpm2")
    wanted = drawn(stock(folder, DPMSolverMultistepScheduler(**PUBLISHED)), start_noise(shared, 2), 4.5)
    assert_same_sum(final, wanted)


@pytest.mark.slow
def test_grid_linspace_is_shifted_once(folder: Path, shared: FamilyPipeline) -> None:
    """S_3(u) = 3u / (1 + 2u), as a flow-matching scheduler with explicit sigmas has it."""
    schedule = shared.schedule(STEPS, "linspace")
    torch.testing.assert_close(schedule.sigma, torch.tensor([1, 12 / 13, 9 / 11, 2 / 3, 3 / 7, 0]))
    sigmas = [1 - i / STEPS for i in range(STEPS)]
    pipe = stock(folder, FlowMatchEulerDiscreteScheduler(shift=3.0))
    wanted = drawn(pipe, start_noise(shared, 2), 4.5, sigmas=sigmas)
    assert_same_sum(sample_ode(shared, 4.5, schedule), wanted)


@pytest.mark.parametrize("num_steps", [1, 5, 20, 28])
def test_schedule_is_the_published_schedulers(shared: FamilyPipeline, num_steps: int) -> None:
    scheduler = DPMSolverMultistepScheduler(**PUBLISHED)
    scheduler.set_timesteps(num_steps)
    schedule = shared.schedule(num_steps, "diffusers")
    torch.testing.assert_close(schedule.sigma, scheduler.sigmas.float(), atol=1e-6, rtol=0)
    assert schedule.timestep.tolist() == scheduler.timesteps.tolist()
    other = DPMSolverMultistepScheduler(**PUBLISHED | {"flow_shift": 2.0})
    other.set_timesteps(num_steps)
    shifted = shared.schedule(num_steps, "diffusers", 2.0)
    torch.testing.assert_close(shifted.sigma, other.sigmas.float(), atol=1e-6, rtol=0)
    assert shared.schedule(2, "linspace", 1.0).sigma.tolist() == [1.0, 0.5, 0.0]


@pytest.mark.slow
def test_images_that_are_not_square(folder: Path, shared: FamilyPipeline) -> None:
    wide = shared.resized(64, 32)
    assert (wide.latent_shape, wide.image_shape, shared.latent_shape) == ((4, 8, 4), (3, 64, 32), (4, 8, 8))
    images = wide.decode(sample_ode(wide, 1.0, wide.schedule(STEPS, "diffusers")))
    pipe = stock(folder, DPMSolverMultistepScheduler(**PUBLISHED | {"solver_order": 1}))
    assert_same_sum(images, drawn(pipe, start_noise(wide, 2), 1.0, "pt", width=32))


# ---- linear attention ------------------------------------------------------------------------------------------------


def attention(dtype: torch.dtype, norm: str | None = None) -> Attention:
    """Stock's own, of two heads, at random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Attention(
            query_dim=16,
            heads=2,
            kv_heads=2,
            dim_head=8,
            bias=False,
            qk_norm=norm,
            processor=SanaLinearAttnProcessor2_0(),
        )
    return module.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("norm", [None, "rms_norm_across_heads"])
def test_linear_attention_equals_stock_bit_for_bit_in_float32(norm: str | None) -> None:
    module, x = attention(torch.float32, norm), counter_normal((3, 9, 16), "tokens")
    wanted = module(x)
    module.set_processor(LinearAttention())
    assert torch.equal(module(x), wanted)
    assert wanted.abs().mean() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_attention_is_float32_under_autocast(dtype: torch.dtype) -> None:
    query, key, value = (counter_normal((2, 2, 8, 300), "core", name).to(dtype) for name in "qkv")
    query, key = query.relu(), key.relu()
    with torch.autocast("cpu", dtype):
        found = linear_attention(query, key, value)
    q, k, v = (part.double() for part in (query, key, value))
    weights = torch.einsum("bhdi,bhdj->bhij", q, k)
    wanted = torch.einsum("bhij,bhej->bhei", weights, v) / (weights.sum(-1)[:, :, None] + 1e-15)  # 0 where a query is 0
    assert found.dtype == torch.float32
    assert_same_sum(found, wanted.float())


def test_large_activations_stay_finite_in_float16_where_stock_has_none() -> None:
    module, x = attention(torch.float16), 60 * counter_normal((1, 600, 16), "tokens").half()
    with torch.autocast("cpu", torch.float16):
        assert not module(x).isfinite().all()
        module.set_processor(LinearAttention())
        found = module(x)
    torch.testing.assert_close(found.float(), module.float()(x.float()), atol=0.1, rtol=0.01)


def test_every_linear_attention_of_a_loaded_pipeline_is_ours(shared: FamilyPipeline) -> None:
    found = [block.attn1.processor for block in shared.pipe.transformer.transformer_blocks]
    assert [type(processor) for processor in found] == [LinearAttention] * 2
    assert not isinstance(shared.pipe.transformer.transformer_blocks[0].attn2.processor, LinearAttention)


# ---- prompts and images ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_encode_reads_the_instruction_before_prompts_and_not_before_the_empty_one(
    folder: Path, shared: FamilyPipeline
) -> None:
    pipe = stock(folder, DPMSolverMultistepScheduler(**PUBLISHED))
    embeds, mask, negative, negative_mask = pipe.encode_prompt(
        PROMPTS, max_sequence_length=CONTEXT, complex_human_instruction=sana_instruction()
    )
    found, empty = shared.encode(PROMPTS).tensors, shared.encode(["", ""]).tensors
    assert_same_sum(found["embeds"], embeds)
    assert_same_sum(empty["embeds"], negative)
    assert torch.equal(found["mask"], mask)
    assert torch.equal(empty["mask"], negative_mask)
    assert found["embeds"].shape == (2, CONTEXT, 16)
    assert 0 < int(empty["mask"][0].sum()) < int(found["mask"][1].sum()) < CONTEXT
    plain = loaded(folder, instruction=False)
    without, _, _, _ = pipe.encode_prompt(PROMPTS, max_sequence_length=CONTEXT)
    assert_same_sum(plain.encode(PROMPTS).tensors["embeds"], without)
    assert (without - embeds).abs().max() > 1e-2
    assert len(sana_instruction()) > 1
    plain.free_text_encoders()
    assert plain.pipe.text_encoder is None
    with pytest.raises(ValueError, match="was not encoded"):
        plain.encode(["three stars"])


@pytest.mark.slow
def test_gemma_keeps_its_range_where_the_network_runs_in_float16(folder: Path) -> None:
    pipeline = loaded(folder, torch.float16)
    assert pipeline.pipe.text_encoder.dtype == torch.bfloat16
    assert pipeline.denoiser.dtype == pipeline.encode(PROMPTS).tensors["embeds"].dtype == torch.float16


def test_images_are_encoded_as_decode_undoes_it(shared: FamilyPipeline) -> None:
    check_autoencoder(shared, lambda encoded: encoded.latent)


# ---- the ratio is exactly 1, LoRA ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "flow_sde"), (torch.bfloat16, "cps")], ids=str)
def test_replayed_log_probs_equal_the_rollouts(folder: Path, dtype: torch.dtype, kernel: str) -> None:
    pipeline = loaded(folder, dtype, gradient_checkpointing=kernel == "cps")
    check_replay(pipeline, kernel, 4.5)


@pytest.mark.slow
def test_stock_loads_the_saved_lora(folder: Path, tmp_path: Path) -> None:
    pipeline = loaded(folder)
    pipe = stock(folder, DPMSolverMultistepScheduler(**PUBLISHED | {"solver_order": 1}))
    check_stock_loads_the_saved_lora(pipeline, tmp_path, pipe, drawn, 4.5, STEPS)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_check_refuses_what_cannot_be_trained_before_weights_load(folder: Path, tmp_path: Path) -> None:
    copied = bare(folder, tmp_path)
    check_targets(FAMILY, copied, "to_qq")
    edited(copied / "transformer" / "config.json", guidance_embeds=True)
    with pytest.raises(ValueError, match=r"guidance_embeds\): it is distilled"):
        FAMILY.check(str(copied), None)
    edited(copied / "model_index.json", _class_name="SanaSprintPipeline")
    with pytest.raises(ValueError, match=r"is a SanaSprintPipeline, and .*sana loads SanaPipeline"):
        FAMILY.check(str(copied), None)
    with pytest.raises(ValueError, match=r"pipeline\.width \(40\) must be a multiple of 32"):
        FAMILY.load(str(folder), width=40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parameters", "blocks"),
    [
        ("Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", 1_604_462_752, 20),
        ("Efficient-Large-Model/Sana_600M_512px_diffusers", 591_747_872, 28),
    ],
)
def test_lora_binds_to_the_real_network(model: str, parameters: int, blocks: int) -> None:
    check_lora_binds(FAMILY, model, parameters, blocks * 2 * 4)
