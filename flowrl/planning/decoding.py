"""Peak memory of decoding: runs the model's autoencoder on the meta device and counts its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from torch import Tensor

from flowrl.pipelines import ModelFamily
from flowrl.pipelines.places import known_checkpoints
from flowrl.pipelines.random_weights import vae_config
from flowrl.pipelines.shared import cards, common
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.planning.traces import Fused, Trace

Size = tuple[int, int, int | None]
"""Height, width and frames; None for images."""
_BY_FRAME = ("AutoencoderKLWan", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21")
_SOME_FRAMES = (3, 4)
"""Numbers of latent frames for measuring a frame-by-frame decoder: from the third on, each adds the same."""
TILED = 2**31
"""Below so many bytes, tiles are not considered."""
_CLIPS = 3
"""Full-size clips that tiled decoding holds besides a tile: raw tiles, blended tiles, and the result."""


def decode_peaks(family: ModelFamily, model: str, size: Size, *, dtype: str = "float32") -> tuple[int, int] | None:
    """Peak bytes of decoding one image or clip in `pipeline.vae_dtype`, whole and in tiles, without the autoencoder's
    weights; None if the model is unknown. Only video families decode in tiles, if decoding takes much; otherwise both
    are equal. Tiled is an upper bound."""
    card = family.card(model) if isinstance(family, Family) else None
    if card is None or card.network is None or not isinstance(family, Family):
        return None
    stated = cards.read_part(model, "vae/config.json")
    config = vae_config(family, card) if stated is None else stated
    name = config.get("_class_name") or known_checkpoints.tables()["families"][family.name]["autoencoder"]
    with torch.device("meta"):
        vae: Any = getattr(diffusers, name).from_config(dict(config))
    made = partial(_decoded, family, card, vae, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    peak = partial(_extended, made, card.factors[1]) if name in _BY_FRAME else made
    whole = peak(size)
    if not family.videos or whole < TILED:
        return whole, whole
    multiple = 4 * card.factors[0]  # of any family's sizes
    sides = (vae.tile_sample_min_height, vae.tile_sample_min_width)
    tile = [min(side, multiple * math.ceil(own / multiple)) for side, own in zip(size[:2], sides, strict=True)]
    return whole, min(whole, peak((tile[0], tile[1], size[2])) + _CLIPS * 4 * 3 * size[0] * size[1] * (size[2] or 1))


def _extended(made: Callable[[Size], int], factor: int, size: Size) -> int:
    """Extrapolates the bytes of a frame-by-frame decoder, `factor` frames for each latent one, from a few frames."""
    height, width, frames = size
    latent = 1 if frames is None else (frames - 1) // factor + 1
    if latent <= _SOME_FRAMES[1]:
        return made(size)
    few, more = (made((height, width, factor * (count - 1) + 1)) for count in _SOME_FRAMES)
    return more + (more - few) * (latent - _SOME_FRAMES[1])


def _decoded(family: Family, card: cards.Card, vae: Any, dtype: torch.dtype, size: Size) -> int:
    """Peak bytes while one image or clip of a size is decoded on the meta device."""

    def constants(p: FamilyPipeline) -> dict[str, Tensor]:
        try:
            return family.constants(p)
        except AttributeError:  # those that are a scheduler's, which decoding does not ask for
            return {}

    frames = {} if size[2] is None else {"num_frames": size[2]}
    given: dict[str, Any] = {"height": size[0], "width": size[1], **frames}
    p = FamilyPipeline(
        replace(family, constants=constants), card, family.options(**given), pipe=SimpleNamespace(vae=vae),
        denoisers={}, dtype=torch.float32, device=torch.device("meta"), tokens=1,
    )  # fmt: skip
    with torch.no_grad(), Fused(dtype), Trace() as trace:
        family.decode(p, common.meta(1, *p.latent_shape))
    return trace.peak
