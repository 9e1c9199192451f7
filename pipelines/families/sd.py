"""Stable Diffusion 1 and 2: any checkpoint that stock `StableDiffusionPipeline` loads.

A `UNet2DConditionModel` that predicts noise or v, and one text encoder (CLIP, in 2.x OpenCLIP). It runs in flow
coordinates (`samplers/flow_coordinates.py`): latents here are stock's divided by `sqrt(A) + sqrt(1 - A)`, which at the
end, at clean data, is 1. Noise levels are the checkpoint's own; the solver is ours, whatever scheduler it names.
Guidance is two-pass classifier-free guidance, the same of velocities as of noise or v. Left out: the safety checker
(stock blacks out what it objects to), guidance rescale and clip skip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.shared import stock_schedules
from flowrl.pipelines.shared.cards import Card, Grid, clip_context, given, refusing, sample_size
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.runtime.placement import widest
from flowrl.samplers.flow_coordinates import flow_levels, prediction_of, sigma_at, velocity_from_prediction, vp_scale
from flowrl.samplers.parametrization import column, working_dtype
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""All projections of self- and cross-attention (DDPO, diffusers' own scripts)."""


def _head_sizes(config: Any) -> tuple[int, ...]:
    """A UNet's `attention_head_dim` is the number of heads, of each level; the middle attends as the last does."""
    heads, levels = config.attention_head_dim, config.block_out_channels
    counts = (heads,) * len(levels) if isinstance(heads, int) else tuple(heads)
    attending = ["Attn" in kind for kind in config.down_block_types[:-1]] + [True]
    return tuple(c // n for c, n, attends in zip(levels, counts, attending, strict=True) if attends)


def arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    """Arguments of a `UNet2DConditionModel`."""
    return {"sample": x, "timestep": timestep, "encoder_hidden_states": cond.tensors["embeds"]}


def evaluate(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
    """Velocity in float32 of latents in flow coordinates, at a timestep that need not be an integer."""

    def predicted(sample: Tensor, time: Tensor) -> Tensor:
        return p.call(sample, time, cond)

    return flow_velocity(predicted, x, timestep, p.constants["levels"], prediction_of(p.pipe.scheduler.config))


def flow_velocity(
    predicted: Callable[[Tensor, Tensor], Tensor], x: Tensor, timestep: Tensor, levels: Tensor, prediction: Any
) -> Tensor:
    """Velocity in float32 of `predicted(sample, time)`, a network that is fed variance-preserving latents. Timesteps
    below 0 are levels between data and the first noise: the network has no such time and gets 0."""
    x, sigma = x.to(working_dtype(x)), sigma_at(timestep, levels)
    output = predicted(column(vp_scale(sigma), x) * x, timestep.clamp(min=0))
    return velocity_from_prediction(x, output, sigma, prediction).float()


def levels_on(device: torch.device, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The table of levels on the networks' device, so that no call waits; on the CPU if the device has no float64."""
    levels = flow_levels(config)
    return {"levels": levels.to(device) if widest(device) == levels.dtype else levels}


def own_levels(p: FamilyPipeline, num_steps: int, grid: str, shift: float | None) -> Schedule:
    """Levels: "diffusers" as the scheduler visits them, "linspace" over all timesteps. Raises ValueError: a shift."""
    if shift is not None:
        raise ValueError(
            f"{p.model} is a diffusion model with fixed noise levels, which have no shift (got {shift:g}): remove the "
            "shift, or choose grid diffusers or linspace"
        )
    return stock_schedules.diffusion_levels(p.model, p.pipe.scheduler, num_steps, grid)


def _tokens(card: Card, options: Any) -> int:
    """The tokenizer's context, which prompts always fill."""
    own = clip_context(card)
    if options.max_sequence_length not in (None, own):
        raise ValueError(
            f"prompts of {card.model} always have {own} tokens, got max_sequence_length {options.max_sequence_length}: "
            "remove pipeline.max_sequence_length"
        )
    return own


FAMILY = Family(
    name="sd", title="Stable Diffusion 1 or 2", network=UNet2DConditionModel, lora_targets=LORA_TARGETS,
    encoders=("text_encoder",), denoisers=("unet",), own_size=sample_size,
    grid=lambda config: Grid(channels=config.in_channels), arguments=arguments,
    embed=lambda p, prompt, _: {"embeds": p.pipe.encode_prompt([prompt], p.device, 1, False)[0].to(p.dtype)},
    conditioning=given("cross_attention_dim"), schedule=own_levels, evaluate=evaluate,
    constants=lambda p: levels_on(p.device, p.pipe.scheduler.config),
    check_scheduler=stock_schedules.check_diffusion_scheduler, tokens=_tokens,
    # Networks that need more than latents, time and prompt
    refuse=refusing((
        lambda card: card.network.in_channels != card.network.out_channels,
        "the network of {card.model} takes {card.network.in_channels} channels and predicts "
        "{card.network.out_channels}: it is made for inpainting or editing, and this family draws from text alone",
    ), (
        lambda card: card.network.time_cond_proj_dim is not None,
        "the network of {card.model} takes the guidance scale as an input (time_cond_proj_dim): it is distilled to few "
        "steps; train the model it was made from",
    )),
    attention=Attends(head_sizes=_head_sizes),
    stock_options={
        "safety_checker": None, "feature_extractor": None, "image_encoder": None, "requires_safety_checker": False,
    },
)  # fmt: skip
