"""Model families: one file each, all behind the same small contract.

A pipeline encodes prompts, evaluates the denoising network, decodes latents, and knows its schedule and LoRA targets.
It wraps diffusers' own classes, so any checkpoint of the family loads from a folder or the hub.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from flowrl.samplers.guidance import Network, Velocity
from flowrl.trajectory import Conditioning, Schedule

PIPELINES = {
    "cogvideox": "flowrl.pipelines.cogvideox",
    "flux": "flowrl.pipelines.flux",
    "flux2": "flowrl.pipelines.flux2",
    "hunyuan_video": "flowrl.pipelines.hunyuan_video",
    "kontext": "flowrl.pipelines.kontext",
    "ltx_video": "flowrl.pipelines.ltx_video",
    "qwen_image": "flowrl.pipelines.qwen_image",
    "qwen_image_edit": "flowrl.pipelines.qwen_image_edit",
    "sana": "flowrl.pipelines.sana",
    "sd": "flowrl.pipelines.sd",
    "sd3": "flowrl.pipelines.sd3",
    "sdxl": "flowrl.pipelines.sdxl",
    "wan": "flowrl.pipelines.wan",
    "z_image": "flowrl.pipelines.z_image",
}
"""Family name -> module with `load(model, ...) -> Pipeline`, `check(model, targets)`, `meta_denoiser(model)`,
`LORA_TARGETS`, `KNOWN` (hub id -> dimensions) and `LICENCES`."""


class Pipeline(Protocol):
    """What recipes need of a model family."""

    model: str
    """Folder or hub id that was loaded."""
    denoiser: nn.Module
    """The denoising network, or a ModuleDict of several; LoRA is added to it."""
    lora_targets: tuple[str, ...]
    """The family's published LoRA targets."""
    latent_shape: tuple[int, ...]
    """Shape of one latent, without batch and unpacked: [C, h, w] of an image, [C, F, h, w] of a video."""
    image_shape: tuple[int, ...]
    """Shape of what `decode` makes of one latent: [3, H, W], or [F, 3, H, W]."""

    @property
    def num_sources(self) -> tuple[int, int]:
        """Least and most source images of a prompt; (0, 0) where images come from text alone."""
        ...

    @property
    def fps(self) -> float | None:
        """Frames a second of videos; None for images."""
        ...

    def encode(self, prompts: Sequence[str], sources: Sequence[Sequence[Tensor]] | None = None) -> Conditioning:
        """Embeds prompts with their source images (float32 [3, h, w] in [0, 1]), each once, on the own device."""
        ...

    def free_text_encoders(self) -> None:
        """Drops the text encoders; only prompts that were encoded before can be asked for afterwards."""
        ...

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity `noise - clean` in float32 of latents `x` `[b, *latent]` at `timestep` `[b]`."""
        ...

    def passes(self, scale: float) -> int:
        """Network rows that guidance at a scale needs a sample and step: 2 where a negative prompt is read, else 1."""
        ...

    def guided(self, network: Network, cond: Conditioning, negative: Conditioning | None, scale: float) -> Velocity:
        """The family's guidance of a network; `negative` may be None where `passes(scale)` is 1."""
        ...

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """The model's own noise levels for a number of steps; `shift` replaces the model's own shift."""
        ...

    def resized(self, height: int, width: int) -> Pipeline:
        """The same networks drawing another size."""
        ...

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Images float32 `[b, 3, H, W]` or videos `[b, F, 3, H, W]` in [0, 1] of finished latents.

        With `gradient` they carry that of `latents`.
        """
        ...

    def encode_images(self, images: Tensor) -> Tensor:
        """Latents float32 `[b, *latent]` of what `decode` would give, in [0, 1] and of the drawn size."""
        ...

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`."""
        ...


STOCK = {
    "CogVideoXPipeline": "cogvideox",
    "Flux2KleinPipeline": "flux2",
    "Flux2Pipeline": "flux2",
    "FluxKontextPipeline": "kontext",
    "FluxPipeline": "flux",
    "HunyuanVideoPipeline": "hunyuan_video",
    "LTXPipeline": "ltx_video",
    "QwenImageEditPipeline": "qwen_image_edit",
    "QwenImageEditPlusPipeline": "qwen_image_edit",
    "QwenImagePipeline": "qwen_image",
    "SanaPipeline": "sana",
    "StableDiffusion3Pipeline": "sd3",
    "StableDiffusionPipeline": "sd",
    "StableDiffusionXLPipeline": "sdxl",
    "WanImageToVideoPipeline": "wan",
    "WanPipeline": "wan",
    "ZImagePipeline": "z_image",
}
"""Stock pipeline class, as folders name it -> family."""


def family_of(model: str) -> str:
    """The family of a model: of a folder by its model_index.json, of a hub id by the families' lists.

    Raises:
        ValueError: a folder of a class that no family loads, or a hub id that none lists.
    """
    index = Path(model) / "model_index.json"
    if index.is_file():
        found = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
        if found not in STOCK:
            raise ValueError(f"{model} is a {found}, and no family loads that: there are {', '.join(STOCK)}")
        return STOCK[found]
    if Path(model).exists():
        raise ValueError(f"{model} is no diffusers pipeline: it has no model_index.json")
    for name in PIPELINES:
        if model in family(name).KNOWN:
            return name
    raise ValueError(
        f"{model} is no folder here, and no hub id that a family lists, so its family is not known: for training set "
        "pipeline.name; `flowrl sample` and `flowrl eval` take a run, or a folder that it was downloaded to"
    )


def family(name: str) -> Any:
    """The module of a model family.

    Raises:
        ValueError: no family has this name.
    """
    if name not in PIPELINES:
        raise ValueError(f"unknown pipeline {name!r}: choose one of {', '.join(PIPELINES)}")
    return importlib.import_module(PIPELINES[name])
