"""Stable Diffusion 3 and 3.5: any checkpoint that stock `StableDiffusion3Pipeline` loads.

Velocity network `SD3Transformer2DModel`, fed 1000 * sigma; two CLIP encoders and a T5 encoder; sigma grids from the
checkpoint's own `FlowMatchEulerDiscreteScheduler`. Guidance is two-pass classifier-free guidance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn

from flowrl.pipelines import common
from flowrl.pipelines import stock_schedules as schedules
from flowrl.pipelines.attention import dispatched
from flowrl.pipelines.common import Embedded, Sources
from flowrl.samplers.guidance import Network, Velocity
from flowrl.samplers.schedules import build_schedule
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
"""The eight joint-attention projections that every published SD3.5 recipe trains."""

SD35_MEDIUM: dict[str, Any] = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 24,
    "attention_head_dim": 64, "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048, "pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}  # fmt: skip
"""The dimensions of Stable Diffusion 3.5 Medium's transformer."""

SD35_LARGE: dict[str, Any] = {
    **SD35_MEDIUM, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
    "pos_embed_max_size": 192, "dual_attention_layers": (),
}  # fmt: skip
"""The dimensions of Stable Diffusion 3.5 Large's transformer."""

SD3_MEDIUM: dict[str, Any] = {
    **SD35_MEDIUM, "pos_embed_max_size": 192, "dual_attention_layers": (), "qk_norm": None,
}  # fmt: skip
"""The dimensions of Stable Diffusion 3 Medium's transformer."""

KNOWN = {
    "stabilityai/stable-diffusion-3.5-medium": SD35_MEDIUM,
    "stabilityai/stable-diffusion-3.5-large": SD35_LARGE,
    "stabilityai/stable-diffusion-3.5-large-turbo": SD35_LARGE,
    "stabilityai/stable-diffusion-3-medium-diffusers": SD3_MEDIUM,
}
"""Hub id -> its transformer's configuration: LoRA targets can be checked before gigabytes are fetched."""

LICENCES = {name: ("Stability AI Community", True) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""

_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_VAE_FACTOR = 8  # pixels of a latent's side, in every published checkpoint


class SD3:
    """An SD3-family pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    num_sources = (0, 0)
    fps: float | None = None

    def __init__(
        self,
        pipe: StableDiffusion3Pipeline,
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
        factor, config = self.pipe.vae_scale_factor, self.pipe.transformer.config
        multiple = factor * self.pipe.patch_size
        common.check_size(self.model, (height, width), multiple, multiple * config.pos_embed_max_size)
        self.image_shape: tuple[int, ...] = (3, height, width)
        self.latent_shape: tuple[int, ...] = (config.in_channels, height // factor, width // factor)

    def resized(self, height: int, width: int) -> SD3:
        """The same networks drawing another size."""
        other = copy(self)
        other._set_size(height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts, each distinct one once."""
        given = common.check_sources(sources, prompts, self.num_sources, "sd3")
        return self._embedded(prompts, given, self.device)

    def _encode_one(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            [prompt], [prompt], [prompt],
            device=self.device, do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length,
        )  # fmt: skip
        return Conditioning({"embeds": embeds.to(self.dtype), "pooled": pooled.to(self.dtype)})

    def free_text_encoders(self) -> None:
        """Drops the three text encoders from memory."""
        self._embedded.free(self.pipe, _ENCODERS)

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32; the network runs in the pipeline's dtype, its LoRA weights stay float32."""
        with common.autocast(self.device, self.dtype):
            output = self.denoiser(
                hidden_states=x.to(self.dtype),
                timestep=timestep,
                encoder_hidden_states=cond.tensors["embeds"],
                pooled_projections=cond.tensors["pooled"],
                return_dict=False,
            )[0]
        return output.float()  # type: ignore[no-any-return]

    def passes(self, scale: float) -> int:
        """Two where guidance is on, at any scale but 1."""
        return common.two_passes(scale)

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """Classifier-free guidance in two passes; scale 1 is one pass."""
        return common.two_pass_guidance(network, cond, negative, scale)

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Grid "diffusers" is the stock pipeline's; "linspace" is shifted once (`samplers/schedules.py`)."""
        return build_schedule(schedules.with_shift(self.pipe.scheduler.config, shift), num_steps, grid=grid)

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
        return common.write_lora(StableDiffusion3Pipeline, folder, tensors, config)


def meta_denoiser(model: str) -> nn.Module | None:
    """The transformer without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(SD3Transformer2DModel, common.part_config(model, "transformer", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is an SD3 pipeline, and every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "sd3", ("StableDiffusion3Pipeline",))
    common.check_bound(meta_denoiser(model), targets)


def load(
    model: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    height: int | None = None,
    width: int | None = None,
    max_sequence_length: int = 128,
    vae_slice: int = 8,
    gradient_checkpointing: bool = False,
) -> SD3:
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of network and text encoders; the VAE stays in float32.
        device: where everything lives.
        height: pixels; None takes the checkpoint's own.
        width: pixels; None takes the checkpoint's own.
        max_sequence_length: T5 tokens.
        vae_slice: images decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).

    Raises:
        ValueError: nothing loadable there.
    """
    pipe = common.load_stock(StableDiffusion3Pipeline, model, family="Stable Diffusion 3", dtype=dtype)
    common.freeze(pipe, device, denoisers=("transformer",), gradient_checkpointing=gradient_checkpointing)
    dispatched(pipe.transformer)
    own = pipe.default_sample_size * pipe.vae_scale_factor
    return SD3(
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
    side = network.config.sample_size * _VAE_FACTOR
    return side, side, None


def text_tokens(model: str, max_sequence_length: int) -> int:
    """Tokens of a prompt: CLIP's context, which its tokenizer says, and T5's behind it."""
    path = Path(model) / "tokenizer" / "tokenizer_config.json"
    context = json.loads(path.read_text(encoding="utf-8"))["model_max_length"] if path.is_file() else 77
    return int(context) + max_sequence_length


def meta_call(network: Any, height: int, width: int, num_frames: int | None, text_tokens: int) -> dict[str, Any]:
    """Arguments of one evaluation of one sample, without numbers in them.

    Raises:
        ValueError: the model cannot draw this size.
    """
    config = network.config
    multiple = _VAE_FACTOR * config.patch_size
    common.check_size("this model", (height, width), multiple, multiple * config.pos_embed_max_size)
    shapes = {
        "hidden_states": (1, config.in_channels, height // _VAE_FACTOR, width // _VAE_FACTOR),
        "timestep": (1,),
        "encoder_hidden_states": (1, text_tokens, config.joint_attention_dim),
        "pooled_projections": (1, config.pooled_projection_dim),
    }
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()} | {"return_dict": False}
