"""Random Stable Diffusion 1, 2 and XL pipelines of a few ten thousand parameters, and how they are sampled."""

from __future__ import annotations

from dataclasses import replace
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
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from flowrl.pipelines import Pipeline
from flowrl.pipelines.lora import Policy
from flowrl.pretrain.tiny_sd3 import CONTEXT, clip_tokenizer
from flowrl.randomness import counter_normal
from flowrl.samplers import KERNELS, Velocity, gaussian_log_prob, rollout
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


def start_noise(pipeline: Pipeline, b: int) -> Tensor:
    """Standard normal `[b, *latent]`, always the same."""
    return counter_normal((b, *pipeline.latent_shape), "start")


def guided(pipeline: Pipeline, prompts: list[str], scale: float, negative: str = "") -> Velocity:
    """The velocity of some prompts, guided as the family does."""
    against = pipeline.encode([negative] * len(prompts)) if pipeline.passes(scale) == 2 else None
    return pipeline.guided(pipeline.network, pipeline.encode(prompts), against, scale)


@torch.no_grad()
def sample_ode(pipeline: Pipeline, scale: float, schedule: Schedule, **options: Any) -> Tensor:
    """Finished latents of the two prompts without any noise on the way."""
    velocity = guided(pipeline, PROMPTS, scale, options.pop("negative", ""))
    x = start_noise(pipeline, len(PROMPTS))
    return rollout(velocity, x, schedule, KERNELS["ode"], lambda step: x, stochastic=(), **options).final


def assert_replay_gives_ratio_one(pipeline: Pipeline, kernel: str, scale: float, num_steps: int = 3) -> None:
    """Log-densities of a replay equal those of the rollout bit for bit, and the replay carries gradient."""
    schedule = pipeline.schedule(num_steps, "diffusers")
    step_rule = replace(KERNELS[kernel], sigma_max=schedule.sigma_max)
    velocity, x = guided(pipeline, PROMPTS, scale), start_noise(pipeline, len(PROMPTS))
    with torch.no_grad():
        trajectory = rollout(
            velocity, x, schedule, step_rule, lambda step: counter_normal(x.shape, "step", step),
            stochastic=range(num_steps - 1),
        )  # fmt: skip
    for k, step in enumerate(trajectory.steps):
        source, sigma = trajectory.states[:, k], schedule.sigma[step]
        transition = step_rule(
            source, velocity(source, sigma, schedule.timestep[step]), sigma, schedule.sigma[step + 1]
        )
        assert transition.mean.requires_grad
        log_prob = gaussian_log_prob(trajectory.states[:, k + 1], transition)
        assert torch.equal(log_prob, trajectory.log_prob[:, k])


def adapted(pipeline: Pipeline) -> Policy:
    """A LoRA on the default targets that does something: B is not zero."""
    policy = Policy(pipeline.denoiser, rank=2, alpha=4, targets=pipeline.lora_targets, seed=1)
    for name, parameter in policy.parameters.items():
        if "lora_B" in name:
            parameter.data.copy_(0.2 * counter_normal(parameter.shape, "filled", name))
    return policy


def assert_every_tensor_gets_gradient(pipeline: Pipeline, policy: Policy) -> None:
    """A loss of the guided velocity reaches every tensor of the LoRA."""
    x, schedule = start_noise(pipeline, len(PROMPTS)), pipeline.schedule(4, "diffusers")
    output = guided(pipeline, PROMPTS, 4.0)(x, schedule.sigma[1], schedule.timestep[1])
    gradients = torch.autograd.grad(output.square().sum(), list(policy.parameters.values()))
    for name, gradient in zip(policy.parameters, gradients, strict=True):
        assert float(gradient.abs().sum()) > 0, name
