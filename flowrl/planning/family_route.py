"""Facts about a model with a family in flowrl: what the family states without the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from flowrl.pipelines import ModelFamily
from flowrl.pipelines.shared import cards
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.planning import published_models
from flowrl.planning.cost import decode_flops
from flowrl.planning.decoding import Size, decode_peaks
from flowrl.planning.published_models import Parts
from flowrl.rewards.base.text_limits import kept_tokenizer

AROUND = 8
"""Tokens of a chat's template that are sent with a prompt, at most: those of Z-Image; Qwen-Image sends five."""
_LETTERS = 4
"""Letters of a token in English prompts, roughly."""
_USUAL = 32
"""Assumed tokens of a prompt if none is available: some 25 words."""
_COUNTED = 5000  # prompts, of which each is looked at; of more some are


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Tokens of a prompt."""

    most: int
    """Tokens for the memory estimate."""
    usual: int | None = None
    """Tokens of a usual prompt, for a second estimate of cost; None if all prompts have equally many."""
    told: str = ""
    """Source of `usual`."""


def text_of(family: ModelFamily, model: str, options: dict[str, Any], prompts: Sequence[str] | None) -> Text:
    """Tokens sent of the prompts that the run embeds (None if they are not here); `options` are the family's. Some
    families drop a prompt's padding, so the configured length is only the maximum; the model's own tokenizer counts
    prompts if its file is here, without transformers or weights."""
    most = family.text_tokens(model, options)
    p = unloaded(family, model, most, options)
    if p is None or "length_on_host" not in p.family.conditioning(p, most):  # which keeps a prompt's number of tokens
        return Text(most=most)
    if family.num_sources != (0, 0):
        return Text(most=most, usual=most, told="its source images are told as text too, so prompts were not counted")
    if not prompts:
        return Text(most=most, usual=min(most, _USUAL + AROUND), told="assumed: prompts are not here")
    tokenizer = kept_tokenizer(model, "tokenizer")
    if tokenizer is None:
        letters = sum(map(len, prompts)) / len(prompts)
        usual = min(most, round(letters / _LETTERS) + AROUND)
        return Text(most=most, usual=usual, told=f"by {letters:.0f} letters of a prompt: no tokenizer.json is here")
    some = prompts if len(prompts) <= _COUNTED else prompts[:: len(prompts) // _COUNTED + 1]
    found = [min(most, len(one.ids) + AROUND) for one in tokenizer.encode_batch(list(some))]
    longest = max(found) if len(some) == len(prompts) else most
    return Text(most=longest, usual=round(sum(found) / len(found)), told="counted by the model's tokenizer")


def unloaded(family: ModelFamily, model: str, tokens: int, options: Mapping[str, Any]) -> FamilyPipeline | None:
    """The pipeline of a checkpoint without its weights; None if it is unknown."""
    card = family.card(model) if isinstance(family, Family) else None
    if card is None or card.network is None or not isinstance(family, Family):
        return None
    return FamilyPipeline(
        family, card, family.chosen(options), pipe=None, denoisers={}, dtype=torch.float32, device=torch.device("meta"),
        tokens=tokens,
    )  # fmt: skip


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
