"""Z-Image and Z-Image-Turbo: any checkpoint that stock `ZImagePipeline` loads.

The network `ZImageTransformer2DModel` predicts `clean - noise` and is fed `1 - sigma`; latents and prompts come as
lists, because prompts differ in length. A Conditioning holds them padded, with lengths.

The guidance scale counts from 0, as in stock: `positive + scale * (positive - negative)`, and 0 is no guidance, one
pass (Z-Image-Turbo is made for it, with 8 steps); scale 1 is guidance already. Stock's `cfg_normalization` is the
option `norm_cap`. Its `cfg_truncation`, which ends guidance above a time and is off by default, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import ZImageTransformer2DModel
from torch import Tensor, nn

from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.shared import common, stock_schedules
from flowrl.pipelines.shared.cards import Grid, ImageOptions, Size, given
from flowrl.pipelines.shared.common import Guidance
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.samplers.guidance import Velocity, conditioned
from flowrl.samplers.guidance_rules import Rule, z_image

LORA_TARGETS = (
    "attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0",
    "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
)  # fmt: skip
"""Attention and MLP of every block, refiners included: what Flow-Factory trains (rank 64, alpha 128)."""


@dataclass(frozen=True, kw_only=True)
class ZImageOptions(ImageOptions):
    """Options of Z-Image."""

    norm_cap: float | None = None
    """Longest guided output, in norms of the positive one (stock's `cfg_normalization`); None is no cap."""

    def __post_init__(self) -> None:
        if self.norm_cap is not None and not self.norm_cap > 0:
            raise ValueError(f"norm_cap must be positive, got {self.norm_cap}: null means no cap")


def _embed(p: FamilyPipeline, prompt: str, _: Sequence[Tensor]) -> dict[str, Tensor]:
    ([embeds], _none) = p.pipe.encode_prompt(
        [prompt], device=p.device, do_classifier_free_guidance=False, max_sequence_length=p.max_sequence_length
    )
    filled = nn.functional.pad(embeds.to(p.dtype), (0, 0, 0, p.max_sequence_length - len(embeds)))
    return {"embeds": filled[None], "length_on_host": torch.tensor([len(embeds)])}


def guided_from_zero(
    p: FamilyPipeline, asked: Guidance, *, distilled: bool, rule: Rule, apart: bool = False
) -> Velocity:
    """Guidance in two passes whose scale counts from 0, `positive + scale * (positive - negative)`; 0 is one pass.
    Raises ValueError: the scale is negative, or asks for a negative prompt and there is none; or it is not 0, and the
    model is distilled."""
    if (scale := asked.scale) == 0:
        return conditioned(asked.network, asked.cond)
    if distilled:
        raise ValueError(
            f"{p.model} is distilled to draw without guidance, which is scale 0 in this family, got scale {scale:g}: "
            "set sampler.guidance_scale=0 and eval.guidance_scale=0"
        )
    if not scale > 0 or asked.negative is None:
        raise ValueError(
            f"guidance at scale {scale} is not to be had: {p.family.title} takes positive scales with a negative "
            "prompt, and 0 for none"
        )
    return common.halves(asked, rule=rule, apart=apart)


FAMILY = Family(
    name="z_image", title="Z-Image", network=ZImageTransformer2DModel, lora_targets=LORA_TARGETS, options=ZImageOptions,
    encoders=("text_encoder",), own_size=lambda card: Size(height=1024, width=1024),
    # Positions are looked up in tables of so many rows and columns of tokens
    grid=lambda config: Grid(channels=config.in_channels, patch=2, most=min(config.axes_lens[1:])),
    embed=_embed, arguments=lambda p, x, timestep, cond: {
        "x": list(x.unsqueeze(2).unbind()), "t": (1000 - timestep) / 1000, "cap_feats": [
            one[:n] for one, n in zip(cond.tensors["embeds"], cond.tensors["length_on_host"].tolist(), strict=True)
        ],
    },
    read=lambda p, output, x: -torch.stack([sample.float() for sample in output]).squeeze(2),
    conditioning=given("cap_feat_dim", length=True), passes=lambda card, scale: 1 if scale == 0 else 2,
    guided=lambda p, asked: guided_from_zero(
        p, asked, distilled="turbo" in Path(p.model).name.lower(),
        # The rule is stated for the network's own sign, which `read` has turned
        rule=lambda no, yes, w: z_image(-no, -yes, w, norm_cap=p.options.norm_cap),
    ),
    schedule=stock_schedules.by_image_size,
    # A prompt is filled up to a multiple of 32 tokens, and the image's position comes after it
    longest=lambda card: int((card.network.axes_lens[0] - 2) // 32 * 32),
    attention=Attends(head_sizes=lambda config: (config.dim // config.n_heads,), mask="keys"),
)  # fmt: skip
