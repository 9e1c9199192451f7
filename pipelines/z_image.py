"""Z-Image and Z-Image-Turbo: any checkpoint that stock `ZImagePipeline` loads.

The network `ZImageTransformer2DModel` predicts `clean - noise` and is fed `1 - sigma`; latents and prompts come as
lists, one tensor a sample, because prompts have different lengths. A Conditioning holds them padded to
`max_sequence_length` with their lengths.

The guidance scale counts from 0, as in stock: `positive + scale * (positive - negative)`, and 0 is no guidance, one
pass (Z-Image-Turbo is made for it, with 8 steps); scale 1 is guidance already. Stock's `cfg_normalization` is the
option `norm_cap`. Its `cfg_truncation`, which ends guidance above a normalised time and does nothing by default, is
left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from torch import Tensor, nn

from flowrl.pipelines import common
from flowrl.pipelines import stock_schedules as schedules
from flowrl.pipelines.common import Embedded, Sources
from flowrl.samplers.guidance import Network, Velocity, classifier_free_guidance, conditioned
from flowrl.samplers.guidance_rules import z_image
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = (
    "attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0",
    "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
)  # fmt: skip
"""Attention and MLP of every block, refiners included: what Flow-Factory trains (rank 64, alpha 128)."""

Z_IMAGE: dict[str, Any] = {
    "all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 16, "dim": 3840, "n_layers": 30,
    "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30, "norm_eps": 1e-5, "qk_norm": True, "cap_feat_dim": 2560,
    "rope_theta": 256.0, "t_scale": 1000.0, "axes_dims": (32, 48, 48), "axes_lens": (1536, 512, 512),
}  # fmt: skip
"""The dimensions of Z-Image's transformer, 6.15 B parameters."""

KNOWN = {"Tongyi-MAI/Z-Image": Z_IMAGE, "Tongyi-MAI/Z-Image-Turbo": Z_IMAGE}
"""Hub id -> its transformer's configuration: LoRA targets can be checked before gigabytes are fetched."""

LICENCES = {name: ("Apache-2.0", False) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""

OWN_SIZE = 1024
"""Pixels that stock draws where nothing is said."""

_VAE_FACTOR = 8  # pixels of a latent's side, in every published checkpoint


class ZImage:
    """A Z-Image pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    num_sources = (0, 0)
    fps = None

    def __init__(
        self,
        pipe: ZImagePipeline,
        *,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        size: tuple[int, int],
        max_sequence_length: int,
        vae_slice: int,
        norm_cap: float | None,
    ) -> None:
        """Takes a loaded stock pipeline; `size` is (height, width) in pixels, `vae_slice` counts images."""
        self.pipe, self.model, self.dtype, self.device = pipe, model, dtype, device
        self.denoiser: nn.Module = pipe.transformer
        self.max_sequence_length, self.vae_slice, self.norm_cap = max_sequence_length, vae_slice, norm_cap
        self._embedded = Embedded(self._encode_one)
        self._set_size(*size)

    def _set_size(self, height: int, width: int) -> None:
        factor, config = self.pipe.vae_scale_factor, self.pipe.transformer.config
        # Positions are looked up in tables of so many rows and columns of tokens.
        common.check_size(self.model, (height, width), 2 * factor, 2 * factor * min(config.axes_lens[1:]))
        self.image_shape: tuple[int, ...] = (3, height, width)
        self.latent_shape: tuple[int, ...] = (config.in_channels, height // factor, width // factor)

    def resized(self, height: int, width: int) -> ZImage:
        """The same networks drawing another size."""
        other = copy(self)
        other._set_size(height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts, each distinct one once; longer ones are cut at `max_sequence_length`, as stock does."""
        given = common.check_sources(sources, prompts, self.num_sources, "z_image")
        return self._embedded(prompts, given, self.device)

    def _encode_one(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        ([embeds], _) = self.pipe.encode_prompt(
            [prompt], device=self.device, do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )  # fmt: skip
        rest = self.max_sequence_length - len(embeds)
        filled = nn.functional.pad(embeds.to(self.dtype), (0, 0, 0, rest))
        return Conditioning({"embeds": filled[None], "length": torch.tensor([len(embeds)])})

    def free_text_encoders(self) -> None:
        """Drops the text encoder from memory."""
        self._embedded.free(self.pipe, ("text_encoder",))

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32; the network runs in the pipeline's dtype, its LoRA weights stay float32."""
        lengths = cond.tensors["length"].tolist()
        captions = [embeds[:n] for embeds, n in zip(cond.tensors["embeds"], lengths, strict=True)]
        with common.autocast(self.device, self.dtype):
            towards_clean = self.denoiser(
                list(x.to(self.dtype).unsqueeze(2).unbind()), (1000 - timestep) / 1000, captions, return_dict=False
            )[0]
        return -torch.stack([sample.float() for sample in towards_clean]).squeeze(2)

    def passes(self, scale: float) -> int:
        """Two where guidance is on: at any scale but 0, from which this family counts."""
        return 1 if scale == 0 else 2

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """Guidance in two passes, `positive + scale * (positive - negative)`; scale 0 is one pass.

        Raises:
            ValueError: the scale is negative, or asks for a negative prompt and there is none; or it is not 0, and
                the model's name says that it is a turbo.
        """
        if scale == 0:
            return conditioned(network, cond)
        if "turbo" in Path(self.model).name.lower():
            raise ValueError(
                f"{self.model} is distilled to draw without guidance, which is scale 0 in this family, got scale "
                f"{scale:g}: set sampler.guidance_scale=0 and eval.guidance_scale=0"
            )
        if not scale > 0 or negative is None:
            raise ValueError(
                f"guidance at scale {scale} is not to be had: Z-Image takes positive scales with a negative prompt, "
                "and 0 for none"
            )
        # The rule is stated for the network's own sign, which `network` has turned.
        return classifier_free_guidance(
            network, cond, negative, scale, rule=lambda no, yes, w: z_image(-no, -yes, w, norm_cap=self.norm_cap)
        )

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Both grids are the stock pipeline's: it passes its own evenly spaced levels, which are shifted once."""
        return schedules.flux_schedule(self.pipe.scheduler.config, self.latent_shape, num_steps, grid, shift)

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Decodes slice by slice in float32."""
        return common.decode_slices(latents, self.vae_slice, partial(common.decoded, self.pipe.vae), gradient=gradient)

    def encode_images(self, images: Tensor) -> Tensor:
        """Mode of the VAE's posterior, shifted and scaled as `decode` undoes it."""
        return common.encode_slices(
            images, self.image_shape, self.vae_slice, partial(common.encoded, self.pipe.vae), self.device
        )

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`."""
        return common.write_lora(ZImagePipeline, folder, tensors, config)


def meta_denoiser(model: str) -> nn.Module | None:
    """The transformer without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(ZImageTransformer2DModel, common.part_config(model, "transformer", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is a Z-Image pipeline, and every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "z_image", ("ZImagePipeline",))
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
    norm_cap: float | None = None,
) -> ZImage:
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of network and text encoder; the VAE stays in float32.
        device: where everything lives.
        height: pixels; None takes stock's 1024.
        width: pixels; None takes stock's 1024.
        max_sequence_length: tokens kept of a prompt in its chat format; 512 is stock's.
        vae_slice: images decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).
        norm_cap: longest guided output, in norms of the positive one (stock's `cfg_normalization`); None is no cap.

    Raises:
        ValueError: nothing loadable there, or an option is out of range.
    """
    if norm_cap is not None and not norm_cap > 0:
        raise ValueError(f"norm_cap must be positive, got {norm_cap}: null means no cap")
    pipe = common.load_stock(ZImagePipeline, model, family="Z-Image", dtype=dtype)
    # A prompt is filled up to a multiple of 32 tokens, and the image's position comes after it.
    longest = (pipe.transformer.config.axes_lens[0] - 2) // 32 * 32
    if not 1 <= max_sequence_length <= longest:
        raise ValueError(f"pipeline.max_sequence_length ({max_sequence_length}) must lie in 1 .. {longest} for {model}")
    common.freeze(pipe, device, denoisers=("transformer",), gradient_checkpointing=gradient_checkpointing)
    return ZImage(
        pipe,
        model=model,
        dtype=dtype,
        device=torch.device(device),
        size=(height or OWN_SIZE, width or OWN_SIZE),
        max_sequence_length=max_sequence_length,
        vae_slice=vae_slice,
        norm_cap=norm_cap,
    )


# ---- what `flowrl plan` asks -----------------------------------------------------------------------------------------


def default_size(network: Any) -> tuple[int, int, int | None]:
    """Height and width in pixels that the model draws unless told otherwise; no frames."""
    return OWN_SIZE, OWN_SIZE, None


def meta_call(network: Any, height: int, width: int, num_frames: int | None, text_tokens: int) -> dict[str, Any]:
    """Arguments of one evaluation of one sample, which come in lists, without numbers in them.

    Raises:
        ValueError: the model cannot draw this size.
    """
    config, patch = network.config, 2 * _VAE_FACTOR
    common.check_size("this model", (height, width), patch, patch * min(config.axes_lens[1:]))
    latent = (config.in_channels, 1, height // _VAE_FACTOR, width // _VAE_FACTOR)
    caption = torch.empty(text_tokens, config.cap_feat_dim, device="meta")
    arguments = common.meta_arguments({"t": (1,)})
    return arguments | {"x": [torch.empty(latent, device="meta")], "cap_feats": [caption]}
