"""Stable Diffusion 3 and 3.5: any checkpoint that stock `StableDiffusion3Pipeline` loads.

Velocity network `SD3Transformer2DModel`, fed 1000 * sigma; two CLIP encoders and a T5 encoder; sigma grids from the
checkpoint's own `FlowMatchEulerDiscreteScheduler`. Guidance is two-pass classifier-free guidance. Stock guides at
scales above 1 only: what the card of 3.5 Large Turbo calls scale 0 is 1 here, and 0 is the negative prompt alone.

Medium 3.5 has a second attention over the image's own tokens in its first 13 blocks (`attn2`), Large has none;
published recipes train the joint attention alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from diffusers import SD3Transformer2DModel
from torch import Tensor

from flowrl.pipelines.arithmetic.attention import dispatch_joint_attention
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Grid, clip_context, embedding, given, sample_size
from flowrl.pipelines.shared.common import Guidance
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.shared.stock_schedules import check_flow_scheduler, flow_levels_of
from flowrl.pipelines.weights.lora import JOINT_ATTENTION
from flowrl.samplers.guidance import Velocity

_EMBED = embedding("embeds", "", "pooled", do_classifier_free_guidance=False, prompt_2=None, prompt_3=None)


def _embed(p: FamilyPipeline, prompt: str, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    asked = SimpleNamespace(config=p.card.network)  # without T5 stock has zeros as wide as its network reads
    with nullcontext() if p.pipe.text_encoder_3 is not None else common.standing_in(p.pipe, transformer=asked):
        return _EMBED(p, prompt, sources)


def _guided(p: FamilyPipeline, asked: Guidance) -> Velocity:
    """Guidance in two passes, 1 is one pass. Raises ValueError: a model whose name says that it is a turbo with a scale
    below 1, or a large turbo with any but 1."""
    name, scale = Path(p.model).name.lower(), asked.scale
    if "turbo" in name and (scale < 1 or (scale > 1 and "large" in name)):  # others' turbos may be guided a little
        raise ValueError(
            f"{p.model} is distilled to draw without guidance, which is scale 1 in this family (its card's 0.0 is "
            f"stock's word for that), got scale {scale:g}: set sampler.guidance_scale=1 and eval.guidance_scale=1"
        )
    return common.two_pass_guidance(asked)


FAMILY = Family(
    name="sd3", title="Stable Diffusion 3", network=SD3Transformer2DModel, lora_targets=JOINT_ATTENTION,
    encoders=("text_encoder", "text_encoder_2", "text_encoder_3"), spared=("text_encoder_3", "tokenizer_3"), length=128,
    own_size=sample_size,
    grid=lambda config: Grid(channels=config.in_channels, patch=config.patch_size, most=config.pos_embed_max_size),
    embed=_embed, conditioning=given("joint_attention_dim", pooled="pooled_projection_dim"),
    arguments=lambda p, x, timestep, cond: {
        "hidden_states": x, "timestep": timestep, "encoder_hidden_states": cond.tensors["embeds"],
        "pooled_projections": cond.tensors["pooled"],
    },
    guided=_guided, check_scheduler=check_flow_scheduler,
    schedule=flow_levels_of(tokens=lambda p: math.prod(p.latent_shape[1:]) // p.card.network.patch_size**2),
    # CLIP's context, and T5's tokens behind it
    seen_tokens=lambda card, length: clip_context(card) + length,
    prepare=lambda p: dispatch_joint_attention(p.pipe.transformer),
)  # fmt: skip
