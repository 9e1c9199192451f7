"""What families share, as functions: loading and checking folders, embedding prompts once, decoding, saving a LoRA."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
import transformers
from torch import Tensor, nn

from flowrl.pipelines.lora import check_targets, lora_ready_for_diffusers
from flowrl.samplers.guidance import Network, Velocity, classifier_free_guidance, conditioned
from flowrl.samplers.guidance_rules import Rule, linear_cfg
from flowrl.trajectory import Conditioning

Sources = Sequence[Sequence[Tensor]]
"""The source images of each prompt, float32 [3, h, w] in [0, 1]."""

EMBEDDING_CACHE = 2048
"""Prompts whose embeddings are kept on the host while the text encoders are at hand."""

LORA_FILE = "pytorch_lora_weights.safetensors"


def quiet_libraries() -> None:
    """Silences loading bars and the stock warning that prints every padded prompt of a short context."""
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def check_folder(model: str, name: str, classes: Sequence[str]) -> None:
    """Refuses a folder that is no pipeline of one of these stock classes; a hub id passes.

    Raises:
        ValueError: says what the folder is and what the family loads.
    """
    if not Path(model).is_dir():
        return
    index = Path(model) / "model_index.json"
    if not index.is_file():
        raise ValueError(f"{model} is no diffusers pipeline: it has no model_index.json")
    found = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    if found not in classes:
        raise ValueError(
            f"{model} is a {found}, and pipeline.name={name} loads {' or '.join(classes)} folders: set pipeline.name "
            "to the family of the model"
        )


def part_config(model: str, part: str, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """A part's configuration before weights load: of a folder, else what is known of a hub id; None for neither."""
    path = Path(model) / part / "config.json"
    if path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return dict(known[model]) if model in known else None


def on_meta(cls: Any, config: Mapping[str, Any] | None) -> nn.Module | None:
    """A network without weights; None without a configuration."""
    if config is None:
        return None
    with torch.device("meta"):
        return cls.from_config(dict(config))  # type: ignore[no-any-return]


def check_bound(network: nn.Module | None, targets: Sequence[str] | None) -> None:
    """Refuses LoRA targets that bind to nothing, where the network's shape is known."""
    if network is not None and targets is not None:
        check_targets(network, targets)


def load_stock(
    cls: Any, model: str, *, family: str, dtype: torch.dtype | Mapping[str, torch.dtype], **options: Any
) -> Any:
    """A stock pipeline from a folder or the hub, on the CPU; its autoencoder in float32, never rounded on the way.

    Raises:
        ValueError: nothing loadable there.
    """
    quiet_libraries()
    parts = {"default": dtype, "vae": torch.float32} if isinstance(dtype, torch.dtype) else dict(dtype)
    try:
        pipe = cls.from_pretrained(model, dtype=parts, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"could not load {model!r} as a {family} pipeline ({str(error).splitlines()[0]}): give a folder written by "
            "save_pretrained, or a hub id that this machine can reach and is allowed to read"
        ) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


def freeze(pipe: Any, device: torch.device | str, *, denoisers: Sequence[str], gradient_checkpointing: bool) -> None:
    """Freezes every network of a stock pipeline on a device, with the autoencoder in float32.

    Images' autoencoders also get channels-last weights, a quarter faster to decode on CPU and GPU.
    """
    vae = getattr(pipe, "vae", None)
    if vae is not None:
        images = not any(isinstance(module, nn.Conv3d) for module in vae.modules())
        vae.to(torch.float32, memory_format=torch.channels_last if images else torch.preserve_format)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval().to(device)
    for name in denoisers if gradient_checkpointing else ():
        getattr(pipe, name).enable_gradient_checkpointing()


def meta_arguments(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Keyword arguments of a stock network that gives a tuple: tensors of these shapes on the meta device."""
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()} | {"return_dict": False}


def check_size(model: str, size: tuple[int, int], multiple: int, largest: int | None = None) -> None:
    """Refuses a height or width that the model cannot draw.

    Raises:
        ValueError: names the key.
    """
    for name, pixels in zip(("height", "width"), size, strict=True):
        if pixels % multiple or pixels <= 0 or (largest is not None and pixels > largest):
            limit = "" if largest is None else f" and at most {largest}"
            raise ValueError(f"pipeline.{name} ({pixels}) must be a multiple of {multiple}{limit} for {model}")


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The network's arithmetic in a low dtype, while LoRA weights stay float32.

    Without a cache of casts: a call reads each LoRA weight once, and inside a caller's own autocast region the cache
    would keep the weights of the slot that ran before.
    """
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)


def check_sources(sources: Sources | None, prompts: Sequence[str], allowed: tuple[int, int], family: str) -> Sources:
    """The source images of each prompt, or none for each.

    Raises:
        ValueError: a prompt has more or fewer images than the family takes.
    """
    given = [()] * len(prompts) if sources is None else sources
    least, most = allowed
    for prompt, images in zip(prompts, given, strict=True):
        if not least <= len(images) <= most:
            wanted = "no source image" if not most else f"{least}" if least == most else f"{least} to {most}"
            raise ValueError(
                f"prompt {prompt!r} has {len(images)} source images, and {family} takes {wanted}: give them with "
                "--source FILE, in a prompt file under 'source' or 'sources', or choose another pipeline.name"
            )
    return given


class Embedded:
    """Embeddings of prompts, each computed once and by itself, so that it does not depend on its batch.

    `encode_one(prompt, sources)` gives a Conditioning of one row; rows are kept on the host, the newest `limit` of them
    while they can be computed again.
    """

    limit: ClassVar[int | None] = EMBEDDING_CACHE

    def __init__(self, encode_one: Callable[[str, Sequence[Tensor]], Conditioning]) -> None:
        self.encode_one = encode_one
        self.rows: dict[tuple[str, ...], Conditioning] = {}
        self.freed = False

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], sources: Sources, device: torch.device) -> Conditioning:
        """Conditioning of prompts, one row each.

        Raises:
            ValueError: a prompt is new and the text encoders are gone.
        """
        keys = [(prompt, *map(_digest, images)) for prompt, images in zip(prompts, sources, strict=True)]
        for key, images in zip(keys, sources, strict=True):
            if key not in self.rows:
                if self.freed:
                    raise ValueError(
                        f"prompt {key[0]!r} was not encoded before the text encoders were freed: set "
                        "pipeline.free_text_encoders=false"
                    )
                self.rows[key] = self.encode_one(key[0], images).to("cpu")
        cond = Conditioning.cat([self.rows[key] for key in keys]).to(device)
        while not self.freed and Embedded.limit is not None and len(self.rows) > Embedded.limit:
            del self.rows[next(iter(self.rows))]  # the oldest; it can be computed again
        return cond

    def free(self, pipe: Any, parts: Sequence[str]) -> None:
        """Drops encoders from a stock pipeline; only what was encoded before can be asked for afterwards."""
        self.freed = True
        pipe.register_modules(**dict.fromkeys(parts))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def keeping_all() -> Iterator[None]:
    """Inside, embeddings have no limit: for what is encoded before the text encoders go."""
    Embedded.limit, usual = None, Embedded.limit
    try:
        yield
    finally:
        Embedded.limit = usual


def _digest(image: Tensor) -> str:
    """An image's fingerprint."""
    data = image.detach().cpu().contiguous()
    return f"{tuple(data.shape)} {hashlib.sha256(data.numpy().tobytes()).hexdigest()}"


def two_passes(scale: float) -> int:
    """Network rows of classifier-free guidance: 2, but 1 at scale 1, where the negative has no weight."""
    return 1 if scale == 1 else 2


def two_pass_guidance(
    network: Network, cond: Conditioning, negative: Conditioning | None, scale: float, *, rule: Rule = linear_cfg
) -> Velocity:
    """Classifier-free guidance by a rule; scale 1 is the positive alone, for every rule.

    Raises:
        ValueError: the scale asks for a negative prompt and there is none.
    """
    if scale == 1:
        return conditioned(network, cond)
    if negative is None:
        raise ValueError(f"guidance at scale {scale} reads a negative prompt, and none was encoded")
    return classifier_free_guidance(network, cond, negative, scale, rule=rule)


def pack(x: Tensor) -> Tensor:
    """Latents `[b, c, h, w]` as tokens of 2 x 2 pixels, row by row, `[b, h/2 * w/2, 4c]`."""
    b, channels, height, width = x.shape
    patches = x.reshape(b, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(b, (height // 2) * (width // 2), 4 * channels)


def unpack(tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """Tokens `[b, n, 4c]` as latents `[b, c, h, w]`; the inverse of `pack`."""
    channels, height, width = shape
    patches = tokens.reshape(len(tokens), height // 2, width // 2, channels, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), channels, height, width)


def decode_slices(latents: Tensor, size: int, decode: Callable[[Tensor], Tensor], *, gradient: bool) -> Tensor:
    """Images in [0, 1] of latents, `size` at a time in float32; without gradient memory does not grow with the batch.

    `decode` gives images in [-1, 1].
    """
    with torch.set_grad_enabled(gradient):
        return torch.cat([(decode(part.float()) / 2 + 0.5).clamp(0, 1) for part in latents.split(size)])


@torch.no_grad()
def encode_slices(
    images: Tensor, wanted: tuple[int, ...], size: int, encode: Callable[[Tensor], Tensor], device: torch.device
) -> Tensor:
    """Latents of images in [0, 1], `size` at a time in float32; `encode` takes images in [-1, 1].

    Raises:
        ValueError: images have another shape than `wanted`, that which is drawn.
    """
    if tuple(images.shape[1:]) != wanted:
        raise ValueError(
            f"images must have the shape [b, {', '.join(map(str, wanted))}], the size that is drawn, got "
            f"{list(images.shape)}: resize them, or set pipeline.height and pipeline.width"
        )
    return torch.cat([encode(2 * part.to(device, torch.float32) - 1) for part in images.split(size)])


def decoded(vae: Any, z: Tensor) -> Tensor:
    """What an autoencoder with a scale, and perhaps a shift, makes of latents as networks see them, in [-1, 1]."""
    images: Tensor = vae.decode(z / vae.config.scaling_factor + _shift(vae), return_dict=False)[0]
    return images


def encoded(vae: Any, x: Tensor) -> Tensor:
    """Latents of images or clips in [-1, 1]: the posterior's mode, shifted and scaled as `decoded` undoes it."""
    latents: Tensor = (vae.encode(x).latent_dist.mode() - _shift(vae)) * vae.config.scaling_factor
    return latents


def _shift(vae: Any) -> float:
    return vae.config.get("shift_factor") or 0.0


def write_lora(
    cls: Any, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, part: str = "transformer"
) -> Path:
    """Writes `pytorch_lora_weights.safetensors`; alpha travels in its metadata, without which it would halve."""
    layers, metadata = (
        {f"{part}_lora_layers": lora_ready_for_diffusers(tensors)},
        {f"{part}_lora_adapter_metadata": dict(config)},
    )
    cls.save_lora_weights(folder, **layers, **metadata)
    return folder / LORA_FILE


def trimmed(mask: Tensor) -> int:
    """Columns up to the last that any row of a mask `[b, n]` uses, at least 1: the rest is padding for all."""
    used = torch.nonzero(mask.any(0)).flatten()
    return int(used[-1]) + 1 if len(used) else 1


def first_expert(denoiser: nn.Module) -> nn.Module:
    """The network that one evaluation calls: the denoiser, or one of its experts, which are alike."""
    return next(iter(denoiser.values())) if isinstance(denoiser, nn.ModuleDict) else denoiser


def split_experts(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """LoRA tensors of a ModuleDict of networks, one mapping a network, without its name."""
    for name in names:
        yield name, {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
