"""CogVideoX 1.0: any checkpoint that stock `CogVideoXPipeline` loads.

A diffusion model: `CogVideoXTransformer3DModel` predicts v at variance-preserving latents. It runs in flow coordinates
(`samplers/flow_coordinates.py`) on the scheduler's own noise levels, whose signal-to-noise ratio is shifted and whose
last is noise alone. A T5 encoder; guidance is two-pass classifier-free guidance. Left out: the guidance that grows with
time (`use_dynamic_cfg`), and CogVideoX 1.5, which pads and drops latent frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
from torch import Tensor, nn

from flowrl.pipelines import common, video
from flowrl.pipelines.common import Embedded, Sources
from flowrl.pipelines.sd import flow_velocity, levels_on, refuse_shift
from flowrl.samplers.flow_coordinates import (
    alpha_bars,
    diffusion_schedule,
    flow_levels,
    prediction_of,
)
from flowrl.samplers.guidance import Network, Velocity
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")
"""The projections of the attention over text and video."""

COGVIDEOX_2B: dict[str, Any] = {
    "num_attention_heads": 30, "attention_head_dim": 64, "in_channels": 16, "out_channels": 16, "time_embed_dim": 512,
    "text_embed_dim": 4096, "num_layers": 30, "sample_width": 90, "sample_height": 60, "sample_frames": 49,
    "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": 226,
    "use_rotary_positional_embeddings": False,
}  # fmt: skip
"""The dimensions of CogVideoX-2b's transformer."""

COGVIDEOX_5B = {
    **COGVIDEOX_2B, "num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True,
}  # fmt: skip

KNOWN = {
    "THUDM/CogVideoX-2b": COGVIDEOX_2B, "THUDM/CogVideoX-5b": COGVIDEOX_5B,
    "zai-org/CogVideoX-2b": COGVIDEOX_2B, "zai-org/CogVideoX-5b": COGVIDEOX_5B,
}  # fmt: skip
"""Hub id -> its transformer's configuration; the publisher has two names."""

LICENCES = {name: ("Apache-2.0" if name.endswith("2b") else "CogVideoX", False) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""


class CogVideoX:
    """A CogVideoX pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    num_sources = (0, 0)

    def __init__(
        self,
        pipe: CogVideoXPipeline,
        *,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        size: tuple[int, int, int],
        fps: float,
        max_sequence_length: int,
        vae_slice: int,
    ) -> None:
        """Takes a loaded stock pipeline; `size` is (frames, height, width) in pixels, `vae_slice` counts clips."""
        self.pipe, self.model, self.dtype, self.device, self.fps = pipe, model, dtype, device, fps
        self.denoiser: nn.Module = pipe.transformer
        self.max_sequence_length, self.vae_slice = max_sequence_length, vae_slice
        self.levels = levels_on(device, flow_levels(plain_config(pipe.scheduler.config)))
        self.prediction = prediction_of(pipe.scheduler.config)
        self._embedded = Embedded(self._encode_one)
        self._set_size(*size)

    def _set_size(self, num_frames: int, height: int, width: int) -> None:
        pipe, config = self.pipe, self.pipe.transformer.config
        # The autoencoder takes an odd number of latent frames: the first, and then two for eight.
        frames = 2 * video.check_frames(self.model, num_frames, 2 * pipe.vae_scale_factor_temporal) - 1
        factor = pipe.vae_scale_factor_spatial
        common.check_size(self.model, (height, width), factor * config.patch_size)
        self.image_shape: tuple[int, ...] = (num_frames, 3, height, width)
        self.latent_shape: tuple[int, ...] = (config.in_channels, frames, height // factor, width // factor)
        rotary = config.use_rotary_positional_embeddings
        place = pipe._prepare_rotary_positional_embeddings
        self._positions = place(height, width, frames, self.device) if rotary else None

    def resized(self, height: int, width: int) -> CogVideoX:
        """The same networks drawing another size."""
        other = copy(self)
        other._set_size(self.image_shape[0], height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts, each distinct one once."""
        given = common.check_sources(sources, prompts, self.num_sources, "cogvideox")
        return self._embedded(prompts, given, self.device)

    def _encode_one(self, prompt: str, _: Sequence[Tensor]) -> Conditioning:
        embeds, _none = self.pipe.encode_prompt(
            [prompt], do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length,
            device=self.device,
        )  # fmt: skip
        return Conditioning({"embeds": embeds.to(self.dtype)})

    def free_text_encoders(self) -> None:
        """Drops the text encoder from memory."""
        self._embedded.free(self.pipe, ("text_encoder",))

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32 of latents in flow coordinates, at a timestep that need not be an integer."""

        def predicted(sample: Tensor, time: Tensor) -> Tensor:
            with common.autocast(self.device, self.dtype):
                output = self.denoiser(
                    hidden_states=sample.to(self.dtype).transpose(1, 2),
                    encoder_hidden_states=cond.tensors["embeds"],
                    timestep=time,
                    image_rotary_emb=self._positions,
                    return_dict=False,
                )
            return output[0].transpose(1, 2)  # type: ignore[no-any-return]

        return flow_velocity(predicted, x, timestep, self.levels, self.prediction)

    def passes(self, scale: float) -> int:
        """Two where guidance is on, at any scale but 1."""
        return common.two_passes(scale)

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """Classifier-free guidance in two passes; the same of velocities as of v."""
        return common.two_pass_guidance(network, cond, negative, scale)

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """The scheduler's own levels: grid "diffusers" in its own spacing, "linspace" evenly over all timesteps."""
        refuse_shift(self.model, shift)
        return diffusion_schedule(plain_config(self.pipe.scheduler.config), num_steps, grid=grid)

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Decodes some clips at a time in float32."""
        return video.decode_clips(latents, self.vae_slice, partial(common.decoded, self.pipe.vae), gradient=gradient)

    def encode_images(self, images: Tensor) -> Tensor:
        """Mean of the VAE's posterior, scaled as `decode` undoes it."""
        return video.encode_clips(
            images, self.image_shape, self.vae_slice, partial(common.encoded, self.pipe.vae), self.device
        )

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`."""
        return common.write_lora(CogVideoXPipeline, folder, tensors, config)


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A CogVideoX scheduler's configuration with its noise levels written out, for `samplers/flow_coordinates.py`.

    With A the usual alpha_bar and k = snr_shift_scale, `A <- A / (k + (1 - k) A)`, which divides the signal-to-noise
    ratio by k; then, with rescale_betas_zero_snr, `sqrt(A)` is moved and stretched so that the last is 0 and the first
    stays (Lin et al., arXiv 2305.08891, algorithm 1).
    """
    usual, scale = alpha_bars({**config, "rescale_betas_zero_snr": False}), float(config.get("snr_shift_scale", 1.0))
    a = usual / (scale + (1 - scale) * usual)
    if config.get("rescale_betas_zero_snr"):
        root = a.sqrt()
        a = ((root - root[-1]) * root[0] / (root[0] - root[-1])).square()
    beta = 1 - a / torch.cat([a.new_ones(1), a[:-1]])
    return {**config, "trained_betas": beta.tolist(), "rescale_betas_zero_snr": False}


def meta_denoiser(model: str) -> nn.Module | None:
    """The transformer without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(CogVideoXTransformer3DModel, common.part_config(model, "transformer", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is a CogVideoX 1.0 pipeline, and every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "cogvideox", ("CogVideoXPipeline",))
    config = common.part_config(model, "transformer", KNOWN)
    if config is not None:
        _check_version(model, config.get("patch_size_t"))
    common.check_bound(meta_denoiser(model), targets)


def _check_version(model: str, patch_size_t: int | None) -> None:
    if patch_size_t is not None:
        raise ValueError(
            f"{model} is a CogVideoX 1.5 (patch_size_t {patch_size_t}), which is not supported: take CogVideoX-2b or 5b"
        )


def _check_text(model: str, tokens: int, config: Mapping[str, Any]) -> None:
    own = config["max_text_seq_length"]
    if tokens != own:
        raise ValueError(
            f"pipeline.max_sequence_length ({tokens}) must be {own} for {model}: its network attends to padding as to "
            "words and was trained with so many tokens of text"
        )


def load(
    model: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    height: int | None = None,
    width: int | None = None,
    max_sequence_length: int = 226,
    vae_slice: int = 1,
    gradient_checkpointing: bool = False,
    num_frames: int | None = None,
    fps: float | None = None,
    vae_tiling: bool = False,
) -> CogVideoX:
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of network and text encoder; the autoencoder is float32.
        device: where everything lives.
        height: pixels; None takes the checkpoint's own, 480.
        width: pixels; None takes the checkpoint's own, 720.
        max_sequence_length: T5 tokens; padding is attended to, so only the checkpoint's own number, 226, is taken.
        vae_slice: clips decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).
        num_frames: of a clip, 1 and a multiple of 8; None takes the checkpoint's own, 49.
        fps: frames a second; None takes 8. The network does not read it.
        vae_tiling: decode in overlapping tiles, for less memory. Their seams are visible to rewards, and the policy can
            learn to exploit or to hide them: leave it off where memory allows.

    Raises:
        ValueError: nothing loadable there, another length of prompts than the model's, or a size or number of frames
            that it cannot draw.
    """
    known = common.part_config(model, "transformer", KNOWN)
    if known is not None and "max_text_seq_length" in known:
        _check_text(model, max_sequence_length, known)
    pipe = common.load_stock(CogVideoXPipeline, model, family="CogVideoX", dtype=dtype)
    config, factor = pipe.transformer.config, pipe.vae_scale_factor_spatial
    _check_version(model, config.patch_size_t)
    _check_text(model, max_sequence_length, config)
    common.freeze(pipe, device, denoisers=("transformer",), gradient_checkpointing=gradient_checkpointing)
    if vae_tiling:
        pipe.vae.enable_tiling()
    own = (config.sample_frames, config.sample_height * factor, config.sample_width * factor)
    return CogVideoX(
        pipe,
        model=model,
        dtype=dtype,
        device=torch.device(device),
        size=(own[0] if num_frames is None else num_frames, height or own[1], width or own[2]),
        fps=fps or 8.0,
        max_sequence_length=max_sequence_length,
        vae_slice=vae_slice,
    )


# ---- what `flowrl plan` asks -----------------------------------------------------------------------------------------


def default_size(network: Any) -> tuple[int, int, int | None]:
    """Height, width and frames that the model draws unless told otherwise."""
    config = network.config
    return config.sample_height * 8, config.sample_width * 8, config.sample_frames


def meta_call(network: Any, height: int, width: int, num_frames: int | None, text_tokens: int) -> dict[str, Any]:
    """Arguments of one evaluation of one sample, without numbers in them.

    Raises:
        ValueError: the model cannot draw this size, or takes no prompts of this length.
    """
    config, patch = network.config, 8 * network.config.patch_size
    _check_text("this model", text_tokens, config)
    frames = 2 * video.check_frames("this model", num_frames or 0, 8) - 1
    common.check_size("this model", (height, width), patch)
    arguments = common.meta_arguments({
        "hidden_states": (1, frames, config.in_channels, height // 8, width // 8),
        "encoder_hidden_states": (1, text_tokens, config.text_embed_dim),
        "timestep": (1,),
    })  # fmt: skip
    if not config.use_rotary_positional_embeddings:
        return arguments
    positions = torch.empty(frames * (height // patch) * (width // patch), config.attention_head_dim, device="meta")
    return arguments | {"image_rotary_emb": (positions, positions.clone())}
