"""Model families: one file each, all behind the same small contract.

A pipeline encodes prompts, evaluates the denoising network, decodes latents, and knows its schedule and LoRA targets.
It wraps diffusers' own classes, so any checkpoint of the family loads from a folder or the hub.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from flowrl.trajectory import Conditioning, Schedule

PIPELINES = {"sd3": "flowrl.pipelines.sd3"}
"""Family name -> module with `load(model, ...) -> Pipeline` and `check(model, targets)`."""


class Pipeline(Protocol):
    """What recipes need of a model family."""

    model: str
    """Folder or hub id that was loaded."""
    transformer: nn.Module
    """The denoising network; LoRA is added to it."""
    lora_targets: tuple[str, ...]
    """The family's published LoRA targets."""
    latent_shape: tuple[int, ...]
    """Shape of one latent, without batch."""

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Embeds prompts, each once, on the pipeline's device."""
        ...

    def free_text_encoders(self) -> None:
        """Drops the text encoders; only prompts that were encoded before can be asked for afterwards."""
        ...

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity of latents `x` `[b, *latent]` at `timestep` `[b]`."""
        ...

    def schedule(self, num_steps: int, grid: str) -> Schedule:
        """The model's own noise levels for a number of steps."""
        ...

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Images float32 `[b, 3, H, W]` in [0, 1] of finished latents; with `gradient` they carry that of `latents`."""
        ...

    def encode_images(self, images: Tensor) -> Tensor:
        """Latents float32 `[b, *latent]` of images in [0, 1] of the drawn size, which `decode` turns back to them."""
        ...

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`."""
        ...


def family(name: str) -> Any:
    """The module of a model family.

    Raises:
        ValueError: no family has this name.
    """
    if name not in PIPELINES:
        raise ValueError(f"unknown pipeline {name!r}: choose one of {', '.join(PIPELINES)}")
    return importlib.import_module(PIPELINES[name])
