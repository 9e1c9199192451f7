"""Facts about a model with a family in flowrl: what the family states without the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from flowrl.pipelines import ModelFamily
from flowrl.pipelines.shared import cards
from flowrl.planning import published_models
from flowrl.planning.cost import decode_flops
from flowrl.planning.decoding import Size, decode_peaks
from flowrl.planning.published_models import Parts
from flowrl.planning.sent_text import Text, text_of, unloaded


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSample:
    """One image or clip of a size: its network call, and the cost of decoding it."""

    call: dict[str, Any]
    """Arguments of one evaluation of the denoiser, on the meta device."""
    latent: tuple[int, ...]
    """Shape of its latent; empty if unknown."""
    elements: int
    """Number of elements of its latents; beside the first a stock pipeline may decode others, of sound, say."""
    prompt: int
    """Number of elements of a prompt's embedding."""
    decoding: Callable[[], tuple[float | None, tuple[int, int] | None]]
    """FLOPs, and peak bytes, whole and in tiles; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class FamilyRoute:
    """A model by its family. `StockRoute` has the same members."""

    family: ModelFamily
    model: str
    """Folder or hub id whose configuration is counted."""
    options: dict[str, Any]
    """Of the family, as configured."""
    vae_dtype: str
    """`pipeline.vae_dtype`."""
    uncounted: ClassVar[tuple[str, ...]] = ()
    """Parts that are not counted, in words."""
    at_once: ClassVar[bool] = False
    """Whether rows of guidance go through the network in one call."""

    @cached_property
    def size(self) -> Size | None:
        """The size of samples; None if unknown."""
        drawn = self.family.planned_size(self.model, self.options)
        return None if drawn is None else (drawn.height, drawn.width, drawn.num_frames)

    @property
    def targets(self) -> tuple[str, ...]:
        """Layers of a LoRA."""
        return self.family.lora_targets

    @cached_property
    def parts_of(self) -> str | None:
        """The published checkpoint whose parts stand for the model's if its own are unknown."""
        return published_models.nearest(self.family, self.model) if self._own_parts is None else None

    @cached_property
    def parts(self) -> Parts | None:
        """Parameters of the parts besides the denoiser."""
        return self._own_parts if self.parts_of is None else published_models.other_parts(self.parts_of)

    @cached_property
    def _own_parts(self) -> Parts | None:
        return published_models.other_parts(self.model)

    def rows(self, scale: float) -> int:
        """Network rows that guidance takes per sample."""
        return self.family.rows(self.model, scale)

    def text(self, prompts: Sequence[str] | None) -> tuple[Text, dict[str, Any] | None]:
        """Tokens that the model reads of a prompt, and the call of a usual prompt if they depend on it."""
        text = text_of(self.family, self.model, self.options, prompts)
        if text.usual is None or self.size is None:
            return text, None
        return text, self._call(self.size, text.usual)

    def drawn(self, size: Size, tokens: int) -> DrawnSample:
        """An image or clip of a size whose prompt has so many tokens. Raises ValueError: the family cannot draw it."""

        def decoding() -> tuple[float | None, tuple[int, int] | None]:
            peaks = decode_peaks(self.family, self.model, size, dtype=self.vae_dtype)
            return decode_flops(self.model, self.parts, size), peaks

        call = self._call(size, tokens)
        frames = {} if size[2] is None else {"num_frames": size[2]}
        p = unloaded(self.family, self.model, tokens, self.options | {"height": size[0], "width": size[1], **frames})
        prompt = {} if p is None else p.family.conditioning(p, tokens)
        return DrawnSample(
            call=call,
            latent=() if p is None else tuple(p.latent_shape),
            elements=0 if p is None else math.prod(p.latent_shape),
            prompt=sum(tensor.numel() for tensor in prompt.values()),
            decoding=decoding,
        )

    def _call(self, size: Size, tokens: int) -> dict[str, Any]:
        return self.family.meta_call(self.model, cards.Size(height=size[0], width=size[1], num_frames=size[2]), tokens)
