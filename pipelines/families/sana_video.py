"""SANA-Video: any checkpoint that stock `SanaVideoPipeline` or `SanaImageToVideoPipeline` loads.

Velocity network `SanaVideoTransformer3DModel` with linear attention, fed 1000 * sigma; Gemma 2 as text encoder, and the
autoencoder of Wan 2.1 (480p) or LTX-2 (720p). Guidance is two-pass classifier-free guidance. As in stock's own call, a
prompt is read behind an instruction to describe the video in more detail, and of all embeddings the first and the last
ones are kept; a negative prompt is read alone. Left out: cleaning of captions, stock's rounding of sizes to its list
of aspect ratios (a size of that list is drawn as there). From a source image the first latent frame is held at it.

The model was trained on prompts that end in a score of motion. Stock's callers add it; here, `motion_score` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diffusers import SanaVideoTransformer3DModel
from torch import Tensor

from flowrl.media.images import to_pixels
from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.families import sana, wan
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import FirstFrameOptions, Grid, Size, from_first_frame, given, refusing
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.shared.stock_schedules import check_flow_scheduler, flow_levels_of
from flowrl.runtime.private_names import sana_instruction
from flowrl.trajectory import Conditioning

_STOCK = "SanaVideoPipeline"


@dataclass(frozen=True, kw_only=True)
class SanaVideoOptions(FirstFrameOptions):
    """Options of SANA-Video. Its network reads no `fps`; `max_sequence_length` leaves the instruction out."""

    instruction: bool = True
    """Put stock's instruction (`complex_human_instruction`) before every prompt but negative ones."""
    motion_score: int | None = None
    """Ends every prompt but negative ones in ` motion score: N.`, as the model card's example (30) does; None adds
    nothing, as stock's call. It is cut with the end of a prompt that is too long."""
    negative_prompt: str = ""
    """The run's negative prompt, if it has one, read alone as in stock; so is the empty one, always."""

    def __post_init__(self) -> None:
        if self.motion_score is not None and self.motion_score < 0:
            raise ValueError(f"motion_score ({self.motion_score}) must be at least 0; the model card's is 30")


def _embed(p: FamilyPipeline, prompt: str, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    alone, score = prompt in ("", p.options.negative_prompt), p.options.motion_score
    text = prompt if alone or score is None else f"{prompt} motion score: {score}."
    told = None if alone or not p.options.instruction else sana_instruction(_STOCK)
    return sana.embed_told(told)(p, text, sources)


def _arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    tokens = [side // patch for side, patch in zip(x.shape[2:], p.card.network.patch_size, strict=True)]
    times = common.token_times(timestep, cond, tokens)
    return common.masked_arguments(x, times if times is timestep else times.view(-1, 1, *tokens), cond)


def _constants(p: FamilyPipeline) -> dict[str, Tensor]:
    """What latents are normalised by: Wan's autoencoder holds it in its configuration, LTX-2's among its weights."""
    vae = p.pipe.vae
    if "latents_mean" in vae.config:
        return common.latent_statistics(p)
    mean, std = (value.view(-1, 1, 1, 1).float() for value in (vae.latents_mean, vae.latents_std))
    return {"mean": mean, "std": std}  # stock leaves that autoencoder's scaling_factor out


FAMILY = Family(
    name="sana_video", title="SANA-Video", network=SanaVideoTransformer3DModel, lora_targets=sana.LORA_TARGETS,
    options=SanaVideoOptions, encoders=("text_encoder",), length=300,
    # Stock draws only multiples of 32 pixels: one token or several, and one of the table's positions
    grid=lambda config: Grid(
        channels=config.in_channels, patch=max(config.patch_size[1:]), multiple=32,
        most=config.rope_max_seq_len // max(config.patch_size[1:]), frame_patch=config.patch_size[0],
    ),
    # The model card's: 480p at 8 pixels a latent's side, 720p (as stock tells them) at 32
    own_size=lambda card: Size(height=704, width=1280, num_frames=81, fps=16.0)
    if card.network.sample_size == 22 else Size(height=480, width=832, num_frames=81, fps=16.0),
    # LTX-2's autoencoder calls them ratios, Wan's factors
    factors=lambda vae: (
        int(vae.get("spatial_compression_ratio") or vae.get("scale_factor_spatial", 8)),
        int(vae.get("temporal_compression_ratio") or vae.get("scale_factor_temporal", 4)),
    ),
    embed=_embed, arguments=_arguments, conditioning=given("caption_channels", mask=True, first_frame=True),
    embed_sources=lambda p, shown: {"first_frame": wan.encode(p, wan.as_clip(p, to_pixels(shown[0])))},
    schedule=flow_levels_of(), constants=_constants,
    **from_first_frame("SanaVideoPipeline", "SanaImageToVideoPipeline"),
    decode=wan.FAMILY.decode, encode=wan.encode, prepare=sana.prepare,
    refuse=refusing((
        lambda card: card.network.guidance_embeds,
        "the network of {card.model} takes the guidance scale as an input (guidance_embeds), which stock's call never "
        "gives it: take a checkpoint without",
    ), (
        lambda card: card.network.out_channels not in (None, card.network.in_channels),
        "the network of {card.model} gives {card.network.out_channels} channels for latents of "
        "{card.network.in_channels}: only velocities can be trained, without a learned variance beside them",
    ), (
        lambda card: (card.index.get("vae") or ("", ""))[1] == "AutoencoderDC",
        "the autoencoder of {card.model} is AutoencoderDC, which decodes images alone: videos need Wan's "
        "(AutoencoderKLWan) or LTX-2's (AutoencoderKLLTX2Video)",
    )),
    prepare_encoders=sana.prepare_gemma, check_scheduler=check_flow_scheduler,
    attention=Attends(head_sizes=lambda config: (config.cross_attention_head_dim,), mask="bias"),
)  # fmt: skip
