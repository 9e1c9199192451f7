"""FLUX.1: any checkpoint that stock `FluxPipeline` loads, such as FLUX.1-dev and FLUX.1-schnell.

Velocity network `FluxTransformer2DModel`, fed sigma and tokens of 2 x 2 latent pixels; a CLIP and a T5 encoder. Grids
are the stock pipeline's `linspace(1, 1/T, T)`, shifted by resolution (dev) or statically (schnell). Guidance is an
input of the network (dev), or there is none (schnell). What Kontext and FLUX.2 share with it are functions here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn

from flowrl.pipelines import common
from flowrl.pipelines import stock_schedules as schedules
from flowrl.pipelines.common import Embedded, Sources, pack, unpack
from flowrl.samplers.guidance import Network, Velocity, conditioned
from flowrl.samplers.guidance_rules import embedded_guidance
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
)  # fmt: skip
"""Attention of all blocks and the feed-forward layers of the double-stream ones, as Flow-GRPO trains FLUX."""

FLUX_SCHNELL: dict[str, Any] = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
"""The dimensions of FLUX.1-schnell's transformer."""

FLUX_DEV: dict[str, Any] = {**FLUX_SCHNELL, "guidance_embeds": True}
"""The dimensions of FLUX.1-dev's transformer."""

KNOWN = {
    "black-forest-labs/FLUX.1-dev": FLUX_DEV,
    "black-forest-labs/FLUX.1-schnell": FLUX_SCHNELL,
    "black-forest-labs/FLUX.1-Krea-dev": FLUX_DEV,
}
"""Hub id -> its transformer's configuration: LoRA targets can be checked before gigabytes are fetched."""

LICENCES = {
    "black-forest-labs/FLUX.1-dev": ("FLUX.1 [dev] Non-Commercial", True),
    "black-forest-labs/FLUX.1-schnell": ("Apache 2.0", True),
    "black-forest-labs/FLUX.1-Krea-dev": ("FLUX.1 [dev] Non-Commercial", True),
}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""

ENCODERS = ("text_encoder", "text_encoder_2")
"""A FLUX.1 pipeline's text encoders."""

LENGTH, LENGTH_SCHNELL = 512, 256
"""T5 tokens that models with guidance as an input (dev), and those without (schnell), were released for."""

PATCH = 16
"""Pixels of a token's side, in every published checkpoint of FLUX.1 and FLUX.2."""


class Flux:
    """A FLUX.1 pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    num_sources: tuple[int, int] = (0, 0)
    fps: float | None = None

    def __init__(
        self,
        pipe: FluxPipeline,
        *,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        size: tuple[int, int],
        max_sequence_length: int,
        vae_slice: int,
    ) -> None:
        """Takes a loaded stock pipeline; `size` is (height, width) in pixels, `vae_slice` counts images."""
        self.pipe, self.model, self.dtype, self.device = pipe, model, dtype, device
        self.denoiser: nn.Module = pipe.transformer
        self.guidance_embeds: bool = pipe.transformer.config.guidance_embeds
        self.max_sequence_length, self.vae_slice = max_sequence_length, vae_slice
        self._embedded = Embedded(self._encode_one)
        self._set_size(*size)

    def _set_size(self, height: int, width: int) -> None:
        self.latent_shape: tuple[int, ...] = latent_shape(self.pipe, self.model, (height, width))
        self.image_shape: tuple[int, ...] = (3, height, width)
        self._ids = token_ids(self.latent_shape).to(self.device)

    def resized(self, height: int, width: int) -> Flux:
        """The same networks drawing another size."""
        other = copy(self)
        other._set_size(height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts, each distinct one once."""
        given = common.check_sources(sources, prompts, self.num_sources, "flux")
        return self._embedded(prompts, given, self.device)

    def _encode_one(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        return encode_text(self.pipe, prompt, self.max_sequence_length, self.device, self.dtype)

    def free_text_encoders(self) -> None:
        """Drops the two text encoders from memory."""
        self._embedded.free(self.pipe, ENCODERS)

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32; the network runs in the pipeline's dtype, its LoRA weights stay float32."""
        with common.autocast(self.device, self.dtype):
            tokens = evaluate(self.denoiser, pack(x.to(self.dtype)), timestep, cond, self._ids)
        return unpack(tokens.float(), self.latent_shape)

    def passes(self, scale: float) -> int:
        """One at every scale."""
        return 1

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """The scale as an input of the network; no negative prompt is read."""
        return distilled_guidance(network, cond, scale, embeds=self.guidance_embeds, model=self.model)

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Grids "diffusers", the stock pipeline's, and "linspace" are the same here."""
        return schedules.flux_schedule(self.pipe.scheduler.config, self.latent_shape, num_steps, grid, shift)

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Decodes slice by slice in float32."""
        return common.decode_slices(latents, self.vae_slice, partial(common.decoded, self.pipe.vae), gradient=gradient)

    def encode_images(self, images: Tensor) -> Tensor:
        """Mean of the VAE's posterior, shifted and scaled as `decode` undoes it."""
        return common.encode_slices(
            images, self.image_shape, self.vae_slice, partial(common.encoded, self.pipe.vae), self.device
        )

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`."""
        return common.write_lora(FluxPipeline, folder, tensors, config)


# ---- what FLUX.1 models share ----------------------------------------------------------------------------------------


def token_ids(shape: Sequence[int], image: int = 0) -> Tensor:
    """Position of every token `[n, 3]`: (image, row, column); image 0 is the one that is drawn."""
    rows, columns = shape[1] // 2, shape[2] // 2
    return torch.cartesian_prod(torch.tensor([image]), torch.arange(rows), torch.arange(columns)).float()


def latent_shape(pipe: Any, model: str, size: tuple[int, int]) -> tuple[int, ...]:
    """Shape of an unpacked latent at a size (height, width) in pixels.

    Raises:
        ValueError: the model cannot draw the size, or its network takes more than latents.
    """
    channels, wanted = pipe.vae.config.latent_channels, pipe.transformer.config.in_channels
    if wanted != 4 * channels:
        raise ValueError(
            f"the network of {model} takes {wanted} channels a token, and latents of its VAE have {4 * channels}: it "
            "is a fill or control model, which no pipeline.name loads"
        )
    common.check_size(model, size, 2 * pipe.vae_scale_factor)
    return (channels, size[0] // pipe.vae_scale_factor, size[1] // pipe.vae_scale_factor)


def encode_text(pipe: Any, prompt: str, length: int, device: torch.device, dtype: torch.dtype) -> Conditioning:
    """A prompt's T5 embedding `embeds` `[1, length, d]` and CLIP embedding `pooled` `[1, d]`, as stock embeds it."""
    embeds, pooled, _ = pipe.encode_prompt([prompt], device=device, max_sequence_length=length)
    return Conditioning({"embeds": embeds.to(dtype), "pooled": pooled.to(dtype)})


def evaluate(denoiser: nn.Module, tokens: Tensor, timestep: Tensor, cond: Conditioning, ids: Tensor) -> Tensor:
    """Output of a `FluxTransformer2DModel` for tokens `[b, n, 4c]` at positions `[n, 3]`."""
    embeds = cond.tensors["embeds"]
    output: Tensor = denoiser(
        hidden_states=tokens,
        timestep=timestep / 1000,
        guidance=cond.tensors.get("guidance"),
        pooled_projections=cond.tensors["pooled"],
        encoder_hidden_states=embeds,
        txt_ids=ids.new_zeros(embeds.shape[1], 3),
        img_ids=ids,
        return_dict=False,
    )[0]
    return output


def distilled_guidance(network: Network, cond: Conditioning, scale: float, *, embeds: bool, model: str) -> Velocity:
    """Guidance of a distilled model: the scale is an input of its network, or has to be 1.

    Raises:
        ValueError: the network has no input for the scale, and would ignore it.
    """
    if embeds:
        return conditioned(network, embedded_guidance(cond, scale))
    if scale != 1:
        raise ValueError(
            f"{model} is distilled and has no guidance, got scale {scale:g}: set sampler.guidance_scale=1 and "
            "eval.guidance_scale=1"
        )
    return conditioned(network, cond)


def prompt_length(model: str, guidance_embeds: bool, asked: int | None) -> int:
    """T5 tokens of a prompt: those asked for, or what the model was released for, 512 with guidance and 256 without.

    Raises:
        ValueError: a model without guidance is asked for more than it was released for.
    """
    own = LENGTH if guidance_embeds else LENGTH_SCHNELL
    if asked is not None and not guidance_embeds and asked > own:
        raise ValueError(
            f"pipeline.max_sequence_length ({asked}) must be at most {own} for {model}, a distilled model without "
            "guidance: null takes that"
        )
    return own if asked is None else asked


def covering(image: Tensor, height: int, width: int) -> Tensor:
    """An image `[3, h, w]` at a size: scaled (antialiased) until it covers it, cut off evenly where it sticks out.

    Nothing is stretched, and an image of that size already stays what it is: prompts' images are read so.
    """
    h, w = image.shape[1:]
    if (h, w) == (height, width):
        return image
    ratio = max(height / h, width / w)
    size = (max(height, round(h * ratio)), max(width, round(w * ratio)))
    scaled = nn.functional.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0].clamp(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return scaled[:, top : top + height, left : left + width]


# ---- loading ---------------------------------------------------------------------------------------------------------


def meta_denoiser(model: str) -> nn.Module | None:
    """The transformer without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(FluxTransformer2DModel, common.part_config(model, "transformer", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is a FLUX.1 pipeline, and every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "flux", ("FluxPipeline",))
    common.check_bound(meta_denoiser(model), targets)


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
) -> Flux:
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of network and text encoders; the VAE stays in float32.
        device: where everything lives.
        height: pixels; None takes the stock pipeline's own, 1024.
        width: pixels; None takes the stock pipeline's own, 1024.
        max_sequence_length: T5 tokens; None takes 512, and 256 (the most there is) for models without guidance.
        vae_slice: images decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).

    Raises:
        ValueError: nothing loadable there, or a size or length that the model cannot take.
    """
    pipe = common.load_stock(FluxPipeline, model, family="FLUX.1", dtype=dtype)
    length = prompt_length(model, pipe.transformer.config.guidance_embeds, max_sequence_length)
    common.freeze(pipe, device, denoisers=("transformer",), gradient_checkpointing=gradient_checkpointing)
    own = pipe.default_sample_size * pipe.vae_scale_factor
    return Flux(
        pipe,
        model=model,
        dtype=dtype,
        device=torch.device(device),
        size=(height or own, width or own),
        max_sequence_length=length,
        vae_slice=vae_slice,
    )


# ---- what `flowrl plan` asks -----------------------------------------------------------------------------------------


def default_size(network: nn.Module) -> tuple[int, int, int | None]:
    """Height and width in pixels that the model draws unless told otherwise; no frames."""
    return 1024, 1024, None


def text_tokens(model: str, max_sequence_length: int) -> int:
    """T5 tokens of every prompt; 0 asks for the model's own, which are dev's where nothing is known of it."""
    config = common.part_config(model, "transformer", KNOWN)
    embeds = config is None or bool(config.get("guidance_embeds"))
    return prompt_length(model, embeds, max_sequence_length or None)


def meta_call(
    network: nn.Module, height: int, width: int, num_frames: int | None, text_tokens: int, *, num_images: int = 1
) -> dict[str, Any]:
    """Arguments of one evaluation of one sample, without numbers in them; Kontext reads two images.

    Raises:
        ValueError: the model cannot draw this size.
    """
    config: Any = network.config
    common.check_size("this model", (height, width), PATCH)
    tokens = num_images * (height // PATCH) * (width // PATCH)
    shapes: dict[str, tuple[int, ...]] = {
        "hidden_states": (1, tokens, config.in_channels),
        "timestep": (1,),
        "pooled_projections": (1, config.pooled_projection_dim),
        "encoder_hidden_states": (1, text_tokens, config.joint_attention_dim),
        "img_ids": (tokens, 3),
        "txt_ids": (text_tokens, 3),
    }
    if config.guidance_embeds:
        shapes["guidance"] = (1,)
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()} | {"return_dict": False}
