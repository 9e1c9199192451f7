"""LTX-Video 0.9: any checkpoint that stock `LTXPipeline` loads.

Velocity network `LTXVideoTransformer3DModel` on tokens, fed 1000 * sigma and the frame rate through its positions; a T5
encoder; sigma grids shifted by the number of tokens. Guidance is two-pass classifier-free guidance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from diffusers import LTXPipeline, LTXVideoTransformer3DModel
from torch import Tensor, nn

from flowrl.pipelines import common, video
from flowrl.pipelines import stock_schedules as schedules
from flowrl.pipelines.common import Embedded, Sources
from flowrl.samplers.guidance import Network, Velocity
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = (
    "attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0",
    "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0",
)  # fmt: skip
"""The projections of self- and cross-attention."""

LTX_2B: dict[str, Any] = {
    "in_channels": 128, "out_channels": 128, "patch_size": 1, "patch_size_t": 1, "num_attention_heads": 32,
    "attention_head_dim": 64, "cross_attention_dim": 2048, "num_layers": 28, "activation_fn": "gelu-approximate",
    "qk_norm": "rms_norm_across_heads", "norm_elementwise_affine": False, "norm_eps": 1e-6, "caption_channels": 4096,
    "attention_bias": True, "attention_out_bias": True,
}  # fmt: skip
"""The dimensions of the 2 B network of 0.9.0 to 0.9.6."""

KNOWN = {"Lightricks/LTX-Video": LTX_2B}
"""Hub id -> its transformer's configuration."""

LICENCES = {name: ("LTX-Video Open Weights", False) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""


class LTXVideo:
    """An LTX-Video pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    num_sources = (0, 0)

    def __init__(
        self,
        pipe: LTXPipeline,
        *,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        size: tuple[int, int, int],
        fps: float,
        max_sequence_length: int,
        vae_slice: int,
        decode_timestep: float,
    ) -> None:
        """Takes a loaded stock pipeline; `size` is (frames, height, width) in pixels, `vae_slice` counts clips."""
        self.pipe, self.model, self.dtype, self.device, self.fps = pipe, model, dtype, device, fps
        self.denoiser: nn.Module = pipe.transformer
        self.max_sequence_length, self.vae_slice, self.decode_timestep = max_sequence_length, vae_slice, decode_timestep
        vae = pipe.vae
        self._mean, self._std = (value.view(1, -1, 1, 1, 1).float() for value in (vae.latents_mean, vae.latents_std))
        self._std = self._std / vae.config.scaling_factor
        self._embedded = Embedded(self._encode_one)
        self._set_size(*size)

    def _set_size(self, num_frames: int, height: int, width: int) -> None:
        pipe = self.pipe
        factor, patch = pipe.vae_spatial_compression_ratio, pipe.transformer_spatial_patch_size
        frames = video.check_frames(
            self.model, num_frames, pipe.vae_temporal_compression_ratio, pipe.transformer_temporal_patch_size
        )
        common.check_size(self.model, (height, width), factor * patch)
        self.image_shape: tuple[int, ...] = (num_frames, 3, height, width)
        channels = pipe.vae.config.latent_channels
        self.latent_shape: tuple[int, ...] = (channels, frames, height // factor, width // factor)

    def resized(self, height: int, width: int) -> LTXVideo:
        """The same networks drawing another size."""
        other = copy(self)
        other._set_size(self.image_shape[0], height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts, each distinct one once."""
        given = common.check_sources(sources, prompts, self.num_sources, "ltx_video")
        return self._embedded(prompts, given, self.device)

    def _encode_one(self, prompt: str, _: Sequence[Tensor]) -> Conditioning:
        embeds, mask, _none, _nomask = self.pipe.encode_prompt(
            [prompt], do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length,
            device=self.device,
        )  # fmt: skip
        return Conditioning({"embeds": embeds.to(self.dtype), "mask": mask})

    def free_text_encoders(self) -> None:
        """Drops the text encoder from memory."""
        self._embedded.free(self.pipe, ("text_encoder",))

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32 of unpacked latents; the network sees one token a patch."""
        pipe, frames, height, width = self.pipe, *x.shape[2:]
        patch = (pipe.transformer_spatial_patch_size, pipe.transformer_temporal_patch_size)
        spatial, temporal = pipe.vae_spatial_compression_ratio, pipe.vae_temporal_compression_ratio
        grid = (frames // patch[1], height // patch[0], width // patch[0])
        with common.autocast(self.device, self.dtype):
            tokens = self.denoiser(
                hidden_states=pipe._pack_latents(x.to(self.dtype), *patch),
                encoder_hidden_states=cond.tensors["embeds"],
                timestep=timestep,
                encoder_attention_mask=cond.tensors["mask"],
                num_frames=grid[0],
                height=grid[1],
                width=grid[2],
                rope_interpolation_scale=(temporal / self.fps, spatial, spatial),
                return_dict=False,
            )[0]
        return pipe._unpack_latents(tokens.float(), *grid, *patch)  # type: ignore[no-any-return]

    def passes(self, scale: float) -> int:
        """Two where guidance is on, at any scale but 1."""
        return common.two_passes(scale)

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """Classifier-free guidance in two passes; scale 1 is one pass. The stock pipeline's rescale is left out."""
        return common.two_pass_guidance(network, cond, negative, scale)

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Grid "diffusers" is "linspace" here: the stock pipeline passes evenly spaced sigmas in."""
        config, (_, frames, height, width) = self.pipe.scheduler.config, self.latent_shape
        mu = schedules.own_mu(config, frames * height * width)
        return schedules.flow_schedule(self.pipe.scheduler, num_steps, grid, shift, sigmas="linspace", mu=mu)

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Decodes some clips at a time in float32."""
        vae = self.pipe.vae

        def decoded(z: Tensor) -> Tensor:
            time = z.new_full((len(z),), self.decode_timestep) if vae.config.timestep_conditioning else None
            return vae.decode(z * self._std + self._mean, time, return_dict=False)[0]  # type: ignore[no-any-return]

        return video.decode_clips(latents, self.vae_slice, decoded, gradient=gradient)

    def encode_images(self, images: Tensor) -> Tensor:
        """Mean of the VAE's posterior, normalised as `decode` undoes it."""
        return video.encode_clips(
            images, self.image_shape, self.vae_slice,
            lambda x: (self.pipe.vae.encode(x).latent_dist.mode() - self._mean) / self._std, self.device,
        )  # fmt: skip

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`."""
        return common.write_lora(LTXPipeline, folder, tensors, config)


def meta_denoiser(model: str) -> nn.Module | None:
    """The transformer without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(LTXVideoTransformer3DModel, common.part_config(model, "transformer", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is an LTX pipeline, and every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "ltx_video", ("LTXPipeline",))
    schedules.check_scheduler_folder(model)
    common.check_bound(meta_denoiser(model), targets)


def load(
    model: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    height: int | None = None,
    width: int | None = None,
    max_sequence_length: int = 128,
    vae_slice: int = 1,
    gradient_checkpointing: bool = False,
    num_frames: int | None = None,
    fps: float | None = None,
    vae_tiling: bool = False,
    decode_timestep: float = 0.0,
) -> LTXVideo:
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of network and text encoder; the autoencoder is float32.
        device: where everything lives.
        height: pixels; None takes 512.
        width: pixels; None takes 704.
        max_sequence_length: T5 tokens.
        vae_slice: clips decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).
        num_frames: of a clip, 1 and a multiple of 8; None takes 161.
        fps: frames a second, which the network reads; None takes 25.
        vae_tiling: decode in overlapping tiles, for less memory. Their seams are visible to rewards, and the policy can
            learn to exploit or to hide them: leave it off where memory allows.
        decode_timestep: what a decoder that denoises the last bit (0.9.1 on) is told. The noise that stock can add
            before is left out, so that equal latents have equal rewards (stock: `decode_noise_scale=0`).

    Raises:
        ValueError: nothing loadable there, or a size or number of frames that the model cannot draw.
    """
    pipe = common.load_stock(LTXPipeline, model, family="LTX-Video", dtype=dtype)
    schedules.check_flow_scheduler(model, {"_class_name": type(pipe.scheduler).__name__, **pipe.scheduler.config})
    if decode_timestep != 0 and not pipe.vae.config.timestep_conditioning:
        raise ValueError(f"decode_timestep ({decode_timestep}) has no effect: the decoder of {model} reads no timestep")
    common.freeze(pipe, device, denoisers=("transformer",), gradient_checkpointing=gradient_checkpointing)
    if vae_tiling:
        pipe.vae.enable_tiling()
    own = default_size(pipe.transformer)
    return LTXVideo(
        pipe,
        model=model,
        dtype=dtype,
        device=torch.device(device),
        size=(own[2] if num_frames is None else num_frames, height or own[0], width or own[1]),
        fps=fps or 25.0,
        max_sequence_length=max_sequence_length,
        vae_slice=vae_slice,
        decode_timestep=decode_timestep,
    )


# ---- what `flowrl plan` asks -----------------------------------------------------------------------------------------


def default_size(network: Any) -> tuple[int, int, int]:
    """Height, width and frames that the model draws unless told otherwise."""
    return 512, 704, 161


def meta_call(network: Any, height: int, width: int, num_frames: int | None, text_tokens: int) -> dict[str, Any]:
    """Arguments of one evaluation of one sample at 25 frames a second, without numbers in them.

    Raises:
        ValueError: the model cannot draw this size.
    """
    config = network.config
    patch = 32 * config.patch_size
    frames = video.check_frames("this model", num_frames or 0, 8, config.patch_size_t) // config.patch_size_t
    common.check_size("this model", (height, width), patch)
    grid = {"num_frames": frames, "height": height // patch, "width": width // patch}
    arguments = common.meta_arguments({
        "hidden_states": (1, math.prod(grid.values()), config.in_channels),
        "encoder_hidden_states": (1, text_tokens, config.caption_channels),
        "timestep": (1,),
        "encoder_attention_mask": (1, text_tokens),
    })  # fmt: skip
    return arguments | grid | {"rope_interpolation_scale": (8 / 25, 32, 32)}
