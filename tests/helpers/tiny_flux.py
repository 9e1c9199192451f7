"""Random FLUX.1 pipelines of a few ten thousand parameters, real in every class, and what tests of families share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from flowrl.pipelines import Pipeline
from flowrl.pipelines.lora import Policy
from flowrl.pretrain.tiny_sd3 import CONTEXT, clip_tokenizer, t5_tokenizer
from flowrl.randomness import counter_normal
from flowrl.samplers import KERNELS, Velocity, gaussian_log_prob, rollout
from flowrl.trajectory import Conditioning

PROMPTS = ["a photo of a red circle", "two blue squares", "a green star"]
WIDTH = 32
RANK, ALPHA, STEPS = 2, 4, 3

DYNAMIC: dict[str, Any] = {
    "use_dynamic_shifting": True, "shift": 3.0, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}  # fmt: skip


def _flux_parts(*, guidance_embeds: bool, scheduler: dict[str, Any]) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
        return {
            "tokenizer": tokenizer,
            "tokenizer_2": tokenizer_2,
            "text_encoder": CLIPTextModel(
                CLIPTextConfig(
                    vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1,
                    num_attention_heads=2, max_position_embeddings=CONTEXT, bos_token_id=tokenizer.bos_token_id,
                    eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
                )
            ),
            "text_encoder_2": T5EncoderModel(
                T5Config(
                    vocab_size=len(tokenizer_2), d_model=WIDTH, d_kv=16, d_ff=WIDTH, num_layers=1, num_heads=2,
                    is_encoder_decoder=False, tie_word_embeddings=True,
                )
            ),
            "transformer": FluxTransformer2DModel(
                patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
                num_attention_heads=2, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
                guidance_embeds=guidance_embeds, axes_dims_rope=(4, 6, 6),
            ),
            "vae": AutoencoderKL(
                latent_channels=4, sample_size=32, layers_per_block=1, norm_num_groups=4, block_out_channels=(8, 8, 8),
                down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
                use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1159, scaling_factor=0.3611,
            ),
            "scheduler": FlowMatchEulerDiscreteScheduler(**scheduler),
        }  # fmt: skip


def save_tiny_flux(folder: Path, *, distilled: bool = False) -> Path:
    """A FLUX.1-dev pipeline of 32 x 32 images, or one as FLUX.1-schnell is: no guidance input, a static shift."""
    scheduler = {"shift": 1.0} if distilled else DYNAMIC
    FluxPipeline(**_flux_parts(guidance_embeds=not distilled, scheduler=scheduler)).save_pretrained(folder)
    return folder


def save_tiny_kontext(folder: Path) -> Path:
    """A FLUX.1 Kontext pipeline of 32 x 32 images."""
    FluxKontextPipeline(**_flux_parts(guidance_embeds=True, scheduler=DYNAMIC)).save_pretrained(folder)
    return folder


# ---- what tests of families do ---------------------------------------------------------------------------------------


def images(count: int, height: int, width: int) -> list[Tensor]:
    """Images [3, h, w] of 8-bit colours, all different, coarse enough to survive an 8-bit file."""
    levels = (counter_normal((count, 3, height, width), "pictures") * 60 + 128).clamp(0, 255).round()
    return list(levels / 255)


def start_noise(pipeline: Pipeline, b: int) -> Tensor:
    """Start noise `[b, *latent]`, always the same."""
    return counter_normal((b, *pipeline.latent_shape), "start")


@torch.no_grad()
def sample_ode(pipeline: Pipeline, velocity: Velocity, b: int, num_steps: int = STEPS) -> Tensor:
    """Finished latents on the stock pipeline's grid, without any noise on the way."""
    x, schedule = start_noise(pipeline, b), pipeline.schedule(num_steps, "diffusers")
    ode = replace(KERNELS["ode"], sigma_max=schedule.sigma_max)
    return rollout(velocity, x, schedule, ode, lambda step: x, stochastic=()).final


def adapted(pipeline: Pipeline) -> Policy:
    """A LoRA on the family's own targets that does something: B is not zero."""
    policy = Policy(pipeline.denoiser, rank=RANK, alpha=ALPHA, targets=pipeline.lora_targets, seed=1)
    for name, parameter in policy.parameters.items():
        if "lora_B" in name:
            parameter.data.copy_(0.2 * counter_normal(parameter.shape, "filled", name))
    return policy


def check_replay(
    pipeline: Pipeline, policy: Policy, cond: Conditioning, negative: Conditioning | None, scale: float
) -> None:
    """The ratio is exactly 1, and every LoRA tensor gets a gradient."""
    schedule = pipeline.schedule(STEPS, "diffusers")
    kernel = replace(KERNELS["flow_sde"], sigma_max=schedule.sigma_max)
    velocity = pipeline.guided(pipeline.network, cond, negative, scale)
    x = start_noise(pipeline, len(cond))
    with torch.no_grad():
        trajectory = rollout(
            velocity, x, schedule, kernel, lambda step: counter_normal(x.shape, "step", step), stochastic=(0, 1)
        )
    for k, step in enumerate(trajectory.steps):
        source, sigma = trajectory.states[:, k], schedule.sigma[step]
        predicted = velocity(source, sigma, schedule.timestep[step])
        assert predicted.dtype == torch.float32
        transition = kernel(source, predicted, sigma, schedule.sigma[step + 1])
        log_prob = gaussian_log_prob(trajectory.states[:, k + 1], transition)
        assert torch.equal(log_prob, trajectory.log_prob[:, k])
    gradients = torch.autograd.grad(log_prob.sum(), list(policy.parameters.values()))
    assert {g.dtype for g in gradients} == {torch.float32}
    assert min(float(g.abs().max()) for g in gradients) > 0


def same(first: Conditioning, second: Conditioning) -> bool:
    """Whether two conditionings hold the same numbers."""
    names = first.tensors.keys() == second.tensors.keys()
    return names and all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
