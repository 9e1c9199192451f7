"""Counts the text tokens that a denoiser reads: padded to a length, or as many as a prompt has.

Some families drop a prompt's padding, so the configured length is only the maximum. The model's own tokenizer counts
prompts if its file is here; that needs neither transformers nor weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowrl.pipelines import ModelFamily
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
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
    """Tokens sent of the prompts that the run embeds (None if they are not here); `options` are the family's."""
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
