"""Wan 2.1 and 2.2: any checkpoint that stock `WanPipeline` or `WanImageToVideoPipeline` loads.

Velocity network `WanTransformer3DModel`, fed 1000 * sigma, and a UMT5 encoder; guidance is two-pass classifier-free
guidance. Wan 2.2 A14B has two experts: `transformer` from a boundary time on upwards, `transformer_2` below it, each
with a guidance scale. Image to video conditions on one source image, the first frame: its latents, those of grey
frames and a mask stand beside the noisy channels (2.1 and A14B; 2.1 also reads CLIP's tokens of the image), or the
first latent frame is held at the image's and fed at time 0 (2.2 TI2V-5B, `expand_timesteps`).

Prompts are padded with zeros to `max_sequence_length`, and the padding is attended to, so another number than the stock
512 is another function. Wan 2.1 image to video always sees 512, cut earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from PIL import Image
from torch import Tensor, nn

from flowrl.media.images import to_pixels
from flowrl.pipelines.families import cogvideox
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Card, FirstFrameOptions, Grid, Size, from_first_frame
from flowrl.pipelines.shared.common import Guidance
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.shared.stock_schedules import check_flow_scheduler, flow_levels_of
from flowrl.pipelines.weights.lora import SELF_AND_CROSS_ATTENTION
from flowrl.pipelines.weights.parallelize import needed
from flowrl.runtime.private_names import TimestepEmbedding
from flowrl.samplers.guidance import Velocity, uncounted
from flowrl.trajectory import Conditioning

_IMAGE_TO_VIDEO = "WanImageToVideoPipeline"
_SOURCES = from_first_frame("WanPipeline", _IMAGE_TO_VIDEO)
_EXPERTS = ("transformer", "transformer_2")
_IMAGE_TEXT = 512
"""Text tokens that the image attention of Wan 2.1 counts off from the end."""
_CLIP_TOKENS = 257  # of an image of 224 x 224


@dataclass(frozen=True, kw_only=True)
class WanOptions(FirstFrameOptions):
    """Options of Wan, whose network does not read `fps`."""

    guidance_scale_2: float | None = None
    """Guidance of the second expert; None takes the first's scale."""


def _embed(p: FamilyPipeline, prompt: str, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    embeds = cogvideox.embed(p, prompt, sources)["embeds"]
    if p.card.network.added_kv_proj_dim is not None:
        embeds = nn.functional.pad(embeds, (0, 0, 0, _IMAGE_TEXT - embeds.shape[1]))
    return {"embeds": embeds}


def as_clip(p: FamilyPipeline, pixels: Any) -> Tensor:
    """A clip `[1, 3, 1, h, w]` in [-1, 1] of an image's pixels, stretched to the drawn size as stock pipelines do."""
    height, width = p.image_shape[2:]
    sized: Tensor = p.pipe.video_processor.preprocess(Image.fromarray(pixels), height=height, width=width)
    return sized.to(p.device).unsqueeze(2)


def _embed_sources(p: FamilyPipeline, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    pixels = to_pixels(sources[0])
    first = as_clip(p, pixels)
    if p.card.index.get("expand_timesteps"):
        return {"first_frame": encode(p, first)}
    grey = first.new_zeros(1, 3, p.image_shape[0] - 1, *first.shape[3:])
    latents = encode(p, torch.cat([first, grey], dim=2))
    given = latents.new_zeros(1, p.card.factors[1], *latents.shape[2:])
    given[:, :, 0] = 1
    tensors = {"beside": torch.cat([given, latents], dim=1).to(p.dtype)}
    if p.card.network.image_dim is not None:
        tensors["image"] = p.pipe.encode_image(Image.fromarray(pixels), p.device).to(p.dtype)
    return tensors


def _conditioning(p: FamilyPipeline, tokens: int) -> dict[str, Tensor]:
    """TI2V-5B has a first frame, which costs more."""
    config, (channels, frames, height, width) = p.card.network, p.latent_shape
    found = {"embeds": common.meta(1, tokens, config.text_dim)}
    if p.card.index.get("expand_timesteps"):
        found["first_frame"] = common.meta(1, channels, 1, height, width)
    elif config.in_channels != config.out_channels:
        found["beside"] = common.meta(1, config.in_channels - config.out_channels, frames, height, width)
    if config.image_dim is not None:
        found["image"] = common.meta(1, _CLIP_TOKENS, config.image_dim)
    return found


def _arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    tensors = cond.tensors
    tokens = [side // patch for side, patch in zip(x.shape[2:], p.card.network.patch_size, strict=True)]
    return {
        "hidden_states": torch.cat([x, tensors["beside"].to(x)], dim=1) if "beside" in tensors else x,
        "timestep": common.token_times(timestep, cond, tokens),
        "encoder_hidden_states": tensors["embeds"],
        "encoder_hidden_states_image": tensors.get("image"),
    }


def _evaluate(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
    """Rows of a batch go to the expert of their time."""
    high = timestep >= boundary(p)
    called = [True, False] if len(p.experts) == 1 else _which_called(p, high)
    if all(called):
        rows = [high.nonzero().flatten(), (~high).nonzero().flatten()]
        parts = []
        for name, own in zip(_EXPERTS, rows, strict=True):
            asked = own if len(own) else own.new_zeros(1)  # one of no rows is called all the same, and has a graph
            parts.append(p.call(x[asked], timestep[asked], cond[asked], name)[: len(own)])
        return torch.cat(parts)[torch.cat(rows).argsort()].float()
    return p.call(x, timestep, cond, _EXPERTS[called.index(True)]).float()


def _which_called(p: FamilyPipeline, high: Tensor) -> list[bool]:
    """Whether rows call the first expert, and the second: rows here or, if weights are split, on any process."""
    return needed(p.experts[_EXPERTS[0]], [bool(high.any()), not bool(high.all())])


def boundary(p: FamilyPipeline) -> float:
    """Timestep from which on the first expert is called; 0 if it is alone."""
    return float((p.card.index.get("boundary_ratio") or 0.0) * p.pipe.scheduler.config.num_train_timesteps)


def _guided(p: FamilyPipeline, asked: Guidance) -> Velocity:
    """In two passes; below the boundary the scale is `guidance_scale_2`, if given and the first's is not 1."""
    above, limit, second = common.two_pass_guidance(asked), boundary(p), p.options.guidance_scale_2
    if asked.scale == 1 or second is None:
        return above
    below = common.two_pass_guidance(replace(asked, scale=second))

    def velocity(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        high = timestep >= limit
        called = _which_called(p, high)
        if not all(called):
            return (above if called[0] else below)(x, sigma, timestep)
        with uncounted(not bool(high.any())):  # a batch of several times, which only forward recipes have
            first = above(x, sigma, timestep)
        with uncounted(bool(high.all())):
            second = below(x, sigma, timestep)
        return torch.where(high.view(-1, 1, 1, 1, 1).to(x.device), first, second)

    return velocity


def encode(p: FamilyPipeline, x: Tensor) -> Tensor:
    """Normalised latents of clips."""
    return common.normalise(p, p.pipe.vae.encode(x).latent_dist.mode())


def _has_part(card: Card, name: str) -> bool:
    return (card.index.get(name) or [None])[0] is not None


def _refuse(card: Card) -> None:
    if _EXPERTS[0] not in card.index:  # published checkpoints are whole
        return
    first, second = (_has_part(card, name) for name in _EXPERTS)
    ratio = card.index.get("boundary_ratio")
    if not first or second != (ratio is not None):
        raise ValueError(
            f"{card.model} has boundary_ratio {ratio}, {'a' if first else 'no'} transformer and "
            f"{'a' if second else 'no'} transformer_2: two experts need the boundary between them in model_index.json "
            "(0.875 for Wan2.2-T2V-A14B, 0.9 for I2V), and one has none"
        )
    if ratio is not None and not 0 < ratio < 1:
        raise ValueError(
            f"{card.model} has boundary_ratio {ratio} in model_index.json, and it is a share of all noise, between 0 "
            "and 1, from which on the first expert draws: 0.875 for Wan2.2-T2V-A14B, 0.9 for I2V"
        )


def suits_experts(card: Card, options: Any) -> None:
    """Refuses a second expert's scale if there is only one expert."""
    if (scale := options.guidance_scale_2) is not None and not _has_part(card, _EXPERTS[1]):
        raise ValueError(f"pipeline.options.guidance_scale_2 ({scale}) is for two experts, {card.model} has one")


def _suits(card: Card, options: Any) -> None:
    suits_experts(card, options)
    config, length = card.network, options.max_sequence_length
    if config.added_kv_proj_dim is not None and length is not None and length > _IMAGE_TEXT:
        raise ValueError(f"pipeline.max_sequence_length ({length}) must be at most {_IMAGE_TEXT} for {card.model}")
    stock = _SOURCES["stock_class"](card, options)
    wanted = config.out_channels
    if stock == _IMAGE_TO_VIDEO and not card.index.get("expand_timesteps"):
        wanted += config.out_channels + card.factors[1]
    if config.in_channels != wanted:
        raise ValueError(
            f"{card.model} reads {config.in_channels} channels, and {stock} gives it {wanted}: set image_to_video to "
            "what the checkpoint is for"
        )


def _prepare(p: FamilyPipeline) -> None:
    for expert in p.experts.values():
        expert.condition_embedder.time_embedder.__class__ = _ExactTimestepEmbedding


class _ExactTimestepEmbedding(TimestepEmbedding):  # type: ignore[misc]  # diffusers has no types
    """Stays in float32 under autocast, as it is in the stock pipeline; a class of its own, which copies keep."""

    def forward(self, sample: Tensor, condition: Tensor | None = None) -> Tensor:
        with torch.autocast(sample.device.type, enabled=False):
            embedded: Tensor = super().forward(sample, condition)
        return embedded


FAMILY = Family(
    name="wan", title="Wan", network=WanTransformer3DModel, lora_targets=SELF_AND_CROSS_ATTENTION, denoisers=_EXPERTS,
    exact=("vae", "image_encoder"), options=WanOptions, encoders=("text_encoder",),
    # TI2V-5B: five seconds, as the others
    own_size=lambda card: Size(height=704, width=1280, num_frames=121, fps=24.0)
    if card.index.get("expand_timesteps") else Size(height=480, width=832, num_frames=81, fps=16.0),
    grid=lambda config: Grid(
        channels=config.out_channels, patch=max(config.patch_size[1:]), most=config.rope_max_seq_len,
        frame_patch=config.patch_size[0],
    ),
    factors=lambda vae: (int(vae.get("scale_factor_spatial", 8)), int(vae.get("scale_factor_temporal", 4))),
    embed=_embed, embed_sources=_embed_sources, arguments=_arguments,
    conditioning=_conditioning, evaluate=_evaluate, guided=_guided, schedule=flow_levels_of(),
    constants=common.latent_statistics,
    decode=lambda p, z: p.pipe.vae.decode(common.restore(p, z), return_dict=False)[0], encode=encode,
    seen_tokens=lambda card, length: length if card.network.added_kv_proj_dim is None else _IMAGE_TEXT,
    check_scheduler=check_flow_scheduler, refuse=_refuse, suits=_suits, prepare=_prepare, **_SOURCES,
)  # fmt: skip
