"""HunyuanVideo 1.5: any checkpoint that stock `HunyuanVideo15Pipeline` or `HunyuanVideo15ImageToVideoPipeline` loads.

Velocity network `HunyuanVideo15Transformer3DModel`, fed 1000 * sigma; guidance is two-pass classifier-free guidance
(distilled checkpoints: scale 1). A Qwen2.5-VL reads the prompt in a fixed template, which `max_sequence_length` does
not count, and a ByT5 encoder reads what stands in quotation marks, letters to be drawn. Padding of both is masked, so
another length is the same function of prompts that fit. The licence excludes the EU, the UK and South Korea.

The network takes an image too, whose 729 tokens are masked when there is none. Here none are handed over, which is the
same function for less work. A first frame stands beside the noisy channels as well. Stock draws the shape of its image;
here the image is brought to the shape that is drawn, of which stock cuts off nothing more.

Its attention is given a mask of tokens by tokens, which takes memory that grows with their square.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffusers import HunyuanVideo15Transformer3DModel
from PIL import Image
from torch import Tensor, cat

from flowrl.media.images import to_pixels
from flowrl.pipelines.arithmetic.attention_words import Attends
from flowrl.pipelines.families import wan
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Card, Grid, Size, VideoOptions, check_channels, given, read_part
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.shared.stock_schedules import check_flow_scheduler, flow_levels_of
from flowrl.pipelines.weights.lora import JOINT_ATTENTION
from flowrl.trajectory import Conditioning

_IMAGE_TOKENS = 729  # of an image of 384 x 384
_GLYPHS = 256
"""Tokens of quoted text, always so many."""
_IMAGE_TO_VIDEO = "HunyuanVideo15ImageToVideoPipeline"
LINEAR = "ClassifierFreeGuidance"
_PLAIN = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0, "enabled": True}


def _own_size(card: Card) -> Size:
    """The stock pipeline's shape nearest to 16:9 of as many pixels as a square with the checkpoint's `target_size`."""
    from flowrl.runtime.private_names import HunyuanVideo15ImageProcessor

    shapes = HunyuanVideo15ImageProcessor(vae_scale_factor=card.factors[0])
    height, width = shapes.calculate_default_height_width(9, 16, card.network.target_size)
    return Size(height=height, width=width, num_frames=121, fps=24.0)


def embed(p: FamilyPipeline, prompt: str, _: Sequence[Tensor]) -> dict[str, Tensor]:
    """A prompt's tokens and those of what it quotes, with their masks."""
    p.pipe.tokenizer_max_length = p.max_sequence_length
    embeds, mask, glyphs, glyph_mask = p.pipe.encode_prompt([prompt], device=p.device)
    return {"embeds": embeds.to(p.dtype), "mask": mask, "glyphs": glyphs.to(p.dtype), "glyph_mask": glyph_mask}


def _embed_sources(p: FamilyPipeline, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    """The latents of a first frame, and SigLIP's tokens of it."""
    pixels = to_pixels(common.covering(sources[0], *p.image_shape[2:]))
    tokens = p.pipe.encode_image(Image.fromarray(pixels), 1, p.device, p.dtype)
    return {"beside": common.encode(p.pipe.vae, wan.as_clip(p, pixels)), "image": tokens}


def _arguments(p: FamilyPipeline, x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    """Beside the noisy channels stand those of a first frame and a mask that says whether there is one."""
    tensors, (b, channels, *rest) = cond.tensors, x.shape
    beside, none = x.new_zeros(b, channels + 1, *rest), x.new_zeros(b, 0, p.card.network.image_embed_dim)
    if "beside" in tensors:
        beside[:, :channels, :1], beside[:, channels:, :1] = tensors["beside"].to(x), 1
    return quoting_arguments(cat([x, beside], dim=1), timestep, cond) | {"image_embeds": tensors.get("image", none)}


def quoting_arguments(x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    """What a denoiser is called with that reads quoted text apart."""
    quoted = {"encoder_hidden_states_2": cond.tensors["glyphs"], "encoder_attention_mask_2": cond.tensors["glyph_mask"]}
    return common.masked_arguments(x, timestep, cond) | quoted


def _conditioning(p: FamilyPipeline, tokens: int) -> dict[str, Tensor]:
    found = given("text_embed_dim", mask=True, glyphs=_GLYPHS)(p, tokens)
    if p.num_sources[1]:
        found["beside"] = common.meta(1, p.latent_shape[0], 1, *p.latent_shape[2:])
        found["image"] = common.meta(1, _IMAGE_TOKENS, p.card.network.image_embed_dim)
    return found


def check_guider(model: str, config: Mapping[str, Any], name: str, *kinds: str) -> None:
    """Refuses a guider that does more than mix two predictions linearly at every step, or is none of `kinds`."""
    kind = config.get("_class_name", LINEAR)
    other = {key: config[key] for key, usual in _PLAIN.items() if config.get(key, usual) != usual}
    if kind not in (LINEAR, *kinds) or other:
        raise ValueError(
            f"the guider of {model} is {kind} with {other or 'its settings'}, and pipeline.name={name} guides as a "
            f"plain {' or '.join((LINEAR, *kinds))} at the scale of sampler.guidance_scale: take the guider folder of "
            "the published checkpoint"
        )


def _refuse(card: Card) -> None:
    if card.network.use_meanflow:
        raise ValueError(
            f"the network of {card.model} reads a second time (use_meanflow true), which its stock pipeline does not "
            "give it: take a checkpoint that is not distilled to few steps"
        )
    check_channels(
        card, "the noisy ones, as many of a first frame, and a mask", in_channels=2 * card.network.out_channels + 1
    )
    check_guider(card.model, read_part(card.model, "guider/guider_config.json") or {}, "hunyuan_video15")


def _suits(card: Card, options: Any) -> None:
    if options.vae_slice != 1:
        raise ValueError(
            f"pipeline.vae_slice ({options.vae_slice}) must be 1 for {card.model}: diffusers' autoencoder of "
            "HunyuanVideo 1.5 takes one clip at a time"
        )


def _prepare(p: FamilyPipeline) -> None:
    if p.pipe.guider is not None:  # there is none where nothing was read
        check_guider(p.model, stated(p.pipe.guider), "hunyuan_video15")


def stated(guider: Any) -> dict[str, Any]:
    """A loaded guider's class and settings."""
    return {"_class_name": type(guider).__name__, **guider.config}


FAMILY = Family(
    name="hunyuan_video15", title="HunyuanVideo 1.5", network=HunyuanVideo15Transformer3DModel,
    lora_targets=JOINT_ATTENTION, options=VideoOptions, encoders=("text_encoder", "text_encoder_2"), length=1000,
    exact=("vae", "image_encoder"),
    own_size=_own_size,
    grid=lambda config: Grid(channels=config.out_channels, patch=config.patch_size, frame_patch=config.patch_size_t),
    factors=lambda vae: (int(vae.get("spatial_compression_ratio", 16)), int(vae.get("temporal_compression_ratio", 4))),
    embed=embed, embed_sources=_embed_sources, arguments=_arguments, conditioning=_conditioning,
    count_sources=lambda card, options: (1, 1) if card.stock == _IMAGE_TO_VIDEO else (0, 0), num_sources=None,
    schedule=flow_levels_of(sigmas="linspace"),
    check_scheduler=check_flow_scheduler, refuse=_refuse, suits=_suits, prepare=_prepare,
    attention=Attends(mask="keys"),
)  # fmt: skip
