"""FLUX.2: any checkpoint that stock `Flux2Pipeline` (dev) or `Flux2KleinPipeline` (klein, distilled or base) loads.

Velocity network `Flux2Transformer2DModel`, fed sigma and one token per latent pixel: latents are the VAE's, folded
2 x 2 into channels and whitened by the statistics that the VAE carries. One language model embeds prompts (Mistral for
dev, Qwen3 for klein). Guidance is an input of the network (dev), two passes (klein base), or there is none (klein).

A prompt may have reference images, which the network reads as further tokens; they are brought to the size that is
drawn (stock keeps each one's own size up to a megapixel).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel
from torch import Tensor, nn

from flowrl.pipelines.shared import common, stock_schedules
from flowrl.pipelines.shared.cards import Card, Grid, ImageOptions, embedding, given, square
from flowrl.pipelines.shared.common import Guidance
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.weights.lora import JOINT_ATTENTION
from flowrl.samplers.guidance import Velocity
from flowrl.trajectory import Conditioning

LORA_TARGETS = (
    *JOINT_ATTENTION,
    "ff.linear_in",
    "ff.linear_out",
    "ff_context.linear_in",
    "ff_context.linear_out",
    "attn.to_qkv_mlp_proj",
)
"""All of the double-stream blocks, and the fused input projection of the single-stream ones."""


@dataclass(frozen=True, kw_only=True)
class Flux2Options(ImageOptions):
    """Options of FLUX.2."""

    max_references: int = 0
    """Most source images of a prompt; every prompt has room for as many."""

    def __post_init__(self) -> None:
        if self.max_references < 0:
            raise ValueError(f"pipeline.options.max_references must be at least 0, got {self.max_references}")


def _embed_sources(p: FamilyPipeline, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    latents = torch.zeros(1, p.num_sources[1], *p.latent_shape, dtype=p.dtype, device=p.device)
    for place, source in enumerate(sources):
        latents[0, place] = p.encode_images(common.covering(source.float(), *p.image_shape[1:])[None])[0]
    return {"references": latents, "num_references_on_host": torch.tensor([len(sources)])}


def _arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    """All samples have as many references as the first one."""
    embeds, tokens = cond.tensors["embeds"], pack(x)
    count = int(cond.tensors["num_references_on_host"][0]) if p.num_sources[1] else 0
    if count:
        references = cond.tensors["references"][:, :count]
        tokens = torch.cat([tokens, *(pack(image) for image in references.unbind(1))], dim=1)
    text_ids = torch.zeros(embeds.shape[1], 4, device=embeds.device)
    text_ids[:, 3] = torch.arange(embeds.shape[1], device=embeds.device)
    return {
        "hidden_states": tokens,
        "timestep": timestep / 1000,
        "guidance": cond.tensors.get("guidance"),
        "encoder_hidden_states": embeds,
        "txt_ids": text_ids[None],
        "img_ids": p.positions["ids"][None, : tokens.shape[1]],
    }


def two_passes(card: Card | None) -> bool:
    """Whether a checkpoint is guided in two passes: klein that is not distilled."""
    return card is not None and card.stock == "Flux2KleinPipeline" and not card.index.get("is_distilled")


def _guided(p: FamilyPipeline, asked: Guidance) -> Velocity:
    """dev: the scale as an input of the network; klein base: two passes, both with the prompt's references."""
    if not two_passes(p.card):
        embeds = p.card.stock == "Flux2Pipeline" and bool(p.card.network.guidance_embeds)
        return common.distilled_guidance(asked, embeds=embeds, model=p.model)
    if asked.negative is not None and p.num_sources[1]:
        shared = {name: asked.cond.tensors[name] for name in ("references", "num_references_on_host")}
        own = asked.negative.expand(len(asked.cond)).tensors
        asked = replace(asked, negative=Conditioning({**own, **shared}))
    return common.two_pass_guidance(asked)


def _constants(p: FamilyPipeline) -> dict[str, Tensor]:
    """Mean and standard deviation `[1, 4c, 1, 1]` of folded latents, which the VAE carries as a batch norm's."""
    vae = p.pipe.vae
    mean, variance = (value.view(1, -1, 1, 1) for value in (vae.bn.running_mean, vae.bn.running_var))
    return {"mean": mean, "std": (variance + vae.config.batch_norm_eps).sqrt()}


def pack(x: Tensor) -> Tensor:
    """Latents `[b, c, h, w]` as tokens, row by row, `[b, h * w, c]`."""
    return x.flatten(2).transpose(1, 2)


def token_ids(shape: Sequence[int], image: int = 0) -> Tensor:
    """Position of every token `[n, 4]`: (10 * image, row, column, 0); image 0 is the drawn one."""
    time, zero = torch.tensor([10 * image]), torch.zeros(1, dtype=torch.long)
    return torch.cartesian_prod(time, torch.arange(shape[1]), torch.arange(shape[2]), zero).float()


def empirical_mu(num_tokens: int, num_steps: int) -> float:
    """FLUX.2's logarithm of the shift, fitted by its authors to image size and number of steps. With n tokens it is
    `1.6927e-4 n + 0.45666666` at 200 steps and `8.73809524e-5 n + 1.89833333` at 10, linear in the steps between and
    beyond; above 4300 tokens the first holds for any number of steps."""
    at_200, at_10 = 1.6927e-4 * num_tokens + 0.45666666, 8.73809524e-5 * num_tokens + 1.89833333
    return at_200 if num_tokens > 4300 else at_200 + (at_200 - at_10) / 190 * (num_steps - 200)


FAMILY = Family(
    name="flux2", title="FLUX.2", network=Flux2Transformer2DModel, lora_targets=LORA_TARGETS, options=Flux2Options,
    encoders=("text_encoder",), num_sources=None, sources_option="max_references",
    source_size=lambda card, options, drawn: (drawn.height, drawn.width), own_size=square(64),
    grid=lambda config: Grid(channels=config.in_channels), factors=lambda vae: (2 * common.pixels_per_latent(vae), 1),
    constants=_constants, positions=lambda p: {
        "ids": torch.cat([token_ids(p.latent_shape, image) for image in range(1 + p.num_sources[1])]).to(p.device)
    }, embed=embedding("embeds"), embed_sources=_embed_sources,
    count_sources=lambda card, options: (0, options.max_references), arguments=_arguments,
    read=lambda p, output, x: output[:, : x.shape[2] * x.shape[3]].transpose(1, 2).reshape(x.shape),
    # Samples with different numbers of references are evaluated apart, as many calls as there are numbers
    evaluate=lambda p, x, t, cond: common.predict_by_kind(
        p, x, t, cond, cond.tensors["num_references_on_host"].tolist() if p.num_sources[1] else [0]
    ),
    conditioning=given("joint_attention_dim"), guided=_guided,
    passes=lambda card, scale: 2 if scale != 1 and two_passes(card) else 1,
    schedule=lambda p, num_steps, grid, shift: stock_schedules.stock_schedule(
        p.pipe.scheduler.config, num_steps, grid, empirical_mu(math.prod(p.latent_shape[1:]), num_steps), shift
    ),
    decode=lambda p, z: p.pipe.vae.decode(nn.functional.pixel_shuffle(common.restore(p, z), 2), return_dict=False)[0],
    encode=lambda p, x: common.normalise(p, nn.functional.pixel_unshuffle(p.pipe.vae.encode(x).latent_dist.mode(), 2)),
)  # fmt: skip
