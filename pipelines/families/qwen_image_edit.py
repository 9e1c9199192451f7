"""Qwen-Image-Edit, edits of one to several source images: any checkpoint of its two stock pipelines.

`QwenImageEditPipeline` (Qwen-Image-Edit) reads one source, `QwenImageEditPlusPipeline` (-2509, -2511) one to three; the
checkpoint says which it is. A source enters twice: its latents stand beside the noisy ones as further tokens, and the
Qwen2.5-VL text encoder sees it in the prompt. Positive and negative prompt are encoded with the same sources.

Rows of one batch need equal shapes. So all prompts of a run have the same number of sources, `num_sources`, and each
source is resized to one size (whatever its aspect ratio) before it is encoded: the size that is drawn, as published RL
recipes do, unless `source_height` and `source_width` say otherwise. Stock takes about 1024 x 1024 pixels at the
source's own aspect ratio. What the text encoder sees follows stock: that resized image in the first pipeline, about 384
x 384 pixels at the source's own aspect ratio in the second. Embeddings are padded to `max_sequence_length`, which
counts the images' tokens too, and has room for them by default; what is longer is refused: stock never cuts.

Everything else is as in `flowrl.pipelines.families.qwen_image`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowrl.media.images import to_pixels
from flowrl.pipelines.families import qwen_image
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.cards import Card, ImageOptions, read_part
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline

MOST_SOURCES = 3
"""Source images that the second pipeline is made for."""

TEXT_TOKENS = 512
"""Tokens beside the source images' that a prompt may have unless told otherwise."""

_SECOND = "QwenImageEditPlusPipeline"
_SEEN_AREA = 384 * 384  # pixels of a source as the second pipeline's text encoder sees it


@dataclass(frozen=True, kw_only=True)
class QwenImageEditOptions(ImageOptions):
    """Options of Qwen-Image-Edit. `max_sequence_length` None takes the source images' tokens and 512 more. An image of
    512 x 512 takes 324, one of 1024 x 1024 1369, and one of about 384 x 384, which 2509 and 2511 read, 196."""

    num_sources: int = 1
    """Source images of every prompt; more than 1, and at most 3, with 2509 and 2511 only."""
    source_height: int | None = None
    """Pixels of a source image's latents; None takes the drawn height."""
    source_width: int | None = None
    """The same for the width."""


def source_size(card: Card, options: Any) -> tuple[int, int]:
    """Height and width of resized sources: from options, else the drawn size. Raises ValueError: not whole tokens."""
    drawn = qwen_image.FAMILY.size_of(card, options)
    size, multiple = (options.source_height or drawn.height, options.source_width or drawn.width), 2 * card.factors[0]
    if any(pixels <= 0 or pixels % multiple for pixels in size):
        raise ValueError(
            f"pipeline.options source_height and source_width {size} must be multiples of {multiple} for {card.model}"
        )
    return size


def _embed(p: FamilyPipeline, prompt: str, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    processor, (height, width) = p.pipe.image_processor, source_size(p.card, p.options)
    images = [Image.fromarray(to_pixels(source)) for source in sources]
    if p.card.stock == _SECOND:
        seen: Any = [processor.resize(image, *seen_size(image.width / image.height)) for image in images]
    else:
        seen = processor.resize(images[0], height, width)
    embeds, _ = p.pipe.encode_prompt(prompt=[prompt], image=seen, device=p.device)
    if embeds.shape[1] > p.max_sequence_length:
        raise ValueError(
            f"prompt {prompt!r} and its source images take {embeds.shape[1]} tokens: raise "
            f"pipeline.max_sequence_length ({p.max_sequence_length}) to at least that, or give smaller images"
        )
    ready = [processor.preprocess(image, height, width).to(p.device) for image in images]
    latents = torch.stack([p.family.encode(p, image) for image in ready], dim=1)
    return {**qwen_image.pad_embeddings(embeds.to(p.dtype), p.max_sequence_length), "sources": latents.to(p.dtype)}


def seen_size(ratio: float) -> tuple[int, int]:
    """Height and width, multiples of 32, at which the second pipeline's text encoder sees an image of a ratio."""
    width = math.sqrt(_SEEN_AREA * ratio)
    return round(width / ratio / 32) * 32, round(width / 32) * 32


def image_tokens(model: str, height: int, width: int) -> int:
    """Tokens of an image in the text encoder: squares of 28 x 28 pixels, once its sides are multiples of that. Sides
    are those that a folder's image processor brings it to, else the published one."""
    config = read_part(model, "processor/preprocessor_config.json")
    size = {"shortest_edge": 56 * 56, "longest_edge": 12_845_056}  # as published; fewest and most pixels
    if config is not None:
        size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280, **config.get("size", {})}
        size["shortest_edge"] = config.get("min_pixels") or size["shortest_edge"]
        size["longest_edge"] = config.get("max_pixels") or size["longest_edge"]
    side = (config or {}).get("patch_size", 14) * (config or {}).get("merge_size", 2)
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > size["longest_edge"]:
        scale = math.sqrt(height * width / size["longest_edge"])
        rows, columns = max(1, math.floor(height / scale / side)), max(1, math.floor(width / scale / side))
    elif rows * columns * side**2 < size["shortest_edge"]:
        scale = math.sqrt(size["shortest_edge"] / (height * width))
        rows, columns = math.ceil(height * scale / side), math.ceil(width * scale / side)
    return int(rows * columns)


def _tokens(card: Card, options: Any) -> int:
    """Tokens to pad prompts to: as given, else `TEXT_TOKENS` and those of the source images."""
    second, count, asked = card.stock == _SECOND, options.num_sources, options.max_sequence_length
    most = MOST_SOURCES if second else 1
    if not 1 <= count <= most:
        raise ValueError(
            f"pipeline.options num_sources ({count}) must lie in 1 .. {most} for {card.model}, a {card.stock}: "
            "Qwen-Image-Edit-2509 and -2511 read up to 3 source images"
        )
    # The second pipeline keeps an image's aspect ratio, which only the prompts tell: a square stands for all.
    seen = seen_size(1) if second else source_size(card, options)
    images = count * image_tokens(card.model, *seen)
    if asked is None:
        return TEXT_TOKENS + images
    drawn = qwen_image.FAMILY.size_of(card, options)
    most = 4096 - max(drawn.height, drawn.width, *source_size(card, options)) // (4 * card.factors[0])  # positions
    if not images < asked <= most:
        raise ValueError(
            f"pipeline.max_sequence_length ({asked}) must lie in {images + 1} .. {most}: the source images ({count}, "
            f"seen at {seen[0]} x {seen[1]}) take {images} tokens of it; leave it out for {TEXT_TOKENS + images}"
            + ("" if second else ", or set a smaller pipeline.options source_height and source_width")
        )
    return int(asked)


FAMILY = replace(
    qwen_image.FAMILY, name="qwen_image_edit", title="Qwen-Image-Edit", options=QwenImageEditOptions, num_sources=None,
    sources_option="num_sources", count_sources=lambda card, options: (options.num_sources, options.num_sources),
    # evaluations keep the sources of rollouts
    source_size=lambda card, options, drawn: source_size(card, options),
    # With one source of the drawn size
    conditioning=lambda p, tokens: {
        **qwen_image.conditioning(p, tokens), "sources": common.meta(1, 1, *p.latent_shape)
    },
    embed=_embed, suits=source_size, tokens=_tokens,
)  # fmt: skip
