"""LTX-Video 0.9: any checkpoint that stock `LTXPipeline` loads.

Velocity network `LTXVideoTransformer3DModel` on tokens, fed 1000 * sigma and the frame rate through its positions; a T5
encoder; sigma grids shifted by tokens. Guidance is two-pass, without stock's rescale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusers import LTXVideoTransformer3DModel
from torch import Tensor

from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.families import wan
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Card, Grid, Size, VideoOptions, embedding, given
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.shared.stock_schedules import check_flow_scheduler, flow_levels_of
from flowrl.pipelines.weights.lora import SELF_AND_CROSS_ATTENTION
from flowrl.trajectory import Conditioning


@dataclass(frozen=True, kw_only=True)
class LTXVideoOptions(VideoOptions):
    """Options of LTX-Video, whose network reads `fps`."""

    decode_timestep: float = 0.0
    """Timestep of a decoder that denoises the last bit (0.9.1 on). Stock can add noise before; here it is left out, so
    that equal latents have equal rewards (stock: `decode_noise_scale=0`)."""


def grid(config: Any) -> Grid:
    """Latents of one pixel a token, or of patches."""
    patch, frame_patch = config.patch_size, config.patch_size_t
    return Grid(channels=config.in_channels // (patch**2 * frame_patch), patch=patch, frame_patch=frame_patch)


def factors(vae: Mapping[str, Any]) -> tuple[int, int]:
    """As the autoencoder finds them where its configuration leaves them out: a patch, then halved at each level."""
    scaled, patches = vae.get("spatio_temporal_scaling", (True, True, True, False)), (4, 1)
    usual = [patch * 2 ** sum(scaled) for patch in (vae.get("patch_size", patches[0]), vae.get("patch_size_t", 1))]
    own = vae.get("spatial_compression_ratio"), vae.get("temporal_compression_ratio")
    return own[0] or usual[0], own[1] or usual[1]


def _tokens_of(p: FamilyPipeline) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Tokens of frames, rows and columns, and the latent pixels that one covers in each."""
    config, shape = p.card.network, p.latent_shape[1:]
    patch = (config.patch_size_t, config.patch_size, config.patch_size)
    return (shape[0] // patch[0], shape[1] // patch[1], shape[2] // patch[2]), patch


def _arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    (frames, rows, columns), (f, h, w) = _tokens_of(p)
    spatial, temporal = p.card.factors
    split = x.reshape(len(x), -1, frames, f, rows, h, columns, w).permute(0, 2, 4, 6, 1, 3, 5, 7)
    return common.masked_arguments(split.flatten(4, 7).flatten(1, 3), timestep, cond) | {
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "rope_interpolation_scale": (temporal / (p.fps or 25.0), spatial, spatial),
    }


def _read(p: FamilyPipeline, output: Tensor, x: Tensor) -> Tensor:
    (frames, rows, columns), (f, h, w) = _tokens_of(p)
    split = output.reshape(len(x), frames, rows, columns, -1, f, h, w).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return split.reshape(x.shape)


def constants(p: FamilyPipeline) -> dict[str, Tensor]:
    """The statistics that normalise latents, from the autoencoder's weights."""
    vae = p.pipe.vae
    mean, std = (value.view(1, -1, 1, 1, 1).float() for value in (vae.latents_mean, vae.latents_std))
    return {"mean": mean, "std": std / vae.config.scaling_factor}


def decode(p: FamilyPipeline, z: Tensor) -> Tensor:
    """Clips of latents `[b, C, F, h, w]`."""
    vae = p.pipe.vae
    time = z.new_full((len(z),), p.options.decode_timestep) if vae.config.timestep_conditioning else None
    return vae.decode(common.restore(p, z), time, return_dict=False)[0]


def suits(card: Card, options: Any) -> None:
    """Refuses a timestep if the decoder reads none."""
    if options.decode_timestep != 0 and not card.vae.get("timestep_conditioning", True):
        raise ValueError(
            f"decode_timestep ({options.decode_timestep}) has no effect: the decoder of {card.model} reads no timestep"
        )


FAMILY = Family(
    name="ltx_video", title="LTX-Video", network=LTXVideoTransformer3DModel, lora_targets=SELF_AND_CROSS_ATTENTION,
    options=LTXVideoOptions, encoders=("text_encoder",), length=128,
    own_size=lambda card: Size(height=512, width=704, num_frames=161, fps=25.0), grid=grid, factors=factors,
    embed=embedding("embeds", "mask", do_classifier_free_guidance=False), arguments=_arguments, read=_read,
    conditioning=given("caption_channels", mask=True),
    schedule=flow_levels_of(sigmas="linspace", tokens=lambda p: math.prod(p.latent_shape[1:])), constants=constants,
    decode=decode, encode=wan.encode, suits=suits, check_scheduler=check_flow_scheduler, attention=Attends(mask="bias"),
)  # fmt: skip
