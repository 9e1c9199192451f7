"""FLUX.2: any checkpoint that stock `Flux2Pipeline` (dev) or `Flux2KleinPipeline` (klein, distilled or base) loads.

Velocity network `Flux2Transformer2DModel`, fed sigma and one token a latent pixel: latents are the VAE's, folded 2 x 2
into channels and whitened by the statistics that the VAE carries. One language model embeds prompts (Mistral for dev,
Qwen3 for klein). Guidance is an input of the network (dev), two passes (klein base), or there is none (klein).

A prompt may have reference images, which the network reads as further tokens; they are brought to the size that is
drawn (stock keeps each one's own size up to a megapixel).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import DiffusionPipeline, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from torch import Tensor, nn

from flowrl.pipelines import common, flux
from flowrl.pipelines import stock_schedules as schedules
from flowrl.pipelines.common import Embedded, Sources
from flowrl.samplers.guidance import Network, Velocity
from flowrl.trajectory import Conditioning, Schedule

LORA_TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    "ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out", "attn.to_qkv_mlp_proj",
)  # fmt: skip
"""All of the double-stream blocks, and the fused input projection of the single-stream ones."""

FLUX2_DEV: dict[str, Any] = {
    "patch_size": 1, "in_channels": 128, "num_layers": 8, "num_single_layers": 48, "attention_head_dim": 128,
    "num_attention_heads": 48, "joint_attention_dim": 15360, "timestep_guidance_channels": 256, "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32), "rope_theta": 2000, "eps": 1e-6, "guidance_embeds": True,
}  # fmt: skip
"""The dimensions of FLUX.2-dev's transformer."""

KLEIN_4B: dict[str, Any] = {
    **FLUX2_DEV, "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
    "guidance_embeds": False,
}  # fmt: skip
"""The dimensions of the 4-billion klein transformers, distilled or base."""

KLEIN_9B: dict[str, Any] = {
    **KLEIN_4B, "num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288,
}  # fmt: skip
"""The dimensions of the 9-billion klein transformers, distilled or base."""

KNOWN = {
    "black-forest-labs/FLUX.2-dev": FLUX2_DEV,
    "black-forest-labs/FLUX.2-klein-4B": KLEIN_4B,
    "black-forest-labs/FLUX.2-klein-base-4B": KLEIN_4B,
    "black-forest-labs/FLUX.2-klein-9B": KLEIN_9B,
    "black-forest-labs/FLUX.2-klein-base-9B": KLEIN_9B,
}
"""Hub id -> its transformer's configuration: LoRA targets can be checked before gigabytes are fetched."""

LICENCES = {name: ("Apache 2.0", False) if name.endswith("-4B") else ("FLUX Non-Commercial", True) for name in KNOWN}
"""Hub id -> (licence of the weights, whether the hub asks to accept it)."""

CLASSES: dict[str, Any] = {"Flux2Pipeline": Flux2Pipeline, "Flux2KleinPipeline": Flux2KleinPipeline}
"""The stock pipelines of the family by name."""

Guidance = Literal["embedded", "two_pass", "none"]


class Flux2:
    """A FLUX.2 pipeline; see `flowrl.pipelines.Pipeline` for what each member is."""

    lora_targets: tuple[str, ...] = LORA_TARGETS
    fps: float | None = None

    def __init__(
        self,
        pipe: Flux2Pipeline | Flux2KleinPipeline,
        *,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        size: tuple[int, int],
        max_sequence_length: int,
        vae_slice: int,
        max_references: int,
    ) -> None:
        """Takes a loaded stock pipeline; `size` is (height, width) in pixels, `vae_slice` counts images."""
        self.pipe, self.model, self.dtype, self.device = pipe, model, dtype, device
        self.denoiser: nn.Module = pipe.transformer
        self.guidance = guidance_of(pipe)
        self.num_sources: tuple[int, int] = (0, max_references)
        self.max_sequence_length, self.vae_slice = max_sequence_length, vae_slice
        self._embedded = Embedded(self._encode_text)
        self._set_size(*size)

    def _set_size(self, height: int, width: int) -> None:
        factor = 2 * self.pipe.vae_scale_factor
        common.check_size(self.model, (height, width), factor)
        self.image_shape: tuple[int, ...] = (3, height, width)
        self.latent_shape: tuple[int, ...] = (
            self.pipe.transformer.config.in_channels, height // factor, width // factor,
        )  # fmt: skip
        images = range(1 + self.num_sources[1])
        self._ids = torch.cat([token_ids(self.latent_shape, image) for image in images]).to(self.device)
        self._images = Embedded(self._encode_references)  # another size has other latents

    def resized(self, height: int, width: int) -> Flux2:
        """The same networks drawing another size.

        Embeddings of prompts are shared. References are encoded anew, which the VAE can also after the text encoder is
        freed.
        """
        other = copy(self)
        other._set_size(height, width)
        return other

    def encode(self, prompts: Sequence[str], sources: Sources | None = None) -> Conditioning:
        """Embeds prompts and encodes their references, each distinct one once."""
        given = self._check_sources(prompts, sources)
        text = self._embedded(prompts, [()] * len(prompts), self.device)
        if not self.num_sources[1]:
            return text
        images = self._images([""] * len(prompts), given, self.device)
        return Conditioning({**text.tensors, **images.tensors})

    def _check_sources(self, prompts: Sequence[str], sources: Sources | None) -> Sources:
        most = max(map(len, sources or [()]), default=0)
        if most > self.num_sources[1]:
            raise ValueError(
                f"a prompt has {most} source images, and {self.model} was loaded for at most {self.num_sources[1]}: "
                f"set pipeline.options.max_references={most}"
            )
        return common.check_sources(sources, prompts, self.num_sources, "flux2")

    def _encode_text(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        embeds, _ = self.pipe.encode_prompt([prompt], device=self.device, max_sequence_length=self.max_sequence_length)
        return Conditioning({"embeds": embeds.to(self.dtype)})

    def _encode_references(self, prompt: str, sources: Sequence[Tensor]) -> Conditioning:
        latents = torch.zeros(1, self.num_sources[1], *self.latent_shape, dtype=self.dtype, device=self.device)
        for place, source in enumerate(sources):
            latents[0, place] = self.encode_images(flux.covering(source.float(), *self.image_shape[1:])[None])[0]
        return Conditioning({"references": latents, "num_references": torch.tensor([len(sources)])})

    def free_text_encoders(self) -> None:
        """Drops the text encoder from memory; new references can still be encoded."""
        self._embedded.free(self.pipe, ("text_encoder",))

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity in float32; the network runs in the pipeline's dtype, its LoRA weights stay float32.

        Samples with different numbers of references are evaluated apart, as many calls as there are numbers.
        """
        if not self.num_sources[1]:
            return self._velocity(x, timestep, cond, 0)
        counts = cond.tensors["num_references"].tolist()
        different = sorted(set(counts))
        if len(different) == 1:
            return self._velocity(x, timestep, cond, different[0])
        rows = [[row for row, own in enumerate(counts) if own == count] for count in different]
        parts = [
            self._velocity(x[own], timestep[own], cond[own], count) for own, count in zip(rows, different, strict=True)
        ]
        order = torch.tensor([row for own in rows for row in own], device=x.device)
        return torch.cat(parts)[order.argsort()]

    def _velocity(self, x: Tensor, timestep: Tensor, cond: Conditioning, count: int) -> Tensor:
        embeds, num_tokens = cond.tensors["embeds"], x.shape[2] * x.shape[3]
        tokens = pack(x.to(self.dtype))
        if count:
            references = cond.tensors["references"][:, :count]
            tokens = torch.cat([tokens, *(pack(image) for image in references.unbind(1))], dim=1)
        text_ids = torch.zeros(embeds.shape[1], 4, device=embeds.device)
        text_ids[:, 3] = torch.arange(embeds.shape[1], device=embeds.device)
        with common.autocast(self.device, self.dtype):
            output = self.denoiser(
                hidden_states=tokens,
                timestep=timestep / 1000,
                guidance=cond.tensors.get("guidance"),
                encoder_hidden_states=embeds,
                txt_ids=text_ids,
                img_ids=self._ids[: num_tokens * (1 + count)],
                return_dict=False,
            )[0]
        return output[:, :num_tokens].float().transpose(1, 2).reshape(x.shape)  # type: ignore[no-any-return]

    def passes(self, scale: float) -> int:
        """Two for klein base where guidance is on, at any scale but 1; else one."""
        return common.two_passes(scale) if self.guidance == "two_pass" else 1

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """dev: the scale as an input of the network; klein base: two passes, both with the prompt's references."""
        if self.guidance != "two_pass":
            return flux.distilled_guidance(network, cond, scale, embeds=self.guidance == "embedded", model=self.model)
        if negative is not None and self.num_sources[1]:
            shared = {name: cond.tensors[name] for name in ("references", "num_references")}
            negative = Conditioning({**negative.expand(len(cond)).tensors, **shared})
        return common.two_pass_guidance(network, cond, negative, scale)

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """Grids "diffusers", the stock pipeline's, and "linspace" are the same here."""
        mu = empirical_mu(self.latent_shape[1] * self.latent_shape[2], num_steps)
        return schedules.stock_schedule(self.pipe.scheduler.config, num_steps, grid, mu, shift)

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Decodes slice by slice in float32."""
        vae = self.pipe.vae
        mean, std = statistics(vae)
        return common.decode_slices(
            latents,
            self.vae_slice,
            lambda z: vae.decode(unfold(z * std + mean), return_dict=False)[0],
            gradient=gradient,
        )

    def encode_images(self, images: Tensor) -> Tensor:
        """Mean of the VAE's posterior, folded and whitened as `decode` undoes it."""
        vae = self.pipe.vae
        mean, std = statistics(vae)
        return common.encode_slices(
            images, self.image_shape, self.vae_slice,
            lambda x: (fold(vae.encode(x).latent_dist.mode()) - mean) / std, self.device,
        )  # fmt: skip

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`."""
        return common.write_lora(type(self.pipe), folder, tensors, config)


def guidance_of(pipe: Flux2Pipeline | Flux2KleinPipeline) -> Guidance:
    """How a stock pipeline guides: klein that is not distilled in two passes, dev through an input of its network."""
    if isinstance(pipe, Flux2KleinPipeline):
        return "none" if pipe.config.is_distilled else "two_pass"
    return "embedded" if pipe.transformer.config.guidance_embeds else "none"


def pack(x: Tensor) -> Tensor:
    """Latents `[b, c, h, w]` as tokens, row by row, `[b, h * w, c]`."""
    return x.flatten(2).transpose(1, 2)


def fold(latents: Tensor) -> Tensor:
    """The VAE's latents `[b, c, 2h, 2w]` with 2 x 2 pixels folded into channels, `[b, 4c, h, w]`."""
    return nn.functional.pixel_unshuffle(latents, 2)


def unfold(latents: Tensor) -> Tensor:
    """The inverse of `fold`."""
    return nn.functional.pixel_shuffle(latents, 2)


def statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation `[1, 4c, 1, 1]` of folded latents, which the VAE carries as a batch norm's."""
    mean, variance = (value.view(1, -1, 1, 1) for value in (vae.bn.running_mean, vae.bn.running_var))
    return mean, (variance + vae.config.batch_norm_eps).sqrt()


def token_ids(shape: Sequence[int], image: int = 0) -> Tensor:
    """Position of every token `[n, 4]`: (10 * image, row, column, 0); image 0 is the one that is drawn."""
    time, zero = torch.tensor([10 * image]), torch.zeros(1, dtype=torch.long)
    return torch.cartesian_prod(time, torch.arange(shape[1]), torch.arange(shape[2]), zero).float()


def empirical_mu(num_tokens: int, num_steps: int) -> float:
    """FLUX.2's logarithm of the shift, fitted by its authors to image size and number of steps.

    With n tokens it is `1.6927e-4 n + 0.45666666` at 200 steps and `8.73809524e-5 n + 1.89833333` at 10, linear in the
    steps between and beyond; above 4300 tokens the first holds for any number of steps.
    """
    at_200, at_10 = 1.6927e-4 * num_tokens + 0.45666666, 8.73809524e-5 * num_tokens + 1.89833333
    return at_200 if num_tokens > 4300 else at_200 + (at_200 - at_10) / 190 * (num_steps - 200)


def meta_denoiser(model: str) -> nn.Module | None:
    """The transformer without weights: of a folder, or of a known hub id; None where neither is."""
    return common.on_meta(Flux2Transformer2DModel, common.part_config(model, "transformer", KNOWN))


def check(model: str, targets: Sequence[str] | None) -> None:
    """Checks what is known before weights load: the folder is a FLUX.2 pipeline, and every LoRA target binds.

    A hub id that is neither on disk nor in `KNOWN` is left to `load`.

    Raises:
        ValueError: says what is wrong and what to change.
    """
    common.check_folder(model, "flux2", tuple(CLASSES))
    common.check_bound(meta_denoiser(model), targets)


def _class_of(model: str) -> Any:
    """The stock class that a checkpoint names."""
    try:
        name = DiffusionPipeline.load_config(model).get("_class_name")
    except OSError:
        return Flux2Pipeline  # loading it says what is wrong
    if name not in CLASSES:
        raise ValueError(
            f"{model} is a {name}, and pipeline.name=flux2 loads {' or '.join(CLASSES)}: set pipeline.name to the "
            "family of the model"
        )
    return CLASSES[name]


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
    max_references: int = 0,
) -> Flux2:
    """Loads a checkpoint from a folder or the hub.

    Args:
        model: folder or hub id.
        dtype: of network and text encoder; the VAE stays in float32.
        device: where everything lives.
        height: pixels; None takes the stock pipeline's own, 1024.
        width: pixels; None takes the stock pipeline's own, 1024.
        max_sequence_length: tokens of a prompt, its chat template included.
        vae_slice: images decoded at once.
        gradient_checkpointing: recompute blocks in the backward pass (same numbers, less memory, +40 % time).
        max_references: most source images of a prompt; room is kept for so many beside every prompt.

    Raises:
        ValueError: nothing loadable there, or a negative number of references.
    """
    if max_references < 0:
        raise ValueError(f"pipeline.options.max_references must be at least 0, got {max_references}")
    pipe = common.load_stock(_class_of(model), model, family="FLUX.2", dtype=dtype)
    common.freeze(pipe, device, denoisers=("transformer",), gradient_checkpointing=gradient_checkpointing)
    own = pipe.default_sample_size * pipe.vae_scale_factor
    return Flux2(
        pipe,
        model=model,
        dtype=dtype,
        device=torch.device(device),
        size=(height or own, width or own),
        max_sequence_length=max_sequence_length,
        vae_slice=vae_slice,
        max_references=max_references,
    )


# ---- what `flowrl plan` asks -----------------------------------------------------------------------------------------


def default_size(network: nn.Module) -> tuple[int, int, int | None]:
    """Height and width in pixels that the model draws unless told otherwise; no frames."""
    return flux.default_size(network)


def passes(model: str, scale: float) -> int:
    """`Flux2.passes`, before weights load: of a folder, or of a hub id by its name."""
    path = Path(model) / "model_index.json"
    if path.is_file():
        index = json.loads(path.read_text(encoding="utf-8"))
        base = index["_class_name"] == "Flux2KleinPipeline" and not index.get("is_distilled", False)
    else:
        base = "klein-base" in model
    return common.two_passes(scale) if base else 1


def meta_call(network: nn.Module, height: int, width: int, num_frames: int | None, text_tokens: int) -> dict[str, Any]:
    """Arguments of one evaluation of one sample without references, without numbers in them.

    Raises:
        ValueError: the model cannot draw this size.
    """
    config: Any = network.config
    common.check_size("this model", (height, width), flux.PATCH)
    tokens = (height // flux.PATCH) * (width // flux.PATCH)
    shapes: dict[str, tuple[int, ...]] = {
        "hidden_states": (1, tokens, config.in_channels),
        "timestep": (1,),
        "encoder_hidden_states": (1, text_tokens, config.joint_attention_dim),
        "img_ids": (tokens, 4),
        "txt_ids": (text_tokens, 4),
    }
    if config.guidance_embeds:
        shapes["guidance"] = (1,)
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()} | {"return_dict": False}
