"""Random FLUX.1 pipelines of a few ten thousand parameters, real in every class, and what tests of families share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    ChromaPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from family_sampling import adapted, check_published, idle_tensors, replayed, sample
from rounding import assert_same_sum
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from flowrl.pipelines import ModelFamily, Pipeline
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.lora import Policy
from flowrl.pretraining.tiny_sd3 import CONTEXT, clip_tokenizer, t5_tokenizer
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import Velocity
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


def save_tiny_flux_fill(folder: Path) -> Path:
    """A FLUX.1 Fill pipeline of 32 x 32 images: 16 channels of noise, 16 of the image and 64 of the mask per token."""
    parts = _flux_parts(guidance_embeds=True, scheduler=DYNAMIC)
    config = {name: value for name, value in parts["transformer"].config.items() if not name.startswith("_")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        parts["transformer"] = FluxTransformer2DModel(**{**config, "in_channels": 16 + 16 + 64, "out_channels": 16})
    FluxFillPipeline(**parts).save_pretrained(folder)
    return folder


def save_tiny_chroma(folder: Path) -> Path:
    """A Chroma pipeline of 32 x 32 images, with entries in its network's configuration that the class does not have."""
    parts = _flux_parts(guidance_embeds=False, scheduler={"shift": 3.0})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        transformer = ChromaTransformer2DModel(
            patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 6, 6), approximator_num_channels=16,
            approximator_hidden_dim=WIDTH, approximator_layers=1,
        )  # fmt: skip
    ChromaPipeline(
        tokenizer=parts["tokenizer_2"],
        text_encoder=parts["text_encoder_2"],
        transformer=transformer,
        vae=parts["vae"],
        scheduler=parts["scheduler"],
    ).save_pretrained(folder)
    path = folder / "transformer" / "config.json"
    published = {"guidance_embeds": False, "pooled_projection_dim": 768}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | published), encoding="utf-8")
    return folder


# ---- what tests of families do ---------------------------------------------------------------------------------------


def images(count: int, height: int, width: int) -> list[Tensor]:
    """Images [3, h, w] of 8-bit colours, all different, coarse enough to survive an 8-bit file."""
    levels = (counter_normal((count, 3, height, width), "pictures") * 60 + 128).clamp(0, 255).round()
    return list(levels / 255)


def sample_ode(pipeline: Pipeline, velocity: Velocity, b: int, num_steps: int = STEPS) -> Tensor:
    """Finished latents on the stock pipeline's grid, without any noise on the way."""
    return sample(pipeline, velocity, pipeline.schedule(num_steps, "diffusers"), b)


def check_replay(
    pipeline: Pipeline, policy: Policy, cond: Conditioning, negative: Conditioning | None, scale: float
) -> None:
    """The ratio is exactly 1, and every LoRA tensor gets a gradient, from the last step alone."""
    log_prob = replayed(pipeline, pipeline.guided(pipeline.network, cond, negative, scale), len(cond), STEPS)
    assert not idle_tensors(policy, log_prob[-1].sum())


def check_stock_draws_with_the_saved_lora(
    pipeline: FamilyPipeline, folder: Path, ours: Callable[[], Tensor], stock: Callable[[], Tensor]
) -> None:
    """What a new LoRA, saved to a folder, makes of our samples it makes of the stock pipeline's."""
    plain, policy = ours(), adapted(pipeline)
    trained = ours()
    pipeline.save_lora(folder, policy.tensors(), policy.config)
    assert_same_sum(trained, stock())
    assert (trained - plain).abs().max() > 1e-2


def check_published_with_lora(family: ModelFamily, model: str, parameters: int, width: int) -> None:
    """A published checkpoint's parameters, and those of a LoRA: its rank for each of `width` inputs and outputs."""
    network = check_published(family, model, parameters)
    policy = Policy(network, rank=RANK, alpha=ALPHA, targets=family.lora_targets, seed=0)
    assert sum(p.numel() for p in policy.parameters.values()) == RANK * width
