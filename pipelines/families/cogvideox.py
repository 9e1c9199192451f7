"""CogVideoX 1.0: any checkpoint that stock `CogVideoXPipeline` loads.

A diffusion model: `CogVideoXTransformer3DModel` predicts v at variance-preserving latents. It runs in flow coordinates
(`samplers/flow_coordinates.py`) on the scheduler's own noise levels, whose signal-to-noise ratio is shifted and whose
last is noise alone. A T5 encoder; guidance is two-pass classifier-free guidance. Left out: the guidance that grows with
time (`use_dynamic_cfg`), and CogVideoX 1.5, which pads and drops latent frames.
"""

from __future__ import annotations

from diffusers import CogVideoXTransformer3DModel
from torch import Tensor

from flowrl.pipelines.families import sd
from flowrl.pipelines.shared import common, stock_schedules
from flowrl.pipelines.shared.cards import Card, Grid, Size, VideoOptions, embedding, refusing
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.runtime.private_names import get_3d_rotary_pos_embed

LORA_TARGETS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")
"""The projections of the attention over text and video."""


embed = embedding("embeds", do_classifier_free_guidance=False)
"""A prompt's embedding by a T5 encoder, padded."""


def _positions(p: FamilyPipeline) -> dict[str, Tensor]:
    """Rotations of tokens, if the network has no table of positions. Rows and columns go from 0 to the published
    number, as many as are drawn; the drawn rectangle lies in the published one's middle, at its aspect ratio."""
    config, (frames, height, width) = p.card.network, p.latent_shape[1:]
    if not config.use_rotary_positional_embeddings:
        return {}
    rows, columns = height // config.patch_size, width // config.patch_size
    own_rows, own_columns = config.sample_height // config.patch_size, config.sample_width // config.patch_size
    ratio = min(own_rows / rows, own_columns / columns)
    kept = round(rows * ratio), round(columns * ratio)
    start = round((own_rows - kept[0]) / 2), round((own_columns - kept[1]) / 2)
    cos, sin = get_3d_rotary_pos_embed(
        embed_dim=config.attention_head_dim,
        crops_coords=(start, (start[0] + kept[0], start[1] + kept[1])),
        grid_size=(rows, columns),
        temporal_size=frames,
        device=p.device,
    )
    return {"cos": cos, "sin": sin}


def _checked(card: Card, tokens: int) -> int:
    """Tokens of text, which have to be as many as the network was trained with."""
    own = card.network.max_text_seq_length
    if tokens != own:
        raise ValueError(
            f"pipeline.max_sequence_length ({tokens}) must be {own} for {card.model}: its network attends to padding "
            "as to words and was trained with so many tokens of text"
        )
    return tokens


FAMILY = Family(
    name="cogvideox", title="CogVideoX", network=CogVideoXTransformer3DModel, lora_targets=LORA_TARGETS,
    options=VideoOptions, encoders=("text_encoder",),
    own_size=lambda card: Size(
        height=card.network.sample_height * card.factors[0], width=card.network.sample_width * card.factors[0],
        num_frames=card.network.sample_frames, fps=8.0,
    ),
    grid=lambda config: Grid(channels=config.in_channels, patch=config.patch_size, odd_frames=True),
    factors=lambda vae: (common.pixels_per_latent(vae), int(vae.get("temporal_compression_ratio") or 4)), embed=embed,
    arguments=lambda p, x, timestep, cond: {
        "hidden_states": x.transpose(1, 2), "encoder_hidden_states": cond.tensors["embeds"], "timestep": timestep,
        "image_rotary_emb": (p.positions["cos"], p.positions["sin"]) if p.positions else None,
    },
    read=lambda p, output, x: output.transpose(1, 2),
    conditioning=lambda p, tokens: {
        "embeds": common.meta(1, _checked(p.card, tokens), p.card.network.text_embed_dim)
    },
    constants=lambda p: sd.levels_on(p.device, stock_schedules.plain_config(p.pipe.scheduler.config)),
    positions=_positions, evaluate=sd.evaluate, schedule=sd.own_levels,
    check_scheduler=stock_schedules.check_diffusion_scheduler,
    tokens=lambda card, options: _checked(
        card, 226 if options.max_sequence_length is None else int(options.max_sequence_length)
    ),
    refuse=refusing((
        lambda card: card.network.patch_size_t is not None,
        "{card.model} is a CogVideoX 1.5 (patch_size_t {card.network.patch_size_t}), which is not supported: take "
        "CogVideoX-2b or 5b",
    )),
)  # fmt: skip
