"""Stable Diffusion 3 and 3.5: any checkpoint that stock `StableDiffusion3Pipeline` loads.

Velocity network `SD3Transformer2DModel`, fed 1000 * sigma; two CLIP encoders and a T5 encoder; sigma grids from the
checkpoint's own `FlowMatchEulerDiscreteScheduler`. Guidance is two-pass classifier-free guidance with an empty prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor

from flowrl.pipelines.lora import check_targets, lora_ready_for_diffusers
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

KNOWN_TRANSFORMERS = {"stabilityai/stable-diffusion-3.5-medium": SD35_MEDIUM}
"""Hub id -> its transformer's configuration: LoRA targets can be checked before gigabytes are fetched."""

EMBEDDING_CACHE = 2048
"""Prompts whose embeddings are kept on the host, 1.7 MB each for SD3.5, while the text encoders are at hand."""

_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


class SD3:
    """An SD3-family pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS

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
        self.transformer = pipe.transformer
        self.max_sequence_length, self.vae_slice = max_sequence_length, vae_slice
        factor = pipe.vae_scale_factor
        multiple = factor * pipe.patch_size
        largest = multiple * pipe.transformer.config.pos_embed_max_size
        for name, pixels in zip(("height", "width"), size, strict=True):
            if pixels % multiple or not 0 < pixels <= largest:
                raise ValueError(
                    f"pipeline.{name} ({pixels}) must be a multiple of {multiple} and at most {largest} for {model}"
                )
        self.latent_shape: tuple[int, ...] = (pipe.transformer.config.in_channels, size[0] // factor, size[1] // factor)
        self._embeddings: dict[str, Conditioning] = {}

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Embeds prompts; each distinct one once and by itself, so that its embedding does not depend on its batch."""
        for prompt in dict.fromkeys(prompts):
            if prompt not in self._embeddings:
                self._embeddings[prompt] = self._encode_one(prompt)
        cond = Conditioning.cat([self._embeddings[prompt] for prompt in prompts]).to(self.device)
        while self.pipe.text_encoder is not None and len(self._embeddings) > EMBEDDING_CACHE:
            del self._embeddings[next(iter(self._embeddings))]  # the oldest; it can be computed again
        return cond

    @torch.no_grad()
    def _encode_one(self, prompt: str) -> Conditioning:
        if self.pipe.text_encoder is None:
            raise ValueError(
                f"prompt {prompt!r} was not encoded before the text encoders were freed: "
                "set pipeline.free_text_encoders=false"
            )
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            [prompt], [prompt], [prompt],
            device=self.device, do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length,
        )  # fmt: skip
        return Conditioning({"embeds": embeds.to(self.dtype).cpu(), "pooled": pooled.to(self.dtype).cpu()})

    def free_text_encoders(self) -> None:
        """Drops the three text encoders from memory."""
        self.pipe.register_modules(**dict.fromkeys(_ENCODERS))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32; the network runs in the pipeline's dtype, its LoRA weights stay float32."""
        low = self.dtype != torch.float32
        # No cache of casts: a call reads each LoRA weight once, and inside a caller's own autocast region the cache
        # would keep the weights of the slot that ran before.
        with torch.autocast(self.device.type, self.dtype, cache_enabled=False) if low else nullcontext():
            output = self.transformer(
                hidden_states=x.to(self.dtype),
                timestep=timestep,
                encoder_hidden_states=cond.tensors["embeds"],
                pooled_projections=cond.tensors["pooled"],
                return_dict=False,
            )[0]
        return output.float()

    def schedule(self, num_steps: int, grid: str) -> Schedule:
        """Grid "diffusers" is the stock pipeline's; "linspace" is shifted once (`samplers/schedules.py`)."""
        return build_schedule(dict(self.pipe.scheduler.config), num_steps, grid=grid)

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Decodes slice by slice in float32; without gradient memory does not grow with the batch."""
        vae = self.pipe.vae
        images = []
        with torch.set_grad_enabled(gradient):
            for latent in latents.split(self.vae_slice):
                scaled = latent.float() / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
                images.append((vae.decode(scaled, return_dict=False)[0] / 2 + 0.5).clamp(0, 1))
            return torch.cat(images)

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Mean of the VAE's posterior, shifted and scaled as `decode` undoes it; slice by slice in float32."""
        vae = self.pipe.vae
        height, width = (side * self.pipe.vae_scale_factor for side in self.latent_shape[1:])
        if tuple(images.shape[1:]) != (3, height, width):
            raise ValueError(
                f"images must have the shape [b, 3, {height}, {width}], the size that is drawn, got "
                f"{list(images.shape)}: resize them, or set pipeline.height and pipeline.width"
            )
        latents = []
        for image in images.split(self.vae_slice):
            posterior = vae.encode(2 * image.to(self.device, torch.float32) - 1).latent_dist
            latents.append((posterior.mode() - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor)
        return torch.cat(latents)

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes `pytorch_lora_weights.safetensors`; alpha travels in its metadata, without which it would halve."""
        StableDiffusion3Pipeline.save_lora_weights(
            folder,
            transformer_lora_layers=lora_ready_for_diffusers(tensors),
            transformer_lora_adapter_metadata=dict(config),
        )
        return folder / "pytorch_lora_weights.safetensors"


def meta_transformer(model: str) -> SD3Transformer2DModel | None:
    """A transformer without weights: of a folder by its `config.json`, of a known hub id; None where neither is."""
    path, config = Path(model) / "transformer" / "config.json", KNOWN_TRANSFORMERS.get(model)
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
    if config is None:
        return None
    with torch.device("meta"):
        return SD3Transformer2DModel.from_config(config)


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is an SD3 pipeline, and every LoRA target binds.

    A hub id that is neither on disk nor among `KNOWN_TRANSFORMERS` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    if Path(model).is_dir():
        index = Path(model) / "model_index.json"
        if not index.is_file():
            raise ValueError(f"{model} is no diffusers pipeline: it has no model_index.json")
        name = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
        if name != "StableDiffusion3Pipeline":
            raise ValueError(f"{model} is a {name}, and pipeline.name=sd3 loads StableDiffusion3Pipeline folders")
    transformer = meta_transformer(model)
    if transformer is not None and targets is not None:
        check_targets(transformer, targets)


def quiet_libraries() -> None:
    """Silences loading bars and the stock warning that prints every padded prompt of a short context."""
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


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
    quiet_libraries()
    try:
        pipe = StableDiffusion3Pipeline.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"could not load {model!r} as a Stable Diffusion 3 pipeline ({str(error).splitlines()[0]}): give a folder "
            "written by save_pretrained, or a hub id that this machine can reach and is allowed to read"
        ) from error
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.to(torch.float32, memory_format=torch.channels_last)  # a quarter faster to decode, on CPU and GPU
    for name in (*_ENCODERS, "vae", "transformer"):
        part = getattr(pipe, name)
        if part is not None:
            part.requires_grad_(False).eval().to(device)
    if gradient_checkpointing:
        pipe.transformer.enable_gradient_checkpointing()
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
