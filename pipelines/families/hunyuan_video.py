"""HunyuanVideo: any checkpoint that stock `HunyuanVideoPipeline` loads.

Velocity network `HunyuanVideoTransformer3DModel`, distilled for guidance: fed 1000 * sigma and 1000 * the scale, one
call per step. A Llama encoder reads the prompt in a fixed template, which `max_sequence_length` does not count, and a
CLIP encoder gives the pooled embedding. The licence excludes the EU, the UK and South Korea.

Long clips are decoded in overlapping stretches of 16 frames, as in the stock pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffusers import HunyuanVideoTransformer3DModel
from torch import Tensor

from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.shared import common, stock_schedules
from flowrl.pipelines.shared.cards import Card, Grid, Size, VideoOptions, given, one_pass
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.weights.lora import JOINT_ATTENTION
from flowrl.trajectory import Conditioning, Schedule


def _grid(config: Any) -> Grid:
    return Grid(channels=config.in_channels, patch=config.patch_size, frame_patch=config.patch_size_t)


def _factors(vae: Mapping[str, Any]) -> tuple[int, int]:
    return int(vae.get("spatial_compression_ratio", 8)), int(vae.get("temporal_compression_ratio", 4))


def _embed(p: FamilyPipeline, prompt: str, _: Sequence[Tensor]) -> dict[str, Tensor]:
    embeds, pooled, mask = p.pipe.encode_prompt([prompt], device=p.device, max_sequence_length=p.max_sequence_length)
    return {"embeds": embeds.to(p.dtype), "mask": mask.to(p.dtype), "pooled": pooled.to(p.dtype)}


def _arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    """In low precision the network reads 1000 * scale rounded: 6 becomes 6016 in bfloat16, as in stock."""
    tensors = cond.tensors
    return {
        "hidden_states": x, "timestep": timestep, "encoder_hidden_states": tensors["embeds"],
        "encoder_attention_mask": tensors["mask"], "pooled_projections": tensors["pooled"],
        "guidance": tensors["guidance"].to(p.dtype) * 1000.0,
    }  # fmt: skip


def _schedule(p: FamilyPipeline, num_steps: int, grid: str, shift: float | None) -> Schedule:
    """Grid "diffusers" is "linspace" here: the stock pipeline passes evenly spaced sigmas in."""
    return stock_schedules.flow_schedule(p.pipe.scheduler, num_steps, grid, shift, sigmas="linspace")


def _refuse(card: Card) -> None:
    if not card.network.guidance_embeds:
        raise ValueError(
            f"the network of {card.model} has no guidance input (guidance_embeds false): pipeline.name=hunyuan_video "
            "is for the published HunyuanVideo, which is distilled for guidance"
        )


FAMILY = Family(
    name="hunyuan_video", title="HunyuanVideo", network=HunyuanVideoTransformer3DModel, lora_targets=JOINT_ATTENTION,
    options=VideoOptions, encoders=("text_encoder", "text_encoder_2"), length=256,
    own_size=lambda card: Size(height=720, width=1280, num_frames=129, fps=24.0), grid=_grid, factors=_factors,
    embed=_embed, arguments=_arguments, conditioning=given("text_embed_dim", pooled="pooled_projection_dim", mask=True),
    guided=common.embedded, passes=one_pass, schedule=_schedule, check_scheduler=stock_schedules.check_flow_scheduler,
    refuse=_refuse, attention=Attends(mask="keys"),
)  # fmt: skip
