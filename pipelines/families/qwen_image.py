"""Qwen-Image: any checkpoint that stock `QwenImagePipeline` loads.

Velocity network `QwenImageTransformer2DModel`, fed sigma and 2 x 2 packed latents; one Qwen2.5-VL text encoder, whose
prompts have different lengths: they are padded to `max_sequence_length` with a mask, and the network is not given the
columns that are padding in all rows of a call, nor a mask where all rows are of one length, as in stock: attention
kernels that take no mask are the fast ones. Lengths stay on the host, so that no call waits for its device. Positions
of a prompt's tokens count from its start, so padding moves nothing. Guidance is two-pass, each token brought back to
the norm of the positive output, with a call for each half, as in stock, so that the rows of a group have one length in
either. Stock guides at scales above 1 only and ignores the others, here 1 alone is none and scales below it mix. Noise
levels are shifted by the image's size and stretched to end at the checkpoint's terminal value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn

from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.families.flux import packed_grid, read
from flowrl.pipelines.shared import common, stock_schedules
from flowrl.pipelines.shared.cards import embedding, square
from flowrl.pipelines.shared.common import pack, unpack
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.weights.lora import JOINT_ATTENTION
from flowrl.samplers.guidance_rules import qwen_norm_rescale
from flowrl.trajectory import Conditioning

LORA_TARGETS = (*JOINT_ATTENTION, "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
"""Joint attention and both streams' MLPs, as published RL recipes of Qwen-Image train them (rank 64, alpha 128).

The last block's text output is read by nothing: there `add_q_proj`, `to_add_out` and `txt_mlp` never get a gradient.
"""

LONGEST_PROMPT = 1024
"""Tokens of a prompt that stock keeps at most; 512 are stock's own number, and what published RL recipes keep."""


def pad_embeddings(embeds: Tensor, length: int) -> dict[str, Tensor]:
    """One prompt's embeddings `[1, n, ...]` padded to a fixed length, the mask `[1, length]` of its tokens, and n."""
    n = embeds.shape[1]
    mask = (torch.arange(length, device=embeds.device) < n)[None]
    return {
        "embeds": nn.functional.pad(embeds, (*(0, 0) * (embeds.ndim - 2), 0, length - n)),
        "mask": mask,
        "length_on_host": torch.tensor([n]),
    }


def _arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    """Embeddings and mask up to the call's longest prompt, no mask where all are that long; sources' tokens behind."""
    lengths, sources = cond.tensors["length_on_host"].tolist(), cond.tensors.get("sources")
    longest = -(-max(1, *lengths) // p.context) * p.context  # so that processes get equally many
    mask = None if min(lengths) == longest else cond.tensors["mask"][:, :longest]
    tokens, shapes = pack(x), [_rows_and_columns(x)]
    if sources is not None:
        b, count = sources.shape[:2]
        given = pack(sources.flatten(0, 1)).unflatten(0, (b, count)).flatten(1, 2)
        tokens, shapes = torch.cat([tokens, given], dim=1), [*shapes, *[_rows_and_columns(sources)] * count]
    return {
        "hidden_states": tokens,
        "timestep": timestep / 1000,
        "encoder_hidden_states": cond.tensors["embeds"][:, :longest],
        "encoder_hidden_states_mask": mask,
        "img_shapes": [shapes] * len(x),
    }


def _rows_and_columns(x: Tensor) -> tuple[int, int, int]:
    """Frames, rows and columns of tokens of latents `[..., h, w]`."""
    return 1, x.shape[-2] // 2, x.shape[-1] // 2


def padded_meta(tokens: int, *widths: int) -> dict[str, Tensor]:
    """Result of `pad_embeddings`, without numbers but with its mask and length."""
    mask, length = torch.ones(1, tokens, dtype=torch.bool), torch.tensor([tokens])
    return {"embeds": common.meta(1, tokens, *widths), "mask": mask, "length_on_host": length}


def conditioning(p: FamilyPipeline, tokens: int) -> dict[str, Tensor]:
    """A prompt's conditioning, without numbers but with its mask and length."""
    return padded_meta(tokens, p.card.network.joint_attention_dim)


def decode(p: FamilyPipeline, z: Tensor) -> Tensor:
    """Decodes images as videos of one frame."""
    return p.pipe.vae.decode(common.restore(p, z).unsqueeze(2), return_dict=False)[0][:, :, 0]


def encode(p: FamilyPipeline, x: Tensor) -> Tensor:
    """Latents of the posterior's mode, by the autoencoder's statistics."""
    return common.normalise(p, p.pipe.vae.encode(x.unsqueeze(2)).latent_dist.mode()[:, :, 0])


def factors(vae: Mapping[str, Any]) -> tuple[int, int]:
    """Factors of the video autoencoder, used on single frames."""
    return 2 * common.pixels_per_latent(vae, "temperal_downsample", 3), 1


FAMILY = Family(
    name="qwen_image", title="Qwen-Image", network=QwenImageTransformer2DModel, lora_targets=LORA_TARGETS,
    encoders=("text_encoder",), own_size=square(128), grid=packed_grid, factors=factors,
    constants=common.latent_statistics, arguments=_arguments, read=read, conditioning=conditioning,
    embed=lambda p, prompt, sources: pad_embeddings(
        embedding("embeds")(p, prompt, sources)["embeds"], p.max_sequence_length
    ),
    # Norms are those of tokens
    guided=lambda p, asked: common.two_pass_guidance(
        asked, rule=lambda no, yes, w: unpack(qwen_norm_rescale(pack(no), pack(yes), w), yes.shape[1:]), apart=True
    ),
    schedule=stock_schedules.by_image_size, decode=decode, encode=encode, longest=lambda card: LONGEST_PROMPT,
    attention=Attends(mask="keys"),
)  # fmt: skip
