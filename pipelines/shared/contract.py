"""What recipes need of a loaded pipeline, and commands of a model family: two contracts for families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowrl.samplers.guidance import Network, TrainNegative, Velocity
from flowrl.trajectory import Conditioning, Schedule


class Pipeline(Protocol):
    """What recipes need of a model family."""

    model: str
    """The loaded folder or hub id."""
    denoiser: nn.Module
    """The denoising network, or a ModuleDict of several; LoRA is added to it."""
    experts: dict[str, Any]
    """The networks of `denoiser` by the names of their parts in a stock folder."""
    lora_targets: tuple[str, ...]
    """The family's published LoRA targets."""
    latent_shape: tuple[int, ...]
    """Shape of one latent, without batch and unpacked: [C, h, w] of an image, [C, F, h, w] of a video; of a video with
    sound [tokens, C], those of the video and then those of the sound."""
    attention: str
    """The kernel that computes its attention, a word of `KERNELS`."""
    image_shape: tuple[int, ...]
    """Shape of what `decode` makes of one latent: [3, H, W], or [F, 3, H, W]."""

    @property
    def parts(self) -> Mapping[str, tuple[Any, ...]]:
        """Parts of a latent that rewards can speak of, by name: their indexes in it. Each element lies in one part."""

    @property
    def num_sources(self) -> tuple[int, int]:
        """Least and most source images of a prompt; (0, 0) if images come from text alone."""

    @property
    def fps(self) -> float | None:
        """Frames per second of videos; None for images."""

    def encode(self, prompts: Sequence[str], sources: Sequence[Sequence[Tensor]] | None = None) -> Conditioning:
        """Embeds prompts with their source images (float32 [3, h, w] in [0, 1]), each once, on the own device."""

    def keeps(self, prompts: Sequence[str], sources: Sequence[Sequence[Tensor]] | None = None) -> bool:
        """Whether `encode` of these needs no text encoder, because they are known or in a cache."""

    def keep_embeddings(self, folder: Path, encoders: str) -> None:
        """Reads embeddings from a folder and writes new ones into it; `encoders` identifies the encoders."""

    def load_text_encoders(self) -> None:
        """Loads missing text encoders."""

    def awake(self, *parts: str) -> AbstractContextManager[None]:
        """Inside, parts that usually rest on the host are on the device: text_encoders, image_encoder, vae."""

    def load_denoiser(self) -> None:
        """Loads the denoiser if it was left for later."""

    def num_cut(self, prompts: Sequence[str]) -> int:
        """How many prompts are longer than the part that is read; call it before freeing the text encoders."""

    def free_text_encoders(self) -> None:
        """Drops the text encoders; afterwards `encode` takes only prompts that it has encoded before."""

    def network(self, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        """Velocity `noise - clean` in float32 of latents `x` `[b, *latent]` at `timestep` `[b]`."""

    def passes(self, scale: float) -> int:
        """Network rows that guidance needs per sample and step: 2 if it reads a negative prompt, else 1."""

    def guided(
        self,
        network: Network,
        cond: Conditioning,
        negative: Conditioning | None,
        scale: float,
        train_negative: TrainNegative = True,
    ) -> Velocity:
        """The family's guidance of a network; `negative` may be None where `passes(scale)` is 1. How the half with the
        negative prompt is trained (`flowrl.samplers.guidance.classifier_free_guidance`) has no meaning there either:
        the one half is always trained."""

    def schedule(self, num_steps: int, grid: str, shift: float | None = None) -> Schedule:
        """The model's own noise levels for a number of steps; `shift` replaces the model's own shift."""

    def resized(self, height: int | None, width: int | None) -> Pipeline:
        """The same networks drawing another size; None is the checkpoint's own."""

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        """Images float32 `[b, 3, H, W]` or videos `[b, F, 3, H, W]` in [0, 1] of finished latents. With `gradient` they
        carry that of `latents`."""

    @property
    def sound_rate(self) -> int | None:
        """Sample rate of the videos' sound; None if they are silent."""

    def decode_sound(self, latents: Tensor) -> Tensor:
        """Sound float32 `[b, channels, samples]` in [-1, 1] of finished latents; not of silent families."""

    def encode_images(self, images: Tensor) -> Tensor:
        """Latents float32 `[b, *latent]` of images or videos in [0, 1] of the drawn size: the inverse of `decode`."""

    def save_lora(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Writes a LoRA as stock diffusers loads it with `load_lora_weights(folder)`."""


class ModelFamily(Protocol):
    """What commands need of a family: before weights load, to load them, and what `flowrl plan` counts."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The family's published LoRA targets."""

    @property
    def num_sources(self) -> tuple[int, int] | None:
        """Least and most source images of a prompt; None if checkpoint and options decide."""

    @property
    def clips(self) -> tuple[str, ...]:
        """Keys of a prompt's row whose clips are sources too, before its images."""

    @property
    def needed_clips(self) -> tuple[str, ...]:
        """Those of them that every prompt has."""

    @property
    def sources_option(self) -> str | None:
        """The option that sets the number of source images."""

    @property
    def parts(self) -> Mapping[str, Any]:
        """Names of parts of a state that rewards can judge; empty if the state is unknown."""

    @property
    def denoisers(self) -> tuple[str, ...]:
        """Parts of a checkpoint that denoise."""

    @property
    def videos(self) -> bool:
        """Whether it makes videos."""

    @property
    def sound(self) -> Any:
        """How its videos sound (`common.Sound`); None of silent ones."""

    def check(self, model: str, targets: Sequence[str] | None, rank: int | None = None) -> None:
        """Refuses a model of another family, and a LoRA that binds to nothing or is too wide, before weights load."""

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuses `pipeline.options` that the family does not have."""

    def attends(self, model: str) -> Any:
        """Head sizes and masks of a model's attention (`attention_words.Known`), as far as known."""

    def load(
        self, model: str, *, dtype: torch.dtype = ..., device: torch.device | str = ..., attention: str = ...,
        compile: str = ..., how: Any = ..., **options: Any,
    ) -> Pipeline:  # fmt: skip
        """Loads a folder or hub id; `how` (`stock_loading.Loading`) says what at once, `options` are the family's."""

    def block_kinds(self, model: str) -> dict[str, int]:
        """Blocks of the denoiser that are alike, by kind (`like_blocks.block_kinds`); empty if unknown."""

    def meta_denoiser(self, model: str, kinds: Mapping[str, int] | None = None) -> nn.Module | None:
        """The denoiser without weights, or experts by name; None for an unknown model. `kinds`: blocks of each."""

    def planned_size(self, model: str, options: Mapping[str, Any]) -> Any:
        """Height, width and frames (`cards.Size`) that a model draws with options; None if unknown."""

    def text_tokens(self, model: str, options: Mapping[str, Any]) -> int:
        """Tokens of text that the denoiser reads with options."""

    def rows(self, model: str, scale: float) -> int:
        """Network rows that guidance at a scale needs per sample and step."""

    def remembers(self, model: str, options: Mapping[str, Any], scale: float, num_steps: int) -> bool:
        """Whether guidance at a scale goes by earlier steps of a path of so many (`flowrl.samplers.path_memory`)."""

    def meta_call(self, model: str, size: Any, text_tokens: int) -> dict[str, Any]:
        """Keyword arguments of one evaluation of one sample, on the meta device."""
