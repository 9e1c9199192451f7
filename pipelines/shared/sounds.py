"""Families whose videos have sound: one state for both, and the sound of finished latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sound:
    """How a family's videos sound; every function takes the pipeline first. A state holds the latents of both kinds in
    one tensor, so that kernels, ratios, counters of randomness and all that works by number need not know of it."""

    packed: Callable[[Any], tuple[int, ...]]
    """Shape of one latent with those of the sound in it, of the size that is drawn."""
    rate: Callable[[Any], int]
    """Samples per second."""
    decode: Callable[[Any, Tensor], Tensor]
    """Sound `[b, channels, samples]` in [-1, 1] of finished latents in float32."""


@torch.no_grad()
def decode_sound(p: Any, latents: Tensor) -> Tensor:
    """Sound float32 `[b, channels, samples]` of finished latents, as many clips at once as are decoded of videos.
    Raises ValueError: the family is silent."""
    if p.family.sound is None:
        raise ValueError(f"videos of {p.model} are silent: take a family with sound, such as ltx2")
    with p.awake("vae"):
        found = [p.family.sound.decode(p, part.float()) for part in latents.split(p.options.vae_slice)]
    return torch.cat(found).float().clamp(-1, 1)
