"""FLUX.1 Kontext: edits of one source image, any checkpoint that stock `FluxKontextPipeline` loads.

The network is FLUX.1's; it reads the source's latents as further tokens, whose positions differ in the first
coordinate. Sources are brought to the size that is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxKontextPipeline, FluxTransformer2DModel
from torch import Tensor, nn

from flowrl.pipelines import common, flux
from flowrl.pipelines import stock_schedules as schedules
from flowrl.pipelines.common import Embedded, Sources
from flowrl.samplers.guidance import Network, Velocity
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = (*flux.LORA_TARGETS, "proj_mlp")
"""FLUX.1's, and the feed-forward input of the single-stream blocks, as Flow-GRPO trains Kontext."""

KNOWN = {"black-forest-labs/FLUX.1-Kontext-dev": flux.FLUX_DEV}
"""Hub id -> its transformer's configuration: LoRA targets can be checked before gigabytes are fetched."""

LICENCES = {name: ("FLUX.1 [dev] Non-Commercial", True) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""


class Kontext:
    """A FLUX.1 Kontext pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    num_sources: tuple[int, int] = (1, 1)
    fps: float | None = None

    def __init__(
        self,
        pipe: FluxKontextPipeline,
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
        self._embedded = Embedded(self._encode_text)
        self._set_size(*size)

    def _set_size(self, height: int, width: int) -> None:
        self.latent_shape: tuple[int, ...] = flux.latent_shape(self.pipe, self.model, (height, width))
        self.image_shape: tuple[int, ...] = (3, height, width)
        drawn, source = (flux.token_ids(self.latent_shape, image) for image in (0, 1))
        self._ids, self._num_tokens = torch.cat([drawn, source]).to(self.device), len(drawn)
        self._images = Embedded(self._encode_source)  # another size has other latents

    def resized(self, height: int, width: int) -> Kontext:
        """The same networks drawing another size.

        Embeddings of prompts are shared. Sources are encoded anew, which the VAE can also after the text encoders are
        freed.
        """
        other = copy(self)
        other._set_size(height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts and encodes their sources, each distinct one once."""
        given = common.check_sources(sources, prompts, self.num_sources, "kontext")
        text = self._embedded(prompts, [()] * len(prompts), self.device)
        images = self._images([""] * len(prompts), given, self.device)
        return Conditioning({**text.tensors, **images.tensors})

    def _encode_text(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        return flux.encode_text(self.pipe, prompt, self.max_sequence_length, self.device, self.dtype)

    def _encode_source(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        (source,) = sources
        latents = self.encode_images(flux.covering(source.float(), *self.image_shape[1:])[None])
        return Conditioning({"image_latents": latents.to(self.dtype)})

    def free_text_encoders(self) -> None:
        """Drops the two text encoders from memory; new sources can still be encoded."""
        self._embedded.free(self.pipe, flux.ENCODERS)

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32; the network runs in the pipeline's dtype, its LoRA weights stay float32."""
        with common.autocast(self.device, self.dtype):
            tokens = torch.cat([common.pack(x.to(self.dtype)), common.pack(cond.tensors["image_latents"])], dim=1)
            output = flux.evaluate(self.denoiser, tokens, timestep, cond, self._ids)
        return common.unpack(output[:, : self._num_tokens].float(), self.latent_shape)

    def passes(self, scale: float) -> int:
        """One at every scale."""
        return 1

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """The scale as an input of the network; no negative prompt is read."""
        return flux.distilled_guidance(network, cond, scale, embeds=self.guidance_embeds, model=self.model)

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
        return common.write_lora(FluxKontextPipeline, folder, tensors, config)


def meta_denoiser(model: str) -> nn.Module | None:
    """The transformer without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(FluxTransformer2DModel, common.part_config(model, "transformer", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is a Kontext pipeline, and every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "kontext", ("FluxKontextPipeline",))
    common.check_bound(meta_denoiser(model), targets)


def load(
    model: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    height: int | None = None,
    width: int | None = None,
    max_sequence_length: int = 512,
    vae_slice: int = 8,
    gradient_checkpointing: bool = False,
) -> Kontext:
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of network and text encoders; the VAE stays in float32.
        device: where everything lives.
        height: pixels; None takes the stock pipeline's own, 1024.
        width: pixels; None takes the stock pipeline's own, 1024.
        max_sequence_length: T5 tokens.
        vae_slice: images decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).

    Raises:
        ValueError: nothing loadable there.
    """
    pipe = common.load_stock(FluxKontextPipeline, model, family="FLUX.1 Kontext", dtype=dtype)
    common.freeze(pipe, device, denoisers=("transformer",), gradient_checkpointing=gradient_checkpointing)
    own = pipe.default_sample_size * pipe.vae_scale_factor
    return Kontext(
        pipe,
        model=model,
        dtype=dtype,
        device=torch.device(device),
        size=(height or own, width or own),
        max_sequence_length=max_sequence_length,
        vae_slice=vae_slice,
    )


# ---- what `flowrl plan` asks -----------------------------------------------------------------------------------------


def default_size(network: nn.Module) -> tuple[int, int, int | None]:
    """Height and width in pixels that the model draws unless told otherwise; no frames."""
    return flux.default_size(network)


def meta_call(network: nn.Module, height: int, width: int, num_frames: int | None, text_tokens: int) -> dict[str, Any]:
    """Arguments of one evaluation of one sample with its source, without numbers in them.

    Raises:
        ValueError: the model cannot draw this size.
    """
    return flux.meta_call(network, height, width, num_frames, text_tokens, num_images=2)
