"""HunyuanVideo: any checkpoint that stock `HunyuanVideoPipeline` loads.

Velocity network `HunyuanVideoTransformer3DModel`, distilled for guidance: fed 1000 * sigma and 1000 * the scale, one
call a step. A Llama encoder reads the prompt in a fixed template, and a CLIP encoder gives the pooled embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
from torch import Tensor, nn

from flowrl.pipelines import common, video
from flowrl.pipelines import stock_schedules as schedules
from flowrl.pipelines.common import Embedded, Sources
from flowrl.samplers.guidance import Network, Velocity, conditioned
from flowrl.samplers.guidance_rules import embedded_guidance
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
"""Attention of both kinds of blocks and of the text refiner."""

HUNYUAN_VIDEO: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 20,
    "num_single_layers": 40, "num_refiner_layers": 2, "mlp_ratio": 4.0, "patch_size": 2, "patch_size_t": 1,
    "qk_norm": "rms_norm", "guidance_embeds": True, "text_embed_dim": 4096, "pooled_projection_dim": 768,
    "rope_theta": 256.0, "rope_axes_dim": (16, 56, 56),
}  # fmt: skip
"""The dimensions of the published network."""

KNOWN = {"hunyuanvideo-community/HunyuanVideo": HUNYUAN_VIDEO}
"""Hub id -> its transformer's configuration."""

LICENCES = {name: ("Tencent Hunyuan Community", False) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it). It excludes the EU, the UK and South Korea."""

_ENCODERS = ("text_encoder", "text_encoder_2")


class HunyuanVideo:
    """A HunyuanVideo pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    num_sources = (0, 0)

    def __init__(
        self,
        pipe: HunyuanVideoPipeline,
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
        self._embedded = Embedded(self._encode_one)
        self._set_size(*size)

    def _set_size(self, num_frames: int, height: int, width: int) -> None:
        config, factor = self.pipe.transformer.config, self.pipe.vae_scale_factor_spatial
        frames = video.check_frames(self.model, num_frames, self.pipe.vae_scale_factor_temporal, config.patch_size_t)
        common.check_size(self.model, (height, width), factor * config.patch_size)
        self.image_shape: tuple[int, ...] = (num_frames, 3, height, width)
        self.latent_shape: tuple[int, ...] = (config.in_channels, frames, height // factor, width // factor)

    def resized(self, height: int, width: int) -> HunyuanVideo:
        """The same networks drawing another size."""
        other = copy(self)
        other._set_size(self.image_shape[0], height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts, each distinct one once."""
        given = common.check_sources(sources, prompts, self.num_sources, "hunyuan_video")
        return self._embedded(prompts, given, self.device)

    def _encode_one(self, prompt: str, _: Sequence[Tensor]) -> Conditioning:
        embeds, pooled, mask = self.pipe.encode_prompt(
            [prompt], device=self.device, max_sequence_length=self.max_sequence_length
        )
        return Conditioning({
            "embeds": embeds.to(self.dtype), "mask": mask.to(self.dtype), "pooled": pooled.to(self.dtype),
        })  # fmt: skip

    def free_text_encoders(self) -> None:
        """Drops both text encoders from memory."""
        self._embedded.free(self.pipe, _ENCODERS)

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32 at the guidance scale in `cond` (see `guided`)."""
        tensors = cond.tensors
        with common.autocast(self.device, self.dtype):
            output = self.denoiser(
                hidden_states=x.to(self.dtype),
                timestep=timestep,
                encoder_hidden_states=tensors["embeds"],
                encoder_attention_mask=tensors["mask"],
                pooled_projections=tensors["pooled"],
                guidance=tensors["guidance"].to(self.dtype) * 1000.0,
                return_dict=False,
            )[0]
        return output.float()  # type: ignore[no-any-return]

    def passes(self, scale: float) -> int:
        """One at every scale, which is an input of the network."""
        return 1

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """The scale as an input of the network; no negative prompt is read.

        In low precision the network reads 1000 * scale rounded: 6 becomes 6016 in bfloat16, as in the stock pipeline.
        """
        return conditioned(network, embedded_guidance(cond, scale))

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Grid "diffusers" is "linspace" here: the stock pipeline passes evenly spaced sigmas in."""
        return schedules.flow_schedule(self.pipe.scheduler, num_steps, grid, shift, sigmas="linspace")

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Decodes some clips at a time in float32; long ones in overlapping stretches of 16 frames, as stock does."""
        return video.decode_clips(latents, self.vae_slice, partial(common.decoded, self.pipe.vae), gradient=gradient)

    def encode_images(self, images: Tensor) -> Tensor:
        """Mean of the VAE's posterior, scaled as `decode` undoes it."""
        return video.encode_clips(
            images, self.image_shape, self.vae_slice, partial(common.encoded, self.pipe.vae), self.device
        )

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`."""
        return common.write_lora(HunyuanVideoPipeline, folder, tensors, config)


def meta_denoiser(model: str) -> nn.Module | None:
    """The transformer without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(HunyuanVideoTransformer3DModel, common.part_config(model, "transformer", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: a HunyuanVideo pipeline, distilled, and every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "hunyuan_video", ("HunyuanVideoPipeline",))
    schedules.check_scheduler_folder(model)
    config = common.part_config(model, "transformer", KNOWN)
    if config is not None:
        _check_distilled(model, bool(config.get("guidance_embeds", True)))
    common.check_bound(meta_denoiser(model), targets)


def _check_distilled(model: str, guidance_embeds: bool) -> None:
    if not guidance_embeds:
        raise ValueError(
            f"the network of {model} has no guidance input (guidance_embeds false): pipeline.name=hunyuan_video is for "
            "the published HunyuanVideo, which is distilled for guidance"
        )


def load(
    model: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    height: int | None = None,
    width: int | None = None,
    max_sequence_length: int = 256,
    vae_slice: int = 1,
    gradient_checkpointing: bool = False,
    num_frames: int | None = None,
    fps: float | None = None,
    vae_tiling: bool = False,
) -> HunyuanVideo:
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of network and text encoders; the autoencoder is float32.
        device: where everything lives.
        height: pixels; None takes 720.
        width: pixels; None takes 1280.
        max_sequence_length: Llama tokens of a prompt, beyond the template's.
        vae_slice: clips decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).
        num_frames: of a clip, 1 and a multiple of 4; None takes 129.
        fps: frames a second; None takes 24. The network does not read it.
        vae_tiling: decode in overlapping tiles of 256 pixels, for less memory. Their seams are visible to rewards, and
            the policy can learn to exploit or to hide them: leave it off where memory allows.

    Raises:
        ValueError: nothing loadable there, or a size or number of frames that the model cannot draw.
    """
    pipe = common.load_stock(HunyuanVideoPipeline, model, family="HunyuanVideo", dtype=dtype)
    _check_distilled(model, pipe.transformer.config.guidance_embeds)
    schedules.check_flow_scheduler(model, {"_class_name": type(pipe.scheduler).__name__, **pipe.scheduler.config})
    common.freeze(pipe, device, denoisers=("transformer",), gradient_checkpointing=gradient_checkpointing)
    if vae_tiling:
        pipe.vae.enable_tiling()
    own = default_size(pipe.transformer)
    return HunyuanVideo(
        pipe,
        model=model,
        dtype=dtype,
        device=torch.device(device),
        size=(own[2] if num_frames is None else num_frames, height or own[0], width or own[1]),
        fps=fps or 24.0,
        max_sequence_length=max_sequence_length,
        vae_slice=vae_slice,
    )


# ---- what `flowrl plan` asks -----------------------------------------------------------------------------------------


def default_size(network: Any) -> tuple[int, int, int]:
    """Height, width and frames that the model draws unless told otherwise."""
    return 720, 1280, 129


def meta_call(network: Any, height: int, width: int, num_frames: int | None, text_tokens: int) -> dict[str, Any]:
    """Arguments of one evaluation of one sample, without numbers in them.

    Raises:
        ValueError: the model cannot draw this size.
    """
    config = network.config
    frames = video.check_frames("this model", num_frames or 0, 4, config.patch_size_t)
    common.check_size("this model", (height, width), 8 * config.patch_size)
    return common.meta_arguments({
        "hidden_states": (1, config.in_channels, frames, height // 8, width // 8),
        "timestep": (1,),
        "encoder_hidden_states": (1, text_tokens, config.text_embed_dim),
        "encoder_attention_mask": (1, text_tokens),
        "pooled_projections": (1, config.pooled_projection_dim),
        "guidance": (1,),
    })  # fmt: skip
