"""A checkpoint before its weights load: its card, its size, a family's options."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.locations import is_path
from flowrl.config.sections import Precision
from flowrl.pipelines.places.hub_files import small_json
from flowrl.pipelines.places.known_checkpoints import AGAIN, published
from flowrl.pipelines.places.single_files import is_single_file, small_part
from flowrl.pipelines.shared import common
from flowrl.runtime.files import read_json

HALVES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "left": lambda p: (..., slice(None, p.grid_shape[-1] // 2)),
    "right": lambda p: (..., slice(p.grid_shape[-1] // 2, None)),
}
"""Parts of a state whose last dimension is the width of images, and their indexes in a pipeline's states."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options of a family that makes images."""

    height: int | None = None
    """Pixels; None takes the checkpoint's own."""
    width: int | None = None
    """Pixels; None takes the checkpoint's own."""
    max_sequence_length: int | None = None
    """Tokens of a prompt; None takes the family's own."""
    vae_slice: int = 8
    """Images decoded at once."""
    vae_dtype: Precision = "float32"
    """Arithmetic of the autoencoder; its weights are float32."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass: same numbers, less memory, 40 % more time."""


@dataclass(frozen=True, kw_only=True)
class VideoOptions(ImageOptions):
    """Options of a family that makes videos."""

    vae_slice: int = 1
    """Clips decoded at once."""
    num_frames: int | None = None
    """Frames of a clip; None takes the checkpoint's own."""
    fps: float | None = None
    """Frames per second; None takes the checkpoint's own."""
    vae_tiling: bool = False
    """Decode in overlapping tiles, for less memory. Their seams are visible to rewards, and the policy can learn to
    exploit or to hide them: leave it off where memory allows."""


@dataclass(frozen=True, kw_only=True)
class FirstFrameOptions(VideoOptions):
    """Options of a family that draws from text, or from text and a first frame."""

    image_to_video: bool | None = None
    """Whether a source image is the first frame; None as the checkpoint's class says. Some of text to video do both."""


def from_first_frame(text: str, image: str) -> dict[str, Any]:
    """`stock_class` and `count_sources` of a family with a stock class for text and one for a first frame."""

    def stock_class(card: Card, options: Any) -> str | None:
        chosen: bool | None = options.image_to_video
        return card.stock if chosen is None else image if chosen else text

    return {
        "stock_class": stock_class,
        "count_sources": lambda card, options: (1, 1) if card.stock == image else (0, 0),
        "num_sources": None,
    }


def check_no_keys(options: Mapping[str, Any]) -> None:
    """Refuses `pipeline.options` that have a key of their own."""
    for name in {field.name for field in fields(ImageOptions)} | {"num_frames", "fps"}:
        if name in options:
            raise ValueError(f"pipeline.options.{name} is the key pipeline.{name}: set that instead")


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What a checkpoint says of itself without its weights."""

    model: str
    """Folder or hub id."""
    index: Mapping[str, Any]
    """Its model_index.json."""
    network: Any
    """Its denoiser's configuration with the class's defaults, by attribute; None if unknown."""
    vae: Mapping[str, Any]
    """Its autoencoder's configuration, or what is unusual in it."""
    factors: tuple[int, int]
    """Pixels of a latent's side, and frames of a latent frame."""

    @property
    def stock(self) -> str | None:
        """Name of the stock class."""
        return self.index.get("_class_name")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """How latents are laid out."""

    channels: int
    """Of a latent."""
    patch: int = 1
    """Latent pixels of a token's side."""
    multiple: int = 1
    """A side is a multiple of so many pixels, if that is more than a token's."""
    most: int | None = None
    """Tokens of a side that positions exist for; None is no limit."""
    frame_patch: int = 1
    """Latent frames of a token."""
    odd_frames: bool = False
    """Whether the number of latent frames must be odd: the first, and then pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The default size of a checkpoint, in pixels; images have no frames."""

    height: int
    width: int
    num_frames: int | None = None
    fps: float | None = None


def square(side: int) -> Callable[[Card], Size]:
    """An own size of so many latent pixels in height and width."""
    return lambda card: Size(height=side * card.factors[0], width=side * card.factors[0])


def sample_size(card: Card) -> Size:
    """The own size that a denoiser's configuration says: one number of latent pixels, or height and width."""
    found, factor = card.network.sample_size, card.factors[0]
    height, width = (found, found) if isinstance(found, int) else found
    return Size(height=height * factor, width=width * factor)


def clip_context(card: Card) -> int:
    """Tokens that CLIP's prompts always fill: its tokenizer's context."""
    return int((read_part(card.model, "tokenizer/tokenizer_config.json") or {}).get("model_max_length", 77))


def shapes(grid: Grid, card: Card, size: Size, *, videos: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one latent and of the image or clip decoded from it. Raises ValueError: the model cannot draw it."""
    _check_autoencoder(grid, card)
    factor, frame_factor = card.factors
    multiple = max(grid.multiple, factor * grid.patch)
    frames: tuple[int, ...] = ()
    if videos:
        step = frame_factor * (2 if grid.odd_frames else 1)
        found = common.check_frames(card.model, size.num_frames or 0, step, grid.frame_patch)
        frames = (2 * found - 1 if grid.odd_frames else found,)
    most = None if grid.most is None else multiple * grid.most
    common.check_size(card.model, (size.height, size.width), multiple, most)
    latent = (grid.channels, *frames, size.height // factor, size.width // factor)
    return latent, (*((size.num_frames or 0,) * len(frames)), 3, size.height, size.width)


def _check_autoencoder(grid: Grid, card: Card) -> None:
    """Refuses an autoencoder of other latents than the denoiser's, or whose scales are no numbers."""
    where, channels = f"{card.model}/vae/config.json", card.vae.get("latent_channels") or card.vae.get("z_dim")
    if channels is not None and grid.channels not in (channels, 4 * channels):  # a token of 2 x 2 latent pixels
        raise ValueError(
            f"{where} says that latents have {channels} channels, and the denoiser of {card.model} takes "
            f"{grid.channels}: take the autoencoder that the denoiser was trained with"
        )
    for key in ("scaling_factor", "shift_factor"):
        found = card.vae.get(key)
        number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
        if not (found is None or (number and (found or key == "shift_factor"))):
            raise ValueError(f"{where} has the {key} {found!r}, which is not such a number: {AGAIN}")
    for key in ("latents_mean", "latents_std"):
        found = card.vae.get(key)
        if channels is not None and isinstance(found, list | tuple) and len(found) != channels:
            raise ValueError(f"{where} has {len(found)} {key} for {channels} channels of latents: {AGAIN}")


def tokens(grid: Grid, card: Card, size: Size, *, videos: bool) -> int:
    """Tokens of one image or video. Raises ValueError: the model cannot draw this size."""
    latent, _ = shapes(grid, card, size, videos=videos)
    return math.prod(latent[1:]) // (grid.patch**2 * (grid.frame_patch if videos else 1))


Embed = Callable[[Any, str, Sequence[Tensor]], dict[str, Tensor]]
"""Tensors of one row for a prompt and its source images, of a pipeline."""


def given(
    embeds: str,
    *,
    pooled: str = "",
    mask: bool = False,
    length: bool = False,
    glyphs: int = 0,
    first_frame: bool = False,
) -> Callable[[Any, int], dict[str, Tensor]]:
    """A `conditioning` of embeddings, and perhaps pooled ones, a mask, the prompt's length, so many tokens of quoted
    text with their mask, and a first frame that is held where there are sources, of widths that the denoiser's entries
    say. Where its guidance is an input, the scale is among them."""

    def conditioning(p: Any, tokens: int) -> dict[str, Tensor]:
        config = vars(p.card.network)
        found = {"embeds": common.meta(1, tokens, config[embeds])}
        if mask:
            found["mask"] = common.meta(1, tokens)
        if glyphs:
            found["glyphs"] = common.meta(1, glyphs, config["text_embed_2_dim"] or 1)
            found["glyph_mask"] = common.meta(1, glyphs)
        if length:
            found["length_on_host"] = torch.tensor([tokens])
        if pooled:
            found["pooled"] = common.meta(1, config[pooled])
        if config.get("guidance_embeds"):
            found["guidance"] = common.meta(1)
        if first_frame and p.num_sources[1]:
            found["first_frame"] = common.meta(1, p.grid_shape[0], 1, *p.grid_shape[2:])
        return found

    return conditioning


def check_channels(card: Card, why: str, **wanted: int) -> None:
    """Refuses a network with other numbers of channels, by the entries of its configuration; `why` says what they are
    for."""
    found = {key: getattr(card.network, key) for key in wanted}
    if found != wanted:
        stated, needed = (", ".join(f"{key} {n}" for key, n in one.items()) for one in (found, wanted))
        raise ValueError(
            f"the network of {card.model} has {stated}, and needed is {needed}, {why}: leave pipeline.name out, or set "
            "it to the family of the model"
        )


def refusing(*reasons: tuple[Callable[[Card], Any], str]) -> Callable[[Card], None]:
    """A `refuse` of checkpoints for which one of some conditions holds; its words name what `card` has in braces, and
    as `wanted` what the condition gives."""

    def refuse(card: Card) -> None:
        for unfit, words in reasons:
            if wanted := unfit(card):
                raise ValueError(words.format(card=card, wanted=wanted))

    return refuse


def embedding(*names: str, cast: Sequence[str] = ("embeds", "pooled"), **options: Any) -> Embed:
    """An `embed` by stock's `encode_prompt`: what it returns, in order, under these names; "" leaves a thing out."""

    def embed(p: Any, prompt: str, _: Sequence[Tensor]) -> dict[str, Tensor]:
        found = p.pipe.encode_prompt([prompt], device=p.device, max_sequence_length=p.max_sequence_length, **options)
        named = {name: one for name, one in zip(names, found, strict=False) if name}
        return {name: one.to(p.dtype) if name in cast else one for name, one in named.items()}

    return embed


def usual(network: Any) -> dict[str, Any]:
    """The defaults of a class of networks."""
    parameters = inspect.signature(network.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def check_class(card: Card, family: str, stock: Sequence[str]) -> None:
    """Refuses a checkpoint of another family. Raises ValueError: the family does not load its stock class."""
    if card.stock not in stock:
        raise ValueError(
            f"{card.model} is a {card.stock}, and pipeline.name={family} loads {' or '.join(stock)}: leave "
            "pipeline.name out, or set it to the family of the model"
        )


def read_part(model: str, name: str) -> dict[str, Any] | None:
    """A small JSON file of a folder, of a hub id that is not listed here, or beside a single file; or None.
    For published checkpoints `published.json` has all that is needed, and the hub is not asked."""
    if not Path(model).exists():
        return None if published(model) is not None or is_path(model) else small_json(model, name)
    if is_single_file(model):
        return small_part(model, name)
    path = Path(model) / name
    return read_json(path, AGAIN, finite=False) if path.is_file() else None
