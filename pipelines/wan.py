"""Wan 2.1 and 2.2: any checkpoint that stock `WanPipeline` or `WanImageToVideoPipeline` loads.

Velocity network `WanTransformer3DModel`, fed 1000 * sigma, and a UMT5 encoder; guidance is two-pass classifier-free
guidance. Wan 2.2 A14B has two experts: `transformer` from a boundary time on upwards, `transformer_2` below it, each
with a guidance scale. Image to video conditions on one source image, the first frame: its latents, those of grey
frames and a mask stand beside the noisy channels (2.1 and A14B; 2.1 also reads CLIP's tokens of the image), or the
first latent frame is held at the image's and fed at time 0 (2.2 TI2V-5B).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from PIL import Image
from torch import Tensor, nn

from flowrl.media.images import to_pixels
from flowrl.pipelines import common, video
from flowrl.pipelines import stock_schedules as schedules
from flowrl.pipelines.common import Embedded, Sources
from flowrl.samplers.guidance import Network, Velocity
from flowrl.samplers.parametrization import Sigma, column
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = (
    "attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0",
    "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0",
)  # fmt: skip
"""The projections of self- and cross-attention, which published recipes train."""

WAN_14B: dict[str, Any] = {
    "patch_size": (1, 2, 2), "num_attention_heads": 40, "attention_head_dim": 128, "in_channels": 16,
    "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 13824, "num_layers": 40, "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024,
}  # fmt: skip
"""The dimensions of the 14 B network of Wan 2.1, and of each expert of Wan 2.2 A14B."""

WAN_1_3B = {**WAN_14B, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
WAN_5B = {
    **WAN_14B, "num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48,
}  # fmt: skip
WAN_14B_IMAGE = {**WAN_14B, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}

KNOWN = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": WAN_1_3B,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": WAN_14B,
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": WAN_14B_IMAGE,
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": WAN_14B_IMAGE,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": WAN_14B,
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": {**WAN_14B, "in_channels": 36},
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": WAN_5B,
}
"""Hub id -> the configuration of its transformer, or of each of its experts."""

TWO_EXPERTS = ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "Wan-AI/Wan2.2-I2V-A14B-Diffusers")

LICENCES = {name: ("Apache-2.0", False) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""

_EXPERTS = ("transformer", "transformer_2")
_IMAGE_TEXT = 512
"""Text tokens that the image attention of Wan 2.1 counts off from the end."""


class Wan:
    """A Wan pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS

    def __init__(
        self, pipe: WanPipeline | WanImageToVideoPipeline, *, model: str, dtype: torch.dtype, device: torch.device,
        size: tuple[int, int, int], fps: float, max_sequence_length: int, vae_slice: int,
        guidance_scale_2: float | None,
    ) -> None:  # fmt: skip
        """Takes a loaded stock pipeline; `size` is (frames, height, width) in pixels, `vae_slice` counts clips."""
        self.pipe, self.model, self.dtype, self.device, self.fps = pipe, model, dtype, device, fps
        self.max_sequence_length, self.vae_slice = max_sequence_length, vae_slice
        self.guidance_scale_2 = guidance_scale_2
        self.from_image = isinstance(pipe, WanImageToVideoPipeline)
        self.num_sources = (1, 1) if self.from_image else (0, 0)
        self.experts = {name: getattr(pipe, name) for name in _EXPERTS if getattr(pipe, name) is not None}
        self.denoiser: nn.Module = nn.ModuleDict(self.experts) if len(self.experts) > 1 else pipe.transformer
        self.boundary = (pipe.config.boundary_ratio or 0.0) * pipe.scheduler.config.num_train_timesteps
        mean, std = (torch.tensor(getattr(pipe.vae.config, f"latents_{name}")) for name in ("mean", "std"))
        self._mean, self._std = (value.view(1, -1, 1, 1, 1).to(device) for value in (mean, std))
        self._texts = Embedded(self._encode_text)
        self._set_size(*size)

    def _set_size(self, num_frames: int, height: int, width: int) -> None:
        vae, config = self.pipe.vae.config, self.pipe.transformer.config
        factor, patch = vae.scale_factor_spatial, config.patch_size
        frames = video.check_frames(self.model, num_frames, vae.scale_factor_temporal, patch[0])
        multiple = factor * max(patch[1:])
        common.check_size(self.model, (height, width), multiple, multiple * config.rope_max_seq_len)
        self.image_shape: tuple[int, ...] = (num_frames, 3, height, width)
        self.latent_shape: tuple[int, ...] = (vae.z_dim, frames, height // factor, width // factor)
        self._images = Embedded(self._encode_source)  # their latents are of this size

    def resized(self, height: int, width: int) -> Wan:
        """The same networks drawing another size."""
        other = copy(self)
        other._set_size(self.image_shape[0], height, width)
        return other

    # ---- conditioning ------------------------------------------------------------------------------------------------

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts and first frames, each distinct one once.

        A first frame is resized to the drawn size, without keeping its proportions, as the stock pipeline does.
        """
        given = common.check_sources(sources, prompts, self.num_sources, "wan")
        text = self._texts(prompts, [()] * len(prompts), self.device)
        if not self.from_image:
            return text
        images = self._images([""] * len(prompts), given, self.device)
        return Conditioning({**text.tensors, **images.tensors})

    def _encode_text(self, prompt: str, _: Sequence[Tensor]) -> Conditioning:
        embeds, _none = self.pipe.encode_prompt(
            [prompt], do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length,
            device=self.device,
        )  # fmt: skip
        if self.pipe.transformer.config.added_kv_proj_dim is not None:
            embeds = nn.functional.pad(embeds, (0, 0, 0, _IMAGE_TEXT - embeds.shape[1]))
        return Conditioning({"embeds": embeds.to(self.dtype)})

    def _encode_source(self, _: str, sources: Sequence[Tensor]) -> Conditioning:
        image = Image.fromarray(to_pixels(sources[0]))
        num_frames, _rgb, height, width = self.image_shape
        first = self.pipe.video_processor.preprocess(image, height=height, width=width).to(self.device).unsqueeze(2)
        if self.pipe.config.expand_timesteps:
            return Conditioning({"first_frame": self._latents(first)})
        grey = first.new_zeros(1, 3, num_frames - 1, height, width)
        latents = self._latents(torch.cat([first, grey], dim=2))
        given = latents.new_zeros(1, self.pipe.vae.config.scale_factor_temporal, *latents.shape[2:])
        given[:, :, 0] = 1
        tensors = {"beside": torch.cat([given, latents], dim=1).to(self.dtype)}
        if self.pipe.transformer.config.image_dim is not None:
            tensors["image"] = self.pipe.encode_image(image, self.device).to(self.dtype)
        return Conditioning(tensors)

    def free_text_encoders(self) -> None:
        """Drops the text encoder from memory; images can still be encoded."""
        self._texts.free(self.pipe, ("text_encoder",))

    # ---- the network -------------------------------------------------------------------------------------------------

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32; rows of a batch go to the expert of their time."""
        high = timestep >= self.boundary
        with common.autocast(self.device, self.dtype):
            if len(self.experts) == 1 or bool(high.all()):
                velocity = self._evaluate("transformer", x, timestep, cond)
            elif not bool(high.any()):
                velocity = self._evaluate("transformer_2", x, timestep, cond)
            else:
                rows = [high.nonzero().flatten(), (~high).nonzero().flatten()]
                parts = [
                    self._evaluate(name, x[own], timestep[own], cond[own])
                    for name, own in zip(_EXPERTS, rows, strict=True)
                ]
                velocity = torch.cat(parts)[torch.cat(rows).argsort()]
        return self._held(velocity.float(), x, timestep / self.pipe.scheduler.config.num_train_timesteps, cond)

    def _evaluate(self, name: str, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        tensors = cond.tensors
        if "beside" in tensors:
            x = torch.cat([x, tensors["beside"].to(x)], dim=1)
        if "first_frame" in tensors:  # fed as it is, at time 0; without an image one time for all tokens is the same
            x = torch.cat([tensors["first_frame"].to(x), x[:, :, 1:]], dim=2)
            per_frame, patch = x[0, 0, 0].numel(), self.pipe.transformer.config.patch_size
            tokens = per_frame // (patch[1] * patch[2])
            times = timestep[:, None].repeat(1, x.shape[2] // patch[0] * tokens)
            times[:, :tokens] = 0
            timestep = times
        output = self.experts[name](
            hidden_states=x.to(self.dtype),
            timestep=timestep,
            encoder_hidden_states=tensors["embeds"],
            encoder_hidden_states_image=tensors.get("image"),
            return_dict=False,
        )
        return output[0]  # type: ignore[no-any-return]

    def _held(self, velocity: Tensor, x: Tensor, sigma: Sigma, cond: Conditioning) -> Tensor:
        """The velocity that leads the first latent frame straight to the image's, where it is held there."""
        if "first_frame" not in cond.tensors:
            return velocity
        first, x = cond.tensors["first_frame"], x.to(velocity)
        return torch.cat([(x[:, :, :1] - first) / column(sigma, x), velocity[:, :, 1:]], dim=2)

    def passes(self, scale: float) -> int:
        """Two where guidance is on, at any scale but 1, which switches it off for both experts."""
        return common.two_passes(scale)

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """Classifier-free guidance in two passes; below the boundary its scale is `guidance_scale_2`, where given."""
        above = common.two_pass_guidance(network, cond, negative, scale)
        below = above
        if scale != 1 and self.guidance_scale_2 is not None:
            below = common.two_pass_guidance(network, cond, negative, self.guidance_scale_2)

        def velocity(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
            high = timestep >= self.boundary
            if below is above or bool(high.all()):
                found = above(x, sigma, timestep)
            elif not bool(high.any()):
                found = below(x, sigma, timestep)
            else:  # a batch of several times, which only forward recipes have
                high = high.view(-1, 1, 1, 1, 1).to(x.device)
                found = torch.where(high, above(x, sigma, timestep), below(x, sigma, timestep))
            return self._held(found, x, sigma, cond)  # by the exact sigma: timesteps may be rounded

        return velocity

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Grid "diffusers" is the stock scheduler's, "unipc_flow" that of Flow-GRPO's runs, "linspace" shifted once."""
        return schedules.flow_schedule(self.pipe.scheduler, num_steps, grid, shift)

    # ---- autoencoder and LoRA ----------------------------------------------------------------------------------------

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Decodes some clips at a time in float32."""
        return video.decode_clips(
            latents, self.vae_slice, lambda z: self.pipe.vae.decode(z * self._std + self._mean, return_dict=False)[0],
            gradient=gradient,
        )  # fmt: skip

    def encode_images(self, images: Tensor) -> Tensor:
        """Mean of the VAE's posterior, normalised as `decode` undoes it."""
        return video.encode_clips(images, self.image_shape, self.vae_slice, self._latents, self.device)

    def _latents(self, clips: Tensor) -> Tensor:
        return (self.pipe.vae.encode(clips).latent_dist.mode() - self._mean) / self._std

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`.

        That of the second expert stands in the folder `transformer_2`: stock loads it with
        `load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)`.
        """
        if len(self.experts) == 1:
            return common.write_lora(WanPipeline, folder, tensors, config)
        for name, part in common.split_experts(tensors, _EXPERTS):
            common.write_lora(WanPipeline, folder if name == "transformer" else folder / name, part, config)
        return folder / common.LORA_FILE


def meta_denoiser(model: str) -> nn.Module | None:
    """The transformer, or both experts by name, without weights; None where neither folder nor known hub id."""
    pairs = {name: KNOWN[name] for name in TWO_EXPERTS}
    parts = {
        name: common.on_meta(WanTransformer3DModel, common.part_config(model, name, known))
        for name, known in zip(_EXPERTS, (KNOWN, pairs), strict=True)
    }
    found = {name: part for name, part in parts.items() if part is not None}
    return nn.ModuleDict(found) if len(found) > 1 else parts["transformer"]


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is a Wan pipeline, and LoRA targets bind in each expert.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "wan", ("WanPipeline", "WanImageToVideoPipeline"))
    schedules.check_scheduler_folder(model)
    index = Path(model) / "model_index.json"
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        parts = {name: (content.get(name) or [None])[0] is not None for name in _EXPERTS}
        _check_experts(model, parts["transformer"], parts["transformer_2"], content.get("boundary_ratio"))
    network = meta_denoiser(model)
    for expert in network.values() if isinstance(network, nn.ModuleDict) else (network,):
        common.check_bound(expert, targets)


def _check_experts(model: str, first: bool, second: bool, boundary_ratio: float | None) -> None:
    if not first or second != (boundary_ratio is not None):
        raise ValueError(
            f"{model} has boundary_ratio {boundary_ratio}, {'a' if first else 'no'} transformer and "
            f"{'a' if second else 'no'} transformer_2: two experts need the boundary between them in model_index.json "
            "(0.875 for Wan2.2-T2V-A14B, 0.9 for I2V), and one has none"
        )


def load(
    model: str, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu", height: int | None = None,
    width: int | None = None, max_sequence_length: int = 512, vae_slice: int = 1, gradient_checkpointing: bool = False,
    num_frames: int | None = None, fps: float | None = None, vae_tiling: bool = False,
    guidance_scale_2: float | None = None, image_to_video: bool | None = None,
) -> Wan:  # fmt: skip
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of networks and text encoder, whose modules that stock keeps in float32 stay so; autoencoder and image
            encoder are float32.
        device: where everything lives.
        height: pixels; None takes 480, for TI2V-5B 704.
        width: pixels; None takes 832, for TI2V-5B 1280.
        max_sequence_length: UMT5 tokens. Prompts are padded with zeros to it and the padding is attended to, so another
            number than the stock 512 is another function. Wan 2.1 image to video always sees 512, cut earlier.
        vae_slice: clips decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).
        num_frames: of a clip, 1 and a multiple of 4; None takes 81.
        fps: frames a second; None takes 16, for TI2V-5B 24. The network does not read it.
        vae_tiling: decode in overlapping tiles of 256 pixels, for less memory. Their seams are visible to rewards, and
            the policy can learn to exploit or to hide them: leave it off where memory allows.
        guidance_scale_2: guidance of the second expert; None takes the first's scale.
        image_to_video: whether a source image is the first frame; None as the folder's own class says. TI2V-5B is
            published as text to video and does both.

    Raises:
        ValueError: nothing loadable there, or a setting that this checkpoint does not have.
    """
    cls = {None: DiffusionPipeline, True: WanImageToVideoPipeline, False: WanPipeline}[image_to_video]
    precision: Any = {"default": dtype, "vae": torch.float32, "image_encoder": torch.float32}
    pipe = common.load_stock(cls, model, family="Wan", dtype=precision)
    if not isinstance(pipe, WanPipeline | WanImageToVideoPipeline):
        raise ValueError(f"{model} is a {type(pipe).__name__}, and pipeline.name=wan loads Wan: set pipeline.name")
    _check_experts(model, pipe.transformer is not None, pipe.transformer_2 is not None, pipe.config.boundary_ratio)
    schedules.check_flow_scheduler(model, {"_class_name": type(pipe.scheduler).__name__, **pipe.scheduler.config})
    _check_options(pipe, model, max_sequence_length, guidance_scale_2)
    experts = tuple(name for name in _EXPERTS if getattr(pipe, name) is not None)
    common.freeze(pipe, device, denoisers=experts, gradient_checkpointing=gradient_checkpointing)
    for name in experts:
        video.in_float32(getattr(pipe, name).condition_embedder.time_embedder)
    if vae_tiling:
        pipe.vae.enable_tiling()
    own = (704, 1280, 24.0) if pipe.config.expand_timesteps else (480, 832, 16.0)
    return Wan(
        pipe, model=model, dtype=dtype, device=torch.device(device),
        size=(81 if num_frames is None else num_frames, height or own[0], width or own[1]), fps=fps or own[2],
        max_sequence_length=max_sequence_length, vae_slice=vae_slice, guidance_scale_2=guidance_scale_2,
    )  # fmt: skip


def _check_options(pipe: Any, model: str, max_sequence_length: int, guidance_scale_2: float | None) -> None:
    config = pipe.transformer.config
    if guidance_scale_2 is not None and pipe.transformer_2 is None:
        raise ValueError(f"pipeline.options.guidance_scale_2 ({guidance_scale_2}) is for two experts, {model} has one")
    if config.added_kv_proj_dim is not None and max_sequence_length > _IMAGE_TEXT:
        raise ValueError(
            f"pipeline.max_sequence_length ({max_sequence_length}) must be at most {_IMAGE_TEXT} for {model}"
        )
    wanted = config.out_channels
    if isinstance(pipe, WanImageToVideoPipeline) and not pipe.config.expand_timesteps:
        wanted += config.out_channels + pipe.vae.config.scale_factor_temporal
    if config.in_channels != wanted:
        raise ValueError(
            f"{model} reads {config.in_channels} channels, and {type(pipe).__name__} gives it {wanted}: set "
            "image_to_video to what the checkpoint is for"
        )


# ---- what `flowrl plan` asks -----------------------------------------------------------------------------------------


def default_size(network: Any) -> tuple[int, int, int | None]:
    """Height, width and frames that the model draws unless told otherwise."""
    return (704, 1280, 81) if network.config.out_channels == WAN_5B["out_channels"] else (480, 832, 81)


def text_tokens(model: str, max_sequence_length: int) -> int:
    """Tokens of a prompt; Wan 2.1 image to video fills it up."""
    config = common.part_config(model, "transformer", KNOWN) or {}
    return max_sequence_length if config.get("added_kv_proj_dim") is None else _IMAGE_TEXT


def meta_call(network: Any, height: int, width: int, num_frames: int | None, text_tokens: int) -> dict[str, Any]:
    """Arguments of one evaluation of one sample, without numbers in them; TI2V-5B has a first frame, which costs more.

    Raises:
        ValueError: the model cannot draw this size.
    """
    config, (step, *patch) = network.config, network.config.patch_size
    held = config.out_channels == WAN_5B["out_channels"]
    factor = 16 if held else 8  # pixels of a latent's side
    frames = video.check_frames("this model", num_frames or 0, 4, step)
    common.check_size("this model", (height, width), factor * max(patch), factor * max(patch) * config.rope_max_seq_len)
    latent = (frames, height // factor, width // factor)
    tokens = math.prod(latent) // math.prod(config.patch_size)
    shapes: dict[str, tuple[int, ...]] = {
        "hidden_states": (1, config.in_channels, *latent), "timestep": (1, tokens) if held else (1,),
        "encoder_hidden_states": (1, text_tokens, config.text_dim),
    }  # fmt: skip
    if config.image_dim is not None:
        shapes["encoder_hidden_states_image"] = (1, 257, config.image_dim)  # tokens of CLIP's image of 224 x 224
    return common.meta_arguments(shapes)
