"""Chroma: any checkpoint that stock `ChromaPipeline` loads.

Velocity network `ChromaTransformer2DModel`: FLUX.1's blocks, whose modulation is computed from time alone by one small
network, so that there is no pooled embedding and no guidance input. A T5 encoder reads prompts padded to a fixed
length; network and encoder are told which tokens are padding. Guidance is two-pass. Stock guides at scales above 1 only
and ignores the others; here 1 alone is none, and scales below it mix.

Stock hands the network's mask over as numbers, which attention adds: tokens that are read count e times as much as
padding, instead of alone. That is the default, since it is what stock draws; `masking: hidden` leaves padding out, as
the model was trained (the first padding token is read in both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import ChromaTransformer2DModel
from torch import Tensor

from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.families import flux
from flowrl.pipelines.shared import common, stock_schedules
from flowrl.pipelines.shared.cards import ImageOptions, embedding, given, square
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.trajectory import Conditioning

LONGEST_PROMPT = 512
"""Tokens of a prompt that stock takes at most."""


@dataclass(frozen=True, kw_only=True)
class ChromaOptions(ImageOptions):
    """Options of Chroma."""

    masking: Literal["stock", "hidden"] = "stock"
    """How attention treats padding: "stock" adds 1 to the scores among real tokens, "hidden" leaves padding out."""


_EMBED = embedding("embeds", "", "mask", cast=("embeds", "mask"), do_classifier_free_guidance=False)
"""A prompt's T5 embedding `[1, length, d]`, and its mask `[1, length]`: 1 up to the first padding token."""


def _arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    embeds, mask, ids, tokens = cond.tensors["embeds"], cond.tensors["mask"], p.positions["ids"], common.pack(x)
    read = torch.cat([mask, mask.new_ones(len(mask), tokens.shape[1])], dim=1)
    return {
        "hidden_states": tokens,
        "timestep": timestep / 1000,
        "encoder_hidden_states": embeds,
        "txt_ids": ids.new_zeros(embeds.shape[1], 3),
        "img_ids": ids,
        "attention_mask": read.bool() if p.options.masking == "hidden" else read,
    }


FAMILY = Family(
    name="chroma", title="Chroma", network=ChromaTransformer2DModel, lora_targets=flux.LORA_TARGETS,
    options=ChromaOptions, encoders=("text_encoder",), length=LONGEST_PROMPT, own_size=square(128),
    grid=flux.packed_grid, embed=_EMBED, arguments=_arguments, read=flux.read,
    conditioning=given("joint_attention_dim", mask=True), schedule=stock_schedules.by_image_size,
    positions=lambda p: {"ids": flux.token_ids(p.latent_shape).to(p.device)}, refuse=flux.refuse,
    longest=lambda card: LONGEST_PROMPT, attention=Attends(mask="bias"),
)  # fmt: skip
