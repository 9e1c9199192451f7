"""Qwen-Image-Edit: images from an instruction and source images, by two stock pipelines.

`QwenImageEditPipeline` (Qwen-Image-Edit) reads one source, `QwenImageEditPlusPipeline` (-2509, -2511) one to three; the
checkpoint says which it is. A source enters twice: its latents stand beside the noisy ones as further tokens, and the
Qwen2.5-VL text encoder sees it in the prompt. Positive and negative prompt are encoded with the same sources.

Rows of one batch need equal shapes. So all prompts of a run have the same number of sources, `num_sources`, and each
source is resized to one size (whatever its aspect ratio) before it is encoded: the size that is drawn, as published RL
recipes do, unless `source_height` and `source_width` say otherwise. Stock takes about 1024 x 1024 pixels at the
source's own aspect ratio. What the text encoder sees follows stock: that resized image in the first pipeline, about
384 x 384 pixels at the source's own aspect ratio in the second. Embeddings are padded to `max_sequence_length`, which
counts the images' tokens too, and has room for them unless told otherwise; what is longer is refused, because stock
never cuts them.

Everything else is as in `flowrl.pipelines.qwen_image`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE, calculate_dimensions
from PIL import Image
from torch import Tensor, nn
from transformers import Qwen2VLImageProcessor

from flowrl.media.images import to_pixels
from flowrl.pipelines import common, qwen_image
from flowrl.pipelines import stock_schedules as schedules
from flowrl.pipelines.common import Embedded, Sources, pack, unpack
from flowrl.pipelines.qwen_image import LORA_TARGETS as QWEN_TARGETS
from flowrl.pipelines.qwen_image import (
    QWEN_IMAGE,
    grid_of,
    images_of,
    latent_shape,
    latents_of,
    padded,
    rescaled_by_token,
    unpadded,
)
from flowrl.samplers.guidance import Network, Velocity
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = QWEN_TARGETS
"""Those of Qwen-Image, as published RL recipes of Qwen-Image-Edit train them."""

KNOWN = {
    "Qwen/Qwen-Image-Edit": QWEN_IMAGE,
    "Qwen/Qwen-Image-Edit-2509": QWEN_IMAGE,
    "Qwen/Qwen-Image-Edit-2511": {**QWEN_IMAGE, "zero_cond_t": True},
}
"""Hub id -> its transformer's configuration; that of 2511 treats the sources' tokens as free of noise."""

LICENCES = {name: ("Apache-2.0", False) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""

MOST_SOURCES = 3
"""Source images that the second pipeline is made for."""

TEXT_TOKENS = 512
"""Tokens beside the source images' that a prompt may have unless told otherwise."""

_FIRST, _SECOND = QwenImageEditPipeline.__name__, QwenImageEditPlusPipeline.__name__
_OWN_SIDE = 128  # latents of a drawn side, in both stock pipelines


class QwenImageEdit:
    """A Qwen-Image-Edit pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    fps = None

    def __init__(
        self,
        pipe: QwenImageEditPipeline | QwenImageEditPlusPipeline,
        *,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        size: tuple[int, int],
        source_size: tuple[int, int],
        num_sources: int,
        max_sequence_length: int,
        vae_slice: int,
    ) -> None:
        """Takes a loaded stock pipeline; sizes are (height, width) in pixels, `vae_slice` counts images."""
        self.pipe, self.model, self.dtype, self.device = pipe, model, dtype, device
        self.denoiser: nn.Module = pipe.transformer
        self.max_sequence_length, self.vae_slice = max_sequence_length, vae_slice
        self.num_sources, self.source_size = (num_sources, num_sources), source_size
        self._embedded = Embedded(self._encode_one)
        self._set_size(*size)

    def _set_size(self, height: int, width: int) -> None:
        common.check_size(self.model, (height, width), 2 * self.pipe.vae_scale_factor)
        self.image_shape: tuple[int, ...] = (3, height, width)
        self.latent_shape: tuple[int, ...] = latent_shape(self.pipe, height, width)

    def resized(self, height: int, width: int) -> QwenImageEdit:
        """The same networks drawing another size; sources keep theirs, so that what was encoded stays valid."""
        other = copy(self)
        other._set_size(height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts with their source images, each distinct one once.

        Raises:
            ValueError: a prompt has not `num_sources` sources, or is too long with them.
        """
        family = f"qwen_image_edit with pipeline.options num_sources={self.num_sources[0]}"
        given = common.check_sources(sources, prompts, self.num_sources, family)
        return self._embedded(prompts, given, self.device)

    def _encode_one(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        processor, (height, width) = self.pipe.image_processor, self.source_size
        images = [Image.fromarray(to_pixels(source)) for source in sources]
        if isinstance(self.pipe, QwenImageEditPlusPipeline):
            seen: Any = []
            for image in images:
                columns, rows = calculate_dimensions(CONDITION_IMAGE_SIZE, image.width / image.height)
                seen.append(processor.resize(image, rows, columns))
        else:
            seen = processor.resize(images[0], height, width)
        embeds, _ = self.pipe.encode_prompt(prompt=[prompt], image=seen, device=self.device)
        if embeds.shape[1] > self.max_sequence_length:
            raise ValueError(
                f"prompt {prompt!r} and its source images take {embeds.shape[1]} tokens: raise "
                f"pipeline.max_sequence_length ({self.max_sequence_length}) to at least that, or give smaller images"
            )
        ready = [processor.preprocess(image, height, width).to(self.device) for image in images]
        latents = torch.stack([latents_of(self.pipe.vae, image) for image in ready], dim=1)
        text = padded(embeds.to(self.dtype), self.max_sequence_length)
        return Conditioning({**text, "sources": latents.to(self.dtype)})

    def free_text_encoders(self) -> None:
        """Drops the text encoder from memory."""
        self._embedded.free(self.pipe, ("text_encoder",))

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32; the network runs in the pipeline's dtype, its LoRA weights stay float32."""
        embeds, mask = unpadded(cond)
        drawn, sources = pack(x.to(self.dtype)), cond.tensors["sources"]
        b, count = sources.shape[:2]
        given = pack(sources.flatten(0, 1)).unflatten(0, (b, count)).flatten(1, 2)
        with common.autocast(self.device, self.dtype):
            tokens = self.denoiser(
                hidden_states=torch.cat([drawn, given], dim=1),
                timestep=timestep / 1000,
                encoder_hidden_states=embeds,
                encoder_hidden_states_mask=mask,
                img_shapes=[[grid_of(x), *[grid_of(sources)] * count]] * b,
                return_dict=False,
            )[0]
        return unpack(tokens[:, : drawn.shape[1]].float(), x.shape[1:])

    def passes(self, scale: float) -> int:
        """Two where guidance is on, at any scale but 1."""
        return common.two_passes(scale)

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """Classifier-free guidance in two passes, rescaled token by token; the negative has the same sources."""
        return common.two_pass_guidance(network, cond, negative, scale, rule=rescaled_by_token)

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Both grids are the stock pipeline's; tokens of sources do not count in the shift."""
        return schedules.flux_schedule(self.pipe.scheduler.config, self.latent_shape, num_steps, grid, shift)

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Decodes slice by slice in float32."""
        return common.decode_slices(latents, self.vae_slice, lambda z: images_of(self.pipe.vae, z), gradient=gradient)

    def encode_images(self, images: Tensor) -> Tensor:
        """Mode of the VAE's posterior, normalised as `decode` undoes it."""
        return common.encode_slices(
            images, self.image_shape, self.vae_slice, lambda x: latents_of(self.pipe.vae, x), self.device
        )

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`."""
        return common.write_lora(type(self.pipe), folder, tensors, config)


def meta_denoiser(model: str) -> nn.Module | None:
    """The transformer without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(QwenImageTransformer2DModel, common.part_config(model, "transformer", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is a Qwen-Image-Edit pipeline, every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "qwen_image_edit", ("QwenImageEditPipeline", "QwenImageEditPlusPipeline"))
    common.check_bound(meta_denoiser(model), targets)


def _kind(model: str) -> str | None:
    """Name of the stock pipeline, before weights load; None where it is neither of the two or not known."""
    index = Path(model) / "model_index.json"
    if index.is_file():
        found = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
        return found if found in (_FIRST, _SECOND) else None
    return None if model not in KNOWN else _FIRST if model == "Qwen/Qwen-Image-Edit" else _SECOND


def _reader(model: str) -> Any:
    """What brings images to the size that the text encoder sees: of a folder, else as it is published."""
    folder = Path(model) / "processor"
    if folder.is_dir():
        return Qwen2VLImageProcessor.from_pretrained(folder)
    return Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 12_845_056})


def image_tokens(reader: Any, height: int, width: int) -> int:
    """Tokens of an image in the text encoder: squares of 28 x 28 pixels, once its sides are multiples of that."""
    return int(reader.get_number_of_image_patches(height, width)) // reader.merge_size**2


def _sizes(
    model: str, factor: int, drawn: tuple[int | None, int | None], source: tuple[int | None, int | None]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width of what is drawn and of sources, None filled in; `factor` is the autoencoder's."""
    own = _OWN_SIDE * factor
    size = drawn[0] or own, drawn[1] or own
    common.check_size(model, size, 2 * factor)
    source_size = source[0] or size[0], source[1] or size[1]
    if any(pixels <= 0 or pixels % (2 * factor) for pixels in source_size):
        raise ValueError(
            f"pipeline.options source_height and source_width {source_size} must be multiples of {2 * factor} for "
            f"{model}"
        )
    return size, source_size


def _length(
    model: str, kind: str, reader: Any, source_size: tuple[int, int], num_sources: int, given: int | None
) -> int:
    """Tokens that prompts are padded to: what is given, else `TEXT_TOKENS` and those of the source images."""
    most = MOST_SOURCES if kind == _SECOND else 1
    if not 1 <= num_sources <= most:
        raise ValueError(
            f"pipeline.options num_sources ({num_sources}) must lie in 1 .. {most} for {model}, a {kind}: "
            "Qwen-Image-Edit-2509 and -2511 read up to 3 source images"
        )
    # The second pipeline keeps an image's aspect ratio, which only the prompts tell: a square stands for all.
    seen = calculate_dimensions(CONDITION_IMAGE_SIZE, 1)[:2] if kind == _SECOND else source_size
    images = num_sources * image_tokens(reader, *seen)
    if given is None:
        return TEXT_TOKENS + images
    if given <= images:
        raise ValueError(
            f"pipeline.max_sequence_length ({given}) leaves no room for words: the source images ({num_sources}, "
            f"seen at {seen[0]} x {seen[1]}) take {images} tokens; leave it out for {TEXT_TOKENS + images}"
            + (", or set a smaller pipeline.options source_height and source_width" if kind == _FIRST else "")
        )
    return given


def load(
    model: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    height: int | None = None,
    width: int | None = None,
    max_sequence_length: int | None = None,
    vae_slice: int = 8,
    gradient_checkpointing: bool = False,
    num_sources: int = 1,
    source_height: int | None = None,
    source_width: int | None = None,
) -> QwenImageEdit:
    """Loads a checkpoint from a folder or the hub; which of the two pipelines it is, it says itself.

    Args:
        model: folder or hub id.
        dtype: of network, text encoder and sources' latents; the VAE stays in float32.
        device: where everything lives.
        height: pixels; None takes 1024.
        width: pixels; None takes 1024.
        max_sequence_length: tokens of a prompt with its source images; None takes the images' and 512 more. An
            image of 512 x 512 takes 324, one of 1024 x 1024 1369, and one of about 384 x 384, which 2509 and 2511
            read, 196.
        vae_slice: images decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).
        num_sources: source images of every prompt; more than 1, and at most 3, with 2509 and 2511 only.
        source_height: pixels of a source image's latents; None takes the height that is drawn.
        source_width: the same for the width.

    Raises:
        ValueError: nothing loadable there, a size or number of sources that the model cannot take, or no room for words
            beside the source images.
    """
    drawn, source, kind = (height, width), (source_height, source_width), _kind(model)
    vae = common.part_config(model, "vae", {name: {} for name in KNOWN})
    if kind is not None and vae is not None:  # all is refused once more below, where it was not known before
        levels = vae.get("temperal_downsample", (False, True, True))
        _, early = _sizes(model, 2 ** len(levels), drawn, source)
        _length(model, kind, _reader(model), early, num_sources, max_sequence_length)
    pipe = common.load_stock(DiffusionPipeline, model, family="Qwen-Image-Edit", dtype=dtype)
    if not isinstance(pipe, QwenImageEditPipeline | QwenImageEditPlusPipeline):
        raise ValueError(f"{model} is a {type(pipe).__name__}, no Qwen-Image-Edit: set pipeline.name to its family")
    size, source_size = _sizes(model, pipe.vae_scale_factor, drawn, source)
    length = _length(
        model, type(pipe).__name__, pipe.processor.image_processor, source_size, num_sources, max_sequence_length
    )
    common.freeze(pipe, device, denoisers=("transformer",), gradient_checkpointing=gradient_checkpointing)
    return QwenImageEdit(
        pipe,
        model=model,
        dtype=dtype,
        device=torch.device(device),
        size=size,
        source_size=source_size,
        num_sources=num_sources,
        max_sequence_length=length,
        vae_slice=vae_slice,
    )


# ---- what `flowrl plan` asks -----------------------------------------------------------------------------------------


def default_size(network: Any) -> tuple[int, int, int | None]:
    """Height and width in pixels that the model draws unless told otherwise; no frames."""
    return qwen_image.default_size(network)


def text_tokens(model: str, max_sequence_length: int) -> int:
    """Tokens that a prompt with one source is padded to; 0 asks for what `load` takes at the published size."""
    side = _OWN_SIDE * 8
    kind = _kind(model) or _FIRST
    return max_sequence_length or _length(model, kind, _reader(model), (side, side), 1, None)


def meta_call(network: Any, height: int, width: int, num_frames: int | None, text_tokens: int) -> dict[str, Any]:
    """Arguments of one evaluation of one sample with one source of the drawn size, without numbers in them.

    Raises:
        ValueError: the model cannot draw this size.
    """
    return qwen_image.meta_call(network, height, width, num_frames, text_tokens, num_images=2)
