"""Random Stable Diffusion 1, 2 and XL pipelines of a few ten thousand parameters, and how they are sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from family_sampling import adapted, check_published, idle_tensors, replayed, sample, start_noise
from rounding import assert_same_sum
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from flowrl.pipelines import ModelFamily, Pipeline
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.lora import Policy
from flowrl.pipelines.weights.lora_files import read_lora
from flowrl.pretraining.tiny_sd3 import CONTEXT, clip_tokenizer
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import Velocity
from flowrl.trajectory import Schedule

PROMPTS = ["a photo of a red circle", "two blue squares"]
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def _text_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, projection_dim=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=CONTEXT, hidden_act="quick_gelu",
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=4, sample_size=64, layers_per_block=1, norm_num_groups=8,
        block_out_channels=(8, 8, 16, 16), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, mid_block_add_attention=False, scaling_factor=0.18215,
    )  # fmt: skip


UNET: dict[str, Any] = {
    "sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "block_out_channels": (16, 32),
    "norm_num_groups": 8, "attention_head_dim": 2, "down_block_types": ("CrossAttnDownBlock2D",) * 2,
    "up_block_types": ("CrossAttnUpBlock2D",) * 2,
}  # fmt: skip


def save_tiny_sd(folder: Path, **scheduler: Any) -> Path:
    """Stable Diffusion 1 with the published scheduler's class and settings, or others of it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = clip_tokenizer()
        pipe = StableDiffusionPipeline(
            vae=_vae(), text_encoder=CLIPTextModel(_text_config(tokenizer)), tokenizer=tokenizer,
            unet=UNet2DConditionModel(**UNET, cross_attention_dim=16),
            scheduler=PNDMScheduler(**{**NOISE, "skip_prk_steps": True, "set_alpha_to_one": False} | scheduler),
            safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        )  # fmt: skip
    pipe.save_pretrained(folder)
    return folder


def save_tiny_sdxl(folder: Path, *, force_zeros: bool = True) -> Path:
    """Stable Diffusion XL with the published scheduler's class and settings."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = clip_tokenizer()
        config = _text_config(tokenizer)
        pipe = StableDiffusionXLPipeline(
            vae=_vae(), text_encoder=CLIPTextModel(config), text_encoder_2=CLIPTextModelWithProjection(config),
            tokenizer=tokenizer, tokenizer_2=tokenizer,
            scheduler=EulerDiscreteScheduler(**NOISE, timestep_spacing="leading"),
            unet=UNet2DConditionModel(
                **UNET, cross_attention_dim=32, transformer_layers_per_block=(1, 2), use_linear_projection=True,
                addition_embed_type="text_time", addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=6 * 8 + 16,
            ),
            force_zeros_for_empty_prompt=force_zeros, add_watermarker=False,
        )  # fmt: skip
    pipe.save_pretrained(folder)
    return folder


# ---- sampling, for any family ----------------------------------------------------------------------------------------


def guided(pipeline: Pipeline, prompts: list[str], scale: float, negative: str = "") -> Velocity:
    """The velocity of some prompts, guided as the family does."""
    against = pipeline.encode([negative] * len(prompts)) if pipeline.passes(scale) == 2 else None
    return pipeline.guided(pipeline.network, pipeline.encode(prompts), against, scale)


def sample_ode(pipeline: Pipeline, scale: float, schedule: Schedule, **options: Any) -> Tensor:
    """Finished latents of the two prompts without any noise on the way."""
    velocity = guided(pipeline, PROMPTS, scale, options.pop("negative", ""))
    return sample(pipeline, velocity, schedule, len(PROMPTS), **options)


def check_replay(pipeline: Pipeline, kernel: str, scale: float, *, gradients: bool = True) -> None:
    """A new LoRA's log-densities equal those of the rollout bit for bit, and a guided loss reaches every tensor."""
    policy = adapted(pipeline)
    assert replayed(pipeline, guided(pipeline, PROMPTS, scale), len(PROMPTS), 3, kernel).requires_grad
    if gradients:
        x, schedule = start_noise(pipeline), pipeline.schedule(4, "diffusers")
        output = guided(pipeline, PROMPTS, 4.0)(x, schedule.sigma[1], schedule.timestep[1])
        assert not idle_tensors(policy, output.square().sum())


def assert_same(found: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> None:
    """Equal up to float32 rounding: random networks leave latents of up to 40, so it counts from the largest."""
    assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


def check_stock_loads_the_saved_lora(
    pipeline: FamilyPipeline, folder: Path, pipe: Any, drawn: Callable[..., Tensor], scale: float, num_steps: int
) -> Policy:
    """A new LoRA, saved to a folder, makes the stock pipeline draw as ours does."""
    policy, start = adapted(pipeline), start_noise(pipeline)
    pipeline.save_lora(folder, policy.tensors(), policy.config)
    before = drawn(pipe, start, scale)
    pipe.load_lora_weights(folder)
    after = drawn(pipe, start, scale)
    assert (after - before).abs().max() > 1e-2
    assert_same(sample_ode(pipeline, scale, pipeline.schedule(num_steps, "diffusers")), after, 1e-5)
    lora = read_lora(folder)
    assert lora.alpha == 4
    tensors = lora.tensors
    assert tensors.keys() == {name.replace(".default.", ".") for name in policy.tensors()}
    assert all(torch.equal(tensors[name.replace(".default.", ".")], t) for name, t in policy.tensors().items())
    return policy


def check_autoencoder(
    pipeline: FamilyPipeline, mean_of: Callable[[Any], Tensor] = lambda encoded: encoded.latent_dist.mean
) -> None:
    """Images are encoded as the posterior's mean, scaled, and decoding undoes it."""
    images = counter_normal((3, 3, 64, 64), "pictures").sigmoid()
    latents, vae = pipeline.encode_images(images), pipeline.pipe.vae
    with torch.no_grad():
        mean = mean_of(vae.encode(2 * images - 1))
        torch.testing.assert_close(latents, mean * vae.config.scaling_factor, atol=1e-6, rtol=1e-5)
        wanted = (vae.decode(mean).sample / 2 + 0.5).clamp(0, 1)
        assert_same_sum(pipeline.decode(latents), wanted)
    asking = latents.requires_grad_()
    assert not pipeline.decode(asking).requires_grad
    assert pipeline.decode(asking, gradient=True).requires_grad


def check_lora_binds(family: ModelFamily, model: str, parameters: int, projections: int) -> None:
    """A published checkpoint has its number of parameters, and the LoRA targets bind to so many layers."""
    network = check_published(family, model, parameters)
    assert len([name for name, _ in network.named_modules() if name.endswith(family.lora_targets)]) == projections
