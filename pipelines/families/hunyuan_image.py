"""HunyuanImage 2.1: any checkpoint that stock `HunyuanImagePipeline` loads, the distilled one too.

Velocity network `HunyuanImageTransformer2DModel` on latents of 32 x 32 pixels, fed 1000 * sigma. A Qwen2.5-VL reads the
prompt in a fixed template, which `max_sequence_length` does not count, and a ByT5 encoder reads what stands in
quotation marks, letters to be drawn. Padding of both is masked, so that another length is the same function of prompts
that fit. The licence excludes the EU, the UK and South Korea.

Guidance is that of the checkpoint's guiders: two passes, mixed linearly at `sampler.guidance_scale` in the first steps
(0 to 5 as published) and by projections of a running average later (`samplers/path_memory.py`). Prompts with quoted
letters are guided by `ocr_guider`, as in stock; where stock draws several at once, one of them decides for all.

The distilled network reads the scale, and with `use_meanflow` also the time that a step leads to: its answer is the
mean velocity between the two. Levels beside a schedule's are fed as both, which is the velocity there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import HunyuanImageTransformer2DModel
from torch import Tensor

from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.families.hunyuan_video15 import LINEAR, check_guider, embed, quoting_arguments, stated
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Card, Grid, ImageOptions, given, read_part, square
from flowrl.pipelines.shared.common import Guidance
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.shared.stock_schedules import flow_levels_of
from flowrl.pipelines.weights.lora import JOINT_ATTENTION
from flowrl.samplers.guidance import Velocity
from flowrl.samplers.path_memory import ProjectedGuidance
from flowrl.trajectory import Conditioning, Schedule, flow_timestep

_GLYPHS = 128
"""Tokens of quoted text, always so many."""
_PROJECTED = "AdaptiveProjectedMixGuidance"
_PREFIX = "adaptive_projected_guidance_"
_START = f"{_PREFIX}start_step"
_levels = flow_levels_of(sigmas="linspace")


@dataclass(frozen=True, kw_only=True)
class HunyuanImageOptions(ImageOptions):
    """What can be chosen of HunyuanImage."""

    projected: bool = True
    """Whether later steps are guided by projections, as stock's are; false guides all steps linearly."""


def arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    """What the denoiser is called with."""
    given = quoting_arguments(x, timestep.real, cond)
    if p.card.network.use_meanflow:
        given["timestep_r"] = timestep.imag if timestep.is_complex() else timestep
    if "guidance" in cond.tensors:
        given["guidance"] = cond.tensors["guidance"].to(p.dtype) * 1000.0
    return given


def schedule(p: FamilyPipeline, num_steps: int, grid: str, shift: float | None) -> Schedule:
    """Levels; where the network reads two times, a step's is a complex number: where it is, and where it leads."""
    schedule = _levels(p, num_steps, grid, shift)
    if not p.card.network.use_meanflow:
        return schedule
    ends = torch.cat([schedule.timestep[1:], schedule.timestep.new_zeros(1)])
    return replace(
        schedule,
        timestep=torch.complex(schedule.timestep, ends),
        timestep_of=lambda sigma: torch.complex(flow_timestep(sigma), flow_timestep(sigma)),
    )


def guided(p: FamilyPipeline, asked: Guidance) -> Velocity:
    """By the checkpoint's guiders, or by an input."""
    if p.card.network.guidance_embeds or p.pipe.guider is None:
        return common.guide_by_input(p, asked)
    usual, letters = stated(p.pipe.guider), stated(p.pipe.ocr_guider or p.pipe.guider)
    if asked.scale == 1 or not p.options.projected or usual["_class_name"] == LINEAR:
        return common.two_pass_guidance(asked)
    quoted = asked.cond.tensors["glyph_mask"].bool().any(dim=1)
    rule = ProjectedGuidance(
        last_linear=torch.where(quoted, letters[_START], usual[_START]),
        projected_scale=usual[f"{_PREFIX}scale"],
        momentum=usual[f"{_PREFIX}momentum"] or 0.0,
        longest=usual[f"{_PREFIX}rescale"],
        parallel=usual["eta"],
    )
    return common.two_pass_guidance(asked, rule=rule)


def _passes(card: Card | None, scale: float) -> int:
    embeds = card is not None and card.network is not None and card.network.guidance_embeds
    return 1 if embeds or scale == 1 else 2


def remembers(card: Card, options: Any, scale: float, num_steps: int) -> bool:
    """Whether some step is guided by those before it."""
    guider = read_part(card.model, "guider/guider_config.json") or {}
    return (
        options.projected
        and _passes(card, scale) == 2
        and guider.get("_class_name") != LINEAR
        and num_steps > guider.get(_START, 5) + 1
    )


def _check_guiders(model: str, guiders: Sequence[Mapping[str, Any]]) -> None:
    """Refuses guiders that do other than the published ones, or that differ in more than their first step."""
    for config in guiders:
        check_guider(model, config, "hunyuan_image", _PROJECTED)
    keys = guiders[0].keys() - {_START, "guidance_scale"} if len(guiders) > 1 else ()
    if differ := sorted(key for key in keys if guiders[0][key] != guiders[1].get(key)):
        raise ValueError(
            f"guider and ocr_guider of {model} differ in {', '.join(differ)}, but only their first projected step "
            f"({_START}) may differ: take the guider folders of the published checkpoint"
        )


def refuse(card: Card) -> None:
    """Refuses other guiders, and the refiner."""
    parts = (read_part(card.model, f"{name}/guider_config.json") for name in ("guider", "ocr_guider"))
    _check_guiders(card.model, [config for config in parts if config is not None])
    if len(card.network.patch_size) != 2:
        raise ValueError(
            f"the network of {card.model} has patches of {len(card.network.patch_size)} sides, and this family draws "
            "images from text: take HunyuanImage 2.1, or its distilled checkpoint, not the refiner"
        )


FAMILY = Family(
    name="hunyuan_image", title="HunyuanImage", network=HunyuanImageTransformer2DModel, lora_targets=JOINT_ATTENTION,
    options=HunyuanImageOptions, encoders=("text_encoder", "text_encoder_2"), length=1000, own_size=square(64),
    grid=lambda config: Grid(channels=config.in_channels, patch=max(config.patch_size)),
    factors=lambda vae: (int(vae.get("spatial_compression_ratio", 32)), 1),
    embed=embed, arguments=arguments, conditioning=given("text_embed_dim", mask=True, glyphs=_GLYPHS),
    guided=guided, passes=_passes, memory=remembers, schedule=schedule, refuse=refuse, attention=Attends(mask="keys"),
    prepare=lambda p: _check_guiders(
        p.model, [stated(one) for one in (p.pipe.guider, p.pipe.ocr_guider) if one is not None]
    ),
)  # fmt: skip
