"""HunyuanVideo: any checkpoint that stock `HunyuanVideoPipeline` loads.

Velocity network `HunyuanVideoTransformer3DModel`, distilled for guidance: fed 1000 * sigma and 1000 * the scale, one
call per step. A Llama encoder reads the prompt in a fixed template, which `max_sequence_length` does not count, and a
CLIP encoder gives the pooled embedding. The licence excludes the EU, the UK and South Korea.

Long clips are decoded in overlapping stretches of 16 frames, as in the stock pipeline.
"""

from __future__ import annotations

from diffusers import HunyuanVideoTransformer3DModel

from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Grid, Size, VideoOptions, embedding, given, refusing
from flowrl.pipelines.shared.family_pipeline import Family
from flowrl.pipelines.shared.stock_schedules import check_flow_scheduler, flow_levels_of
from flowrl.pipelines.weights.lora import JOINT_ATTENTION

FAMILY = Family(
    name="hunyuan_video", title="HunyuanVideo", network=HunyuanVideoTransformer3DModel, lora_targets=JOINT_ATTENTION,
    options=VideoOptions, encoders=("text_encoder", "text_encoder_2"), length=256,
    own_size=lambda card: Size(height=720, width=1280, num_frames=129, fps=24.0),
    grid=lambda config: Grid(channels=config.in_channels, patch=config.patch_size, frame_patch=config.patch_size_t),
    factors=lambda vae: (int(vae.get("spatial_compression_ratio", 8)), int(vae.get("temporal_compression_ratio", 4))),
    embed=embedding("embeds", "pooled", "mask", cast=("embeds", "pooled", "mask")),
    # In low precision the network reads 1000 * scale rounded: 6 becomes 6016 in bfloat16, as in stock
    arguments=lambda p, x, timestep, cond: common.masked_arguments(x, timestep, cond) | {
        "pooled_projections": cond.tensors["pooled"], "guidance": cond.tensors["guidance"].to(p.dtype) * 1000.0,
    },
    conditioning=given("text_embed_dim", pooled="pooled_projection_dim", mask=True), guided=common.guide_by_input,
    passes=lambda card, scale: 1, schedule=flow_levels_of(sigmas="linspace"), check_scheduler=check_flow_scheduler,
    refuse=refusing((
        lambda card: not card.network.guidance_embeds,
        "the network of {card.model} has no guidance input (guidance_embeds false): pipeline.name=hunyuan_video is for "
        "the published HunyuanVideo, which is distilled for guidance",
    )),
    attention=Attends(mask="keys"),
)  # fmt: skip
