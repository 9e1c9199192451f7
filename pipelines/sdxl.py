"""Stable Diffusion XL: any checkpoint that stock `StableDiffusionXLPipeline` loads.

A `UNet2DConditionModel` that predicts noise or v, in flow coordinates as `flowrl.pipelines.sd` says, and two CLIP
encoders. The network is told the size that is drawn as original and as target size, without crop. Guidance is two-pass
classifier-free guidance. Left out: guidance rescale, clip skip, the watermark and the refiner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor, nn

from flowrl.pipelines import common, sd
from flowrl.pipelines.common import Embedded, Sources
from flowrl.samplers.flow_coordinates import diffusion_schedule, flow_levels, prediction_of
from flowrl.samplers.guidance import Network, Velocity
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = sd.LORA_TARGETS
"""All projections of self- and cross-attention (diffusers' own scripts)."""

SDXL_BASE: dict[str, Any] = {
    "sample_size": 128, "in_channels": 4, "out_channels": 4, "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048, "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
"""The dimensions of Stable Diffusion XL's network."""

KNOWN = {"stabilityai/stable-diffusion-xl-base-1.0": SDXL_BASE}
"""Hub id -> its network's configuration."""

LICENCES = {name: ("CreativeML Open RAIL++-M", False) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""

_ENCODERS = ("text_encoder", "text_encoder_2")


class SDXL:
    """A Stable Diffusion XL pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    num_sources: tuple[int, int] = (0, 0)
    fps: float | None = None

    def __init__(
        self,
        pipe: StableDiffusionXLPipeline,
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
        self.levels = sd.levels_on(device, flow_levels(pipe.scheduler.config))
        self.prediction = prediction_of(pipe.scheduler.config)
        self._embedded = Embedded(self._encode_one)
        self._set_size(*size)

    def _set_size(self, height: int, width: int) -> None:
        factor = self.pipe.vae_scale_factor
        common.check_size(self.model, (height, width), factor)
        self.image_shape: tuple[int, ...] = (3, height, width)
        self.latent_shape: tuple[int, ...] = (self.pipe.unet.config.in_channels, height // factor, width // factor)
        # Original size, crop, target size; held on the device, so that no network call waits for it.
        self._time_ids = torch.tensor([height, width, 0, 0, height, width], dtype=self.dtype, device=self.device)

    def resized(self, height: int, width: int) -> SDXL:
        """The same networks drawing another size."""
        other = copy(self)
        other._set_size(height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts, each distinct one once.

        The empty prompt is stock's missing negative prompt: all zeros where the checkpoint says so
        (`force_zeros_for_empty_prompt`, which the published ones do). Any other text is embedded, also as a negative.
        """
        given = common.check_sources(sources, prompts, self.num_sources, "sdxl")
        return self._embedded(prompts, given, self.device)

    def _encode_one(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        embeds, _, pooled, _ = self.pipe.encode_prompt([prompt], device=self.device, do_classifier_free_guidance=False)
        if not prompt and self.pipe.config.force_zeros_for_empty_prompt:
            embeds, pooled = torch.zeros_like(embeds), torch.zeros_like(pooled)
        return Conditioning({"embeds": embeds.to(self.dtype), "pooled": pooled.to(self.dtype)})

    def free_text_encoders(self) -> None:
        """Drops both text encoders from memory."""
        self._embedded.free(self.pipe, _ENCODERS)

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32 of latents in flow coordinates, at a timestep that need not be an integer."""

        def unet(sample: Tensor, time: Tensor) -> Tensor:
            pooled = cond.tensors["pooled"]
            with common.autocast(self.device, self.dtype):
                output = self.denoiser(
                    sample.to(self.dtype),
                    time,
                    encoder_hidden_states=cond.tensors["embeds"],
                    added_cond_kwargs={"text_embeds": pooled, "time_ids": self._time_ids.expand(len(pooled), -1)},
                    return_dict=False,
                )
            return output[0]  # type: ignore[no-any-return]

        return sd.flow_velocity(unet, x, timestep, self.levels, self.prediction)

    def passes(self, scale: float) -> int:
        """Two where guidance is on, at any scale but 1."""
        return common.two_passes(scale)

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """Classifier-free guidance in two passes; the same of velocities as of noise or v."""
        return common.two_pass_guidance(network, cond, negative, scale)

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Grid "diffusers" has the scheduler's own spacing, "linspace" goes evenly over all timesteps."""
        sd.refuse_shift(self.model, shift)
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
        return common.write_lora(StableDiffusionXLPipeline, folder, tensors, config, part="unet")


def meta_denoiser(model: str) -> nn.Module | None:
    """The network without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(UNet2DConditionModel, common.part_config(model, "unet", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is such a pipeline, and every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "sdxl", ("StableDiffusionXLPipeline",))
    sd.check_scheduler(model)
    unet = meta_denoiser(model)
    sd.check_unet(model, unet)
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
) -> SDXL:
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of network and text encoders; the VAE stays in float32.
        device: where everything lives.
        height: pixels; None takes the checkpoint's own.
        width: pixels; None takes the checkpoint's own.
        max_sequence_length: None, or the tokenizers' own length, to which all prompts are padded.
        vae_slice: images decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).

    Raises:
        ValueError: nothing loadable there, or a model that this family does not draw with.
    """
    pipe = common.load_stock(
        StableDiffusionXLPipeline, model, family="Stable Diffusion XL", dtype=dtype, add_watermarker=False,
        feature_extractor=None, image_encoder=None,
    )  # fmt: skip
    sd.check_unet(model, pipe.unet)
    sd.check_context(model, pipe.tokenizer, max_sequence_length)
    common.freeze(pipe, device, denoisers=("unet",), gradient_checkpointing=gradient_checkpointing)
    own = sd.own_size(pipe)
    return SDXL(
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
    return sd.default_size(network)


def text_tokens(model: str, max_sequence_length: int) -> int:
    """Tokens of a prompt: the tokenizers' context, which prompts always fill."""
    return sd.text_tokens(model, max_sequence_length)


def meta_call(network: Any, height: int, width: int, num_frames: int | None, text_tokens: int) -> dict[str, Any]:
    """Arguments of one evaluation of one sample, without numbers in them.

    Raises:
        ValueError: the model cannot draw this size.
    """
    config = network.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    added = {"text_embeds": torch.empty(1, pooled, device="meta"), "time_ids": torch.empty(1, 6, device="meta")}
    return sd.meta_call(network, height, width, num_frames, text_tokens) | {"added_cond_kwargs": added}
