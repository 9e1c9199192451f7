"""Lumina Image 2.0: any checkpoint that stock `Lumina2Pipeline` loads.

The network `Lumina2Transformer2DModel` predicts `clean - noise` and is fed `1 - sigma`; it reads prompts of different
lengths by a mask, and an image's positions begin behind its prompt. Gemma 2 embeds prompts behind a sentence that tells
it what it is for, and `max_sequence_length` counts that sentence. The empty prompt, which guidance leads away from, is
read alone; a negative prompt with words is read behind the sentence too, where stock reads it alone
(`system_prompt=False` leaves it out everywhere).

Guidance is two-pass, with a call for each half as in stock, and each row of pixels of each channel is brought back to
the norm of the positive output: that is what stock's `cfg_normalization` does to latents. Stock guides at scales above
1 only and ignores the others, here 1 alone is none. Left out: stock's `cfg_trunc_ratio`, which ends guidance after a
share of the steps and does nothing by default; the model's card draws with 0.25.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import Lumina2Transformer2DModel
from torch import Tensor

from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.families.sana import prepare_gemma
from flowrl.pipelines.shared import common, stock_schedules
from flowrl.pipelines.shared.cards import Grid, ImageOptions, embedding, sample_size
from flowrl.pipelines.shared.family_pipeline import Family
from flowrl.samplers.guidance_rules import linear_cfg, qwen_norm_rescale

LORA_TARGETS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
"""All projections of attention, refiners included."""


@dataclass(frozen=True, kw_only=True)
class Lumina2Options(ImageOptions):
    """Options of Lumina Image 2.0."""

    system_prompt: bool = True
    """Put stock's sentence before every prompt but the empty one."""
    normalise: bool = True
    """Bring guided outputs back to the norms of the positive ones (stock's `cfg_normalization`)."""


class AllRead(Tensor):
    """A mask without numbers, for tokens that are all read: the network asks its mask how long prompts are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.sum:
            b, length = args[0].shape
            return torch.full((b,), length)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


FAMILY = Family(
    name="lumina2", title="Lumina Image 2.0", network=Lumina2Transformer2DModel, lora_targets=LORA_TARGETS,
    options=Lumina2Options, encoders=("text_encoder",), length=256, own_size=sample_size,
    # Positions are looked up in tables of so many rows and columns of tokens
    grid=lambda config: Grid(channels=config.in_channels, patch=config.patch_size, most=min(config.axes_lens[1:])),
    # Embeddings and the mask of those that are the prompt's, on its left; without stock's sentence it is read as stock
    # reads a negative prompt, which needs a positive one
    embed=lambda p, prompt, sources: embedding("embeds", "mask", do_classifier_free_guidance=False)(p, prompt, sources)
    if prompt and p.options.system_prompt
    else embedding("", "", "embeds", "mask", negative_prompt=[prompt])(p, "", sources),
    arguments=lambda p, x, timestep, cond: common.masked_arguments(x, 1 - timestep / 1000, cond),
    read=lambda p, output, x: -output,
    conditioning=lambda p, tokens: {
        "embeds": common.meta(1, tokens, p.card.network.cap_feat_dim),
        "mask": common.meta(1, tokens).as_subclass(AllRead),
    },
    # The rule is even in the network's sign, which `read` has turned
    guided=lambda p, asked: common.two_pass_guidance(
        asked, rule=qwen_norm_rescale if p.options.normalise else linear_cfg, apart=True
    ),
    # If a scheduler shifts by size, stock gives it the number of channels: published ones do not
    schedule=stock_schedules.shifted_by(lambda p: p.latent_shape[0]),
    # An image's position comes after its prompt's, in a table of so many
    longest=lambda card: int(card.network.axes_lens[0]) - 1,
    prepare_encoders=prepare_gemma,
    attention=Attends(head_sizes=lambda config: (config.hidden_size // config.num_attention_heads,), mask="keys"),
)  # fmt: skip
