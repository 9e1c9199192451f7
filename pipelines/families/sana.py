"""Sana 1 and 1.5: any checkpoint that stock `SanaPipeline` loads.

Flow network `SanaTransformer2DModel` with linear attention, whose sums are float32 in every dtype; an autoencoder of
factor 32 (`AutoencoderDC`), and Gemma 2 as text encoder. As in stock's own call, a prompt is read behind an instruction
to describe the image in more detail, and of all embeddings the first and the last ones are kept. The empty prompt,
which guidance leads away from, is read alone; a negative prompt with words is read behind the instruction too, where
stock reads it alone (`instruction=False` leaves it out everywhere). Guidance is two-pass classifier-free guidance. Left
out: cleaning of captions, and stock's rounding of sizes to its list of aspect ratios.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import SanaTransformer2DModel

from flowrl.pipelines.arithmetic.attention import exact_linear
from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Embed, Grid, ImageOptions, embedding, given, refusing, sample_size
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.shared.stock_schedules import check_flow_scheduler, flow_levels_of
from flowrl.runtime.private_names import sana_instruction

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""All projections of self- and cross-attention."""


@dataclass(frozen=True, kw_only=True)
class SanaOptions(ImageOptions):
    """Options of Sana; `max_sequence_length` does not count the instruction."""

    instruction: bool = True
    """Put stock's instruction (`complex_human_instruction`) before every prompt but the empty one."""


def embed_told(instruction: list[str] | None) -> Embed:
    """An `embed` of prompts behind an instruction, or alone."""
    return embedding("embeds", "mask", do_classifier_free_guidance=False, complex_human_instruction=instruction)


def prepare(p: FamilyPipeline) -> None:
    """Linear attention sums in float32."""
    exact_linear(p.pipe.transformer)


def prepare_gemma(p: FamilyPipeline) -> None:
    """Gemma overflows in float16: it runs in bfloat16 then."""
    if p.dtype == torch.float16:
        p.pipe.text_encoder.to(torch.bfloat16)


FAMILY = Family(
    name="sana", title="Sana", network=SanaTransformer2DModel, lora_targets=LORA_TARGETS, options=SanaOptions,
    encoders=("text_encoder",), length=300, own_size=sample_size,
    factors=lambda vae: (common.pixels_per_latent(vae, "encoder_block_out_channels", 6), 1),
    # Stock draws only multiples of 32 pixels
    grid=lambda config: Grid(channels=config.in_channels, patch=config.patch_size, multiple=32),
    embed=lambda p, prompt, sources: embed_told(
        sana_instruction() if prompt and p.options.instruction else None
    )(p, prompt, sources),
    arguments=lambda p, x, timestep, cond: common.masked_arguments(x, timestep * p.card.network.timestep_scale, cond),
    conditioning=given("caption_channels", mask=True), schedule=flow_levels_of(),
    # The autoencoder has no posterior
    encode=lambda p, x: p.pipe.vae.encode(x, return_dict=False)[0] * p.pipe.vae.config.scaling_factor,
    check_scheduler=check_flow_scheduler, prepare=prepare, prepare_encoders=prepare_gemma,
    refuse=refusing((
        lambda card: card.network.guidance_embeds,
        "the network of {card.model} takes the guidance scale as an input (guidance_embeds): it is distilled to few "
        "steps with its own path; train the model it was made from",
    )),
    attention=Attends(head_sizes=lambda config: (config.cross_attention_head_dim,), mask="bias"),
)  # fmt: skip
