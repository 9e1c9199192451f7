"""Qwen-Image: any checkpoint that stock `QwenImagePipeline` loads.

Velocity network `QwenImageTransformer2DModel`, fed sigma and 2 x 2 packed latents; one Qwen2.5-VL text encoder, whose
prompts have different lengths: they are padded to `max_sequence_length` with a mask, and `network` drops the columns
that are padding in the whole batch, and a mask without padding, where stock does. Positions of a prompt's tokens count
from its start, so padding moves nothing. Guidance is two-pass, each token brought back to the norm of the positive
output; stock guides at scales above 1 only and ignores the others, here 1 alone is none and scales below it mix.
Noise levels are shifted by the image's size and stretched to end at the checkpoint's terminal value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from torch import Tensor, nn

from flowrl.pipelines import common
from flowrl.pipelines import stock_schedules as schedules
from flowrl.pipelines.common import Embedded, Sources, pack, unpack
from flowrl.samplers.guidance import Network, Velocity
from flowrl.samplers.guidance_rules import qwen_norm_rescale
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
)  # fmt: skip
"""Joint attention and both streams' MLPs, as published RL recipes of Qwen-Image train them (rank 64, alpha 128).

The last block's text output is read by nothing: there `add_q_proj`, `to_add_out` and `txt_mlp` never get a gradient.
"""

QWEN_IMAGE: dict[str, Any] = {
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 3584, "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
"""The dimensions of Qwen-Image's transformer, 20.43 B parameters."""

KNOWN = {"Qwen/Qwen-Image": QWEN_IMAGE, "Qwen/Qwen-Image-2512": QWEN_IMAGE}
"""Hub id -> its transformer's configuration: LoRA targets can be checked before gigabytes are fetched."""

LICENCES = {name: ("Apache-2.0", False) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""

LONGEST_PROMPT = 1024
"""Tokens of a prompt that stock keeps at most."""

_PATCH = 16  # pixels of a token's side, in every published checkpoint


class QwenImage:
    """A Qwen-Image pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    num_sources = (0, 0)
    fps = None

    def __init__(
        self,
        pipe: QwenImagePipeline,
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
        self.max_sequence_length, self.vae_slice = max_sequence_length, vae_slice
        self._embedded = Embedded(self._encode_one)
        self._set_size(*size)

    def _set_size(self, height: int, width: int) -> None:
        common.check_size(self.model, (height, width), 2 * self.pipe.vae_scale_factor)
        self.image_shape: tuple[int, ...] = (3, height, width)
        self.latent_shape: tuple[int, ...] = latent_shape(self.pipe, height, width)

    def resized(self, height: int, width: int) -> QwenImage:
        """The same networks drawing another size."""
        other = copy(self)
        other._set_size(height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts, each distinct one once; longer ones are cut at `max_sequence_length`, as stock does."""
        given = common.check_sources(sources, prompts, self.num_sources, "qwen_image")
        return self._embedded(prompts, given, self.device)

    def _encode_one(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        embeds, _ = self.pipe.encode_prompt([prompt], device=self.device, max_sequence_length=self.max_sequence_length)
        return Conditioning(padded(embeds.to(self.dtype), self.max_sequence_length))

    def free_text_encoders(self) -> None:
        """Drops the text encoder from memory."""
        self._embedded.free(self.pipe, ("text_encoder",))

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32; the network runs in the pipeline's dtype, its LoRA weights stay float32."""
        embeds, mask = unpadded(cond)
        with common.autocast(self.device, self.dtype):
            tokens = self.denoiser(
                hidden_states=pack(x.to(self.dtype)),
                timestep=timestep / 1000,
                encoder_hidden_states=embeds,
                encoder_hidden_states_mask=mask,
                img_shapes=[[grid_of(x)]] * len(x),
                return_dict=False,
            )[0]
        return unpack(tokens.float(), x.shape[1:])

    def passes(self, scale: float) -> int:
        """Two where guidance is on, at any scale but 1."""
        return common.two_passes(scale)

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """Classifier-free guidance in two passes, rescaled token by token; scale 1 is one pass."""
        return common.two_pass_guidance(network, cond, negative, scale, rule=rescaled_by_token)

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Both grids are the stock pipeline's: it passes its own evenly spaced levels, which are shifted once."""
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
        return common.write_lora(QwenImagePipeline, folder, tensors, config)


# ---- what both Qwen-Image families share -----------------------------------------------------------------------------


def latent_shape(pipe: Any, height: int, width: int) -> tuple[int, int, int]:
    """Shape of one latent of an image."""
    return pipe.transformer.config.in_channels // 4, height // pipe.vae_scale_factor, width // pipe.vae_scale_factor


def grid_of(x: Tensor) -> tuple[int, int, int]:
    """Frames, rows and columns of tokens of latents `[..., h, w]`."""
    return 1, x.shape[-2] // 2, x.shape[-1] // 2


def padded(embeds: Tensor, length: int) -> dict[str, Tensor]:
    """One prompt's embeddings `[1, n, d]` padded to a fixed length, and the mask `[1, length]` of its tokens."""
    n = embeds.shape[1]
    mask = (torch.arange(length, device=embeds.device) < n)[None]
    return {"embeds": nn.functional.pad(embeds, (0, 0, 0, length - n)), "mask": mask}


def unpadded(cond: Conditioning) -> tuple[Tensor, Tensor | None]:
    """Embeddings and mask up to the batch's longest prompt; no mask where all are that long."""
    longest = common.trimmed(cond.tensors["mask"])
    mask = cond.tensors["mask"][:, :longest]
    return cond.tensors["embeds"][:, :longest], None if bool(mask.all()) else mask


def rescaled_by_token(negative: Tensor, positive: Tensor, scale: float) -> Tensor:
    """`qwen_norm_rescale` of unpacked outputs: norms are those of tokens."""
    return unpack(qwen_norm_rescale(pack(negative), pack(positive), scale), positive.shape[1:])


def images_of(vae: Any, latents: Tensor) -> Tensor:
    """Images in [-1, 1] of normalised latents `[b, C, h, w]`, decoded as videos of one frame."""
    mean, std = _statistics(vae, latents)
    return vae.decode((latents * std + mean).unsqueeze(2), return_dict=False)[0][:, :, 0]  # type: ignore[no-any-return]


def latents_of(vae: Any, images: Tensor) -> Tensor:
    """Normalised latents of images `[b, 3, H, W]` in [-1, 1]: the mode of the posterior."""
    latents = vae.encode(images.unsqueeze(2)).latent_dist.mode()[:, :, 0]
    mean, std = _statistics(vae, latents)
    return (latents - mean) / std  # type: ignore[no-any-return]


def _statistics(vae: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std of each latent channel `[C, 1, 1]`, as the checkpoint states them."""
    mean, std = (torch.as_tensor(values).to(latents).view(-1, 1, 1) for values in
                 (vae.config.latents_mean, vae.config.latents_std))  # fmt: skip
    return mean, std


# ---- loading ---------------------------------------------------------------------------------------------------------


def meta_denoiser(model: str) -> nn.Module | None:
    """The transformer without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(QwenImageTransformer2DModel, common.part_config(model, "transformer", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is a Qwen-Image pipeline, and every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "qwen_image", ("QwenImagePipeline",))
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
) -> QwenImage:
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of network and text encoder; the VAE stays in float32.
        device: where everything lives.
        height: pixels; None takes stock's 1024.
        width: pixels; None takes stock's 1024.
        max_sequence_length: tokens kept of a prompt, at most 1024. 512 is stock's and what published RL recipes keep.
        vae_slice: images decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).

    Raises:
        ValueError: nothing loadable there, or a size or length that the model cannot take.
    """
    if not 1 <= max_sequence_length <= LONGEST_PROMPT:
        raise ValueError(f"pipeline.max_sequence_length ({max_sequence_length}) must lie in 1 .. {LONGEST_PROMPT}")
    pipe = common.load_stock(QwenImagePipeline, model, family="Qwen-Image", dtype=dtype)
    common.freeze(pipe, device, denoisers=("transformer",), gradient_checkpointing=gradient_checkpointing)
    own = pipe.default_sample_size * pipe.vae_scale_factor
    return QwenImage(
        pipe,
        model=model,
        dtype=dtype,
        device=torch.device(device),
        size=(height or own, width or own),
        max_sequence_length=max_sequence_length,
        vae_slice=vae_slice,
    )


# ---- what `flowrl plan` asks -----------------------------------------------------------------------------------------


def default_size(network: Any) -> tuple[int, int, int | None]:
    """Height and width in pixels that the model draws unless told otherwise; no frames."""
    return 1024, 1024, None


def meta_call(
    network: Any, height: int, width: int, num_frames: int | None, text_tokens: int, *, num_images: int = 1
) -> dict[str, Any]:
    """Arguments of one evaluation of one sample, without numbers in them; editing reads two images.

    Raises:
        ValueError: the model cannot draw this size.
    """
    config = network.config
    common.check_size("this model", (height, width), _PATCH)
    grid = (1, height // _PATCH, width // _PATCH)
    arguments = common.meta_arguments({
        "hidden_states": (1, num_images * math.prod(grid), config.in_channels),
        "timestep": (1,),
        "encoder_hidden_states": (1, text_tokens, config.joint_attention_dim),
    })  # fmt: skip
    return arguments | {"encoder_hidden_states_mask": None, "img_shapes": [[grid] * num_images]}
