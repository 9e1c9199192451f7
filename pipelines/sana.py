"""Sana 1 and 1.5: any checkpoint that stock `SanaPipeline` loads.

Flow network `SanaTransformer2DModel` with linear attention, whose sums are float32 in every dtype; an autoencoder of
factor 32 (`AutoencoderDC`), and Gemma 2 as text encoder. As in stock's own call, a prompt is read behind an instruction
to describe the image in more detail, and of all embeddings the first and the last ones are kept. The empty prompt,
which guidance leads away from, is read alone; a negative prompt with words is read behind the instruction too, where
stock reads it alone (`instruction=False` leaves it out everywhere). Guidance is two-pass classifier-free guidance. Left
out: cleaning of captions, and stock's rounding of sizes to its list of aspect ratios.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import SanaPipeline, SanaTransformer2DModel
from torch import Tensor, nn

from flowrl.pipelines import common
from flowrl.pipelines import stock_schedules as schedules
from flowrl.pipelines.attention import exact_linear
from flowrl.pipelines.common import Embedded, Sources
from flowrl.samplers.guidance import Network, Velocity
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""All projections of self- and cross-attention."""

SANA_1600M: dict[str, Any] = {
    "in_channels": 32, "out_channels": 32, "num_attention_heads": 70, "attention_head_dim": 32, "num_layers": 20,
    "num_cross_attention_heads": 20, "cross_attention_head_dim": 112, "cross_attention_dim": 2240,
    "caption_channels": 2304, "mlp_ratio": 2.5, "sample_size": 32, "patch_size": 1,
}  # fmt: skip
"""The dimensions of Sana 1.6B at 1024 pixels."""

SANA_600M: dict[str, Any] = {
    **SANA_1600M, "num_attention_heads": 36, "num_layers": 28, "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72, "cross_attention_dim": 1152,
}  # fmt: skip
"""The dimensions of Sana 0.6B at 1024 pixels."""

_HUB = "Efficient-Large-Model"

KNOWN = {
    f"{_HUB}/Sana_1600M_1024px_BF16_diffusers": SANA_1600M,
    f"{_HUB}/Sana_1600M_1024px_diffusers": SANA_1600M,
    f"{_HUB}/Sana_1600M_512px_diffusers": {**SANA_1600M, "sample_size": 16},
    f"{_HUB}/Sana_600M_1024px_diffusers": SANA_600M,
    f"{_HUB}/Sana_600M_512px_diffusers": {**SANA_600M, "sample_size": 16},
    f"{_HUB}/SANA1.5_1.6B_1024px_diffusers": {**SANA_1600M, "qk_norm": "rms_norm_across_heads"},
    f"{_HUB}/SANA1.5_4.8B_1024px_diffusers": {**SANA_1600M, "num_layers": 60, "qk_norm": "rms_norm_across_heads"},
}
"""Hub id -> its transformer's configuration."""

LICENCES = {name: ("NSCL v2-custom (not commercial), Gemma terms for the text encoder", False) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""

_VAE_FACTOR = 32  # pixels of a latent's side, in every published checkpoint

INSTRUCTION: tuple[str, ...] = tuple(
    inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
)
"""Lines that stock's own call puts before every prompt."""


class Sana:
    """A Sana pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    num_sources: tuple[int, int] = (0, 0)
    fps: float | None = None

    def __init__(
        self,
        pipe: SanaPipeline,
        *,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        size: tuple[int, int],
        max_sequence_length: int,
        vae_slice: int,
        instruction: bool,
    ) -> None:
        """Takes a loaded stock pipeline; `size` is (height, width) in pixels, `vae_slice` counts images."""
        self.pipe, self.model, self.dtype, self.device = pipe, model, dtype, device
        self.denoiser: nn.Module = pipe.transformer
        self.max_sequence_length, self.vae_slice, self.instruction = max_sequence_length, vae_slice, instruction
        self._embedded = Embedded(self._encode_one)
        self._set_size(*size)

    def _set_size(self, height: int, width: int) -> None:
        factor, config = self.pipe.vae_scale_factor, self.pipe.transformer.config
        common.check_size(self.model, (height, width), max(32, factor * config.patch_size))  # stock draws 32 k alone
        self.image_shape: tuple[int, ...] = (3, height, width)
        self.latent_shape: tuple[int, ...] = (config.in_channels, height // factor, width // factor)

    def resized(self, height: int, width: int) -> Sana:
        """The same networks drawing another size."""
        other = copy(self)
        other._set_size(height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts, each distinct one once; the empty one, the negative prompt, without instruction."""
        given = common.check_sources(sources, prompts, self.num_sources, "sana")
        return self._embedded(prompts, given, self.device)

    def _encode_one(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        embeds, mask, _, _ = self.pipe.encode_prompt(
            [prompt],
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self.max_sequence_length,
            complex_human_instruction=list(INSTRUCTION) if prompt and self.instruction else None,
        )
        return Conditioning({"embeds": embeds.to(self.dtype), "mask": mask})

    def free_text_encoders(self) -> None:
        """Drops Gemma from memory."""
        self._embedded.free(self.pipe, ("text_encoder",))

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32; the network runs in the pipeline's dtype, its LoRA weights stay float32."""
        with common.autocast(self.device, self.dtype):
            output = self.denoiser(
                x.to(self.dtype),
                encoder_hidden_states=cond.tensors["embeds"],
                encoder_attention_mask=cond.tensors["mask"],
                timestep=timestep * self.pipe.transformer.config.timestep_scale,
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
        """Grid "diffusers" visits what the checkpoint's scheduler does, "linspace" is shifted once, from sigma 1.

        The published scheduler, DPM-Solver with flow sigmas, starts just below 1 and feeds integer timesteps; its own
        steps are `solver="dpm2"` here.
        """
        return schedules.flow_schedule(self.pipe.scheduler, num_steps, grid, shift)

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Decodes slice by slice in float32."""
        return common.decode_slices(latents, self.vae_slice, partial(common.decoded, self.pipe.vae), gradient=gradient)

    def encode_images(self, images: Tensor) -> Tensor:
        """What the autoencoder, which has no posterior, makes of images, scaled as `decode` undoes it."""
        vae = self.pipe.vae
        scale = vae.config.scaling_factor
        return common.encode_slices(
            images, self.image_shape, self.vae_slice, lambda x: vae.encode(x, return_dict=False)[0] * scale, self.device
        )

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`."""
        return common.write_lora(SanaPipeline, folder, tensors, config)


def meta_denoiser(model: str) -> nn.Module | None:
    """The transformer without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(SanaTransformer2DModel, common.part_config(model, "transformer", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is a Sana pipeline, and every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "sana", ("SanaPipeline",))
    transformer = meta_denoiser(model)
    _check_distilled(model, transformer)
    common.check_bound(transformer, targets)


def _check_distilled(model: str, transformer: Any) -> None:
    if transformer is not None and transformer.config.guidance_embeds:
        raise ValueError(
            f"the network of {model} takes the guidance scale as an input (guidance_embeds): it is distilled to few "
            "steps with a path of its own; train the model it was made from"
        )


def load(
    model: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    height: int | None = None,
    width: int | None = None,
    max_sequence_length: int = 300,
    vae_slice: int = 8,
    gradient_checkpointing: bool = False,
    instruction: bool = True,
) -> Sana:
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of network and text encoder; the VAE stays in float32, and with float16 Gemma runs in bfloat16, since it
            overflows.
        device: where everything lives.
        height: pixels; None takes the checkpoint's own.
        width: pixels; None takes the checkpoint's own.
        max_sequence_length: tokens of a prompt, the instruction not counted.
        vae_slice: images decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).
        instruction: put stock's instruction (`complex_human_instruction`) before every prompt but the empty one.

    Raises:
        ValueError: nothing loadable there, or a distilled model.
    """
    pipe = common.load_stock(SanaPipeline, model, family="Sana", dtype=dtype)
    _check_distilled(model, pipe.transformer)
    exact_linear(pipe.transformer)
    common.freeze(pipe, device, denoisers=("transformer",), gradient_checkpointing=gradient_checkpointing)
    if dtype == torch.float16:
        pipe.text_encoder.to(torch.bfloat16)
    own = pipe.transformer.config.sample_size * pipe.vae_scale_factor
    return Sana(
        pipe,
        model=model,
        dtype=dtype,
        device=torch.device(device),
        size=(height or own, width or own),
        max_sequence_length=max_sequence_length,
        vae_slice=vae_slice,
        instruction=instruction,
    )


# ---- what `flowrl plan` asks -----------------------------------------------------------------------------------------


def default_size(network: Any) -> tuple[int, int, int | None]:
    """Height and width in pixels that the model draws unless told otherwise; no frames."""
    side = network.config.sample_size * _VAE_FACTOR
    return side, side, None


def meta_call(network: Any, height: int, width: int, num_frames: int | None, text_tokens: int) -> dict[str, Any]:
    """Arguments of one evaluation of one sample, without numbers in them.

    Raises:
        ValueError: the model cannot draw this size.
    """
    config = network.config
    common.check_size("this model", (height, width), _VAE_FACTOR * config.patch_size)
    return common.meta_arguments({
        "hidden_states": (1, config.in_channels, height // _VAE_FACTOR, width // _VAE_FACTOR),
        "encoder_hidden_states": (1, text_tokens, config.caption_channels),
        "encoder_attention_mask": (1, text_tokens),
        "timestep": (1,),
    })  # fmt: skip
