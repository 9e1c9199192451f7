"""Motif-Video: any checkpoint that stock `MotifVideoPipeline` loads, from text.

Velocity network `MotifVideoTransformer3DModel` on latents of Wan 2.1's autoencoder, fed 1000 * sigma; beside the noisy
channels stand those of a first frame and its mask, here zeros. A T5Gemma 2 reads the prompt; its padding is masked, so
that another length is the same function of prompts that fit.

Stock takes a guider for each call. Here it is the one of its authors' examples, adaptive projected guidance whose scale
counts from 0 (`flowrl.samplers.path_memory.AdaptiveProjection`), and not that of the folder. Their scale is 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from diffusers import MotifVideoTransformer3DModel

from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.families import wan
from flowrl.pipelines.families.z_image import guided_from_zero
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Grid, Size, VideoOptions, check_channels, embedding, given
from flowrl.pipelines.shared.common import Guidance
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.shared.stock_schedules import check_flow_scheduler, flow_levels_of
from flowrl.pipelines.weights.lora import JOINT_ATTENTION
from flowrl.samplers.guidance import Velocity
from flowrl.samplers.guidance_rules import Rule
from flowrl.samplers.path_memory import AdaptiveProjection


@dataclass(frozen=True, kw_only=True)
class MotifVideoOptions(VideoOptions):
    """Options of Motif-Video, whose network does not read `fps`."""

    projected: bool = True
    """Whether guidance is by projections; false adds `scale` times the whole difference."""
    momentum: float = 0.1
    """Of the running average of differences; 0 keeps nothing from step to step."""
    longest: float = 12.0
    """Longest average of a frame, by its norm; 0 is no limit."""


def guided(p: FamilyPipeline, asked: Guidance) -> Velocity:
    """In two passes, by projections unless the options say otherwise."""
    chosen = p.options
    projected = AdaptiveProjection(longest=chosen.longest, momentum=chosen.momentum, dims=(-1, -2, -4))
    rule: Rule = projected if chosen.projected else lambda no, yes, scale: yes + scale * (yes - no)
    return guided_from_zero(p, asked, distilled=False, rule=rule)


FAMILY = Family(
    name="motif_video",
    title="Motif-Video",
    network=MotifVideoTransformer3DModel,
    lora_targets=JOINT_ATTENTION,
    options=MotifVideoOptions,
    encoders=("text_encoder",),
    own_size=lambda card: Size(height=736, width=1280, num_frames=121, fps=24.0),
    grid=lambda config: Grid(channels=config.out_channels, patch=config.patch_size, frame_patch=config.patch_size_t),
    factors=wan.FAMILY.factors,
    embed=embedding("embeds", "", "mask"),
    arguments=lambda p, x, timestep, cond: common.masked_arguments(
        torch.cat([x, torch.zeros_like(x), torch.zeros_like(x[:, :1])], dim=1), timestep, cond
    ),
    conditioning=given("text_embed_dim", mask=True),
    guided=guided,
    passes=lambda card, scale: 1 if scale == 0 else 2,
    memory=lambda card, options, scale, num_steps: (
        options.projected and options.momentum != 0 and scale != 0 and num_steps > 1
    ),
    schedule=flow_levels_of(
        sigmas="linspace",
        tokens=lambda p: math.prod(p.latent_shape[1:]) // (p.card.network.patch_size**2 * p.card.network.patch_size_t),
    ),
    constants=common.latent_statistics,
    decode=wan.FAMILY.decode,
    encode=wan.encode,
    check_scheduler=check_flow_scheduler,
    refuse=lambda card: check_channels(
        card, "the noisy ones, those of a first frame and a mask", in_channels=2 * card.network.out_channels + 1
    ),
    attention=Attends(mask="keys"),
)
