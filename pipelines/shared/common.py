"""What families share, as functions: sizes, guidance, tokens, autoencoders, sound, saving a LoRA."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.pipelines.arithmetic.wide_products import WideProducts, has_products
from flowrl.pipelines.places.lora_places import LORA_FILE
from flowrl.pipelines.weights.lora import lora_ready_for_diffusers
from flowrl.samplers.guidance import Network, TrainNegative, Velocity, classifier_free_guidance, conditioned
from flowrl.samplers.guidance_rules import Rule, embedded_guidance, linear_cfg
from flowrl.samplers.parametrization import Sigma, column
from flowrl.trajectory import Conditioning

_SAME_SHAPE = 0.01
"""Relative difference of ratios of height to width that rounding of a smaller mask's sides explains."""


def check_size(model: str, size: tuple[int, int], multiple: int, largest: int | None = None) -> None:
    """Refuses a height or width that the model cannot draw."""
    for name, pixels in zip(("height", "width"), size, strict=True):
        if pixels % multiple or pixels <= 0 or (largest is not None and pixels > largest):
            limit = "" if largest is None else f" and at most {largest}"
            raise ValueError(f"pipeline.{name} ({pixels}) must be a multiple of {multiple}{limit} for {model}")


def check_frames(model: str, num_frames: int, factor: int, multiple: int = 1) -> int:
    """Latent frames of a clip: the first frame and then `factor` to one, `multiple` of them to a patch. Raises
    ValueError: no whole number of latent frames or patches; names the nearest numbers of frames."""
    latent, rest = divmod(num_frames - 1, factor)
    if num_frames >= 1 and rest == 0 and (latent + 1) % multiple == 0:
        return latent + 1
    step, first = factor * multiple, factor * (multiple - 1) + 1
    below = max(first, first + (num_frames - first) // step * step)
    raise ValueError(
        f"pipeline.num_frames ({num_frames}) must be {first} plus a multiple of {step} for {model}: the nearest are "
        f"{below} and {below + step}"
    )


def covering(image: Tensor, height: int, width: int) -> Tensor:
    """An image `[3, h, w]` at a size: scaled (antialiased) until it covers it, cut off evenly where it sticks out.
    Nothing is stretched, and an image of that size already stays what it is: prompts' images are read so."""
    h, w = image.shape[1:]
    if (h, w) == (height, width):
        return image
    ratio = max(height / h, width / w)
    size = (max(height, round(h * ratio)), max(width, round(w * ratio)))
    scaled = nn.functional.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0].clamp(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return scaled[:, top : top + height, left : left + width]


def check_mask(source: Tensor, mask: Tensor, what: str) -> None:
    """Refuses a mask `[..., h, w]` of another shape than its image or clip: cut, it would miss what it masks."""
    (h, w), (height, width) = mask.shape[-2:], source.shape[-2:]
    if abs(h * width / (w * height) - 1) > _SAME_SHAPE:
        raise ValueError(
            f"a mask of {h} x {w} pixels (height x width) does not fit {what} of {height} x {width}: give it the same "
            "ratio of height to width"
        )


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The network's arithmetic in a low dtype, while LoRA weights stay float32. Without a cache of casts: a call reads
    each LoRA weight once, and inside a caller's own autocast region the cache would keep the weights of the slot that
    ran before. On a CPU without instructions for the dtype, products are taken in float32 and rounded."""
    if dtype == torch.float32:
        return nullcontext()
    region = torch.autocast(device.type, dtype, cache_enabled=False)
    return region if device.type != "cpu" or has_products(dtype) else _with_wide_products(region)


@contextmanager
def _with_wide_products(region: AbstractContextManager[Any]) -> Iterator[None]:
    with region, WideProducts():
        yield


@dataclass(frozen=True, slots=True)
class Guidance:
    """The arguments of a family's guidance, as `Pipeline.guided` takes them."""

    network: Network
    cond: Conditioning
    negative: Conditioning | None
    scale: float
    train_negative: TrainNegative = True


def two_pass_guidance(asked: Guidance, *, rule: Rule = linear_cfg, apart: bool = False) -> Velocity:
    """Classifier-free guidance by a rule, as `flowrl.samplers.guidance.classifier_free_guidance`; scale 1 is the
    positive alone, for every rule. Raises ValueError: the scale asks for a negative prompt and there is none."""
    if asked.scale == 1:
        return conditioned(asked.network, asked.cond)
    if asked.negative is None:
        raise ValueError(f"guidance at scale {asked.scale} reads a negative prompt, and none was encoded")
    return halves(asked, rule=rule, apart=apart)


def halves(asked: Guidance, *, rule: Rule, apart: bool = False) -> Velocity:
    """Classifier-free guidance at any scale, of a positive and a negative half."""
    assert asked.negative is not None
    return classifier_free_guidance(
        asked.network, asked.cond, asked.negative, asked.scale, rule=rule, train_negative=asked.train_negative,
        apart=apart,
    )  # fmt: skip


def distilled_guidance(asked: Guidance, *, embeds: bool, model: str) -> Velocity:
    """Guidance of a distilled model: the scale is an input of its network, or has to be 1. Raises ValueError: the
    network has no input for the scale, and would ignore it."""
    if embeds:
        return conditioned(asked.network, embedded_guidance(asked.cond, asked.scale))
    if asked.scale != 1:
        raise ValueError(
            f"{model} is distilled and has no guidance, got scale {asked.scale:g}: set sampler.guidance_scale=1 and "
            "eval.guidance_scale=1"
        )
    return conditioned(asked.network, asked.cond)


def guide_by_input(p: Any, asked: Guidance) -> Velocity:
    """The scale as an input of the network, or nothing if it has no such input; reads no negative prompt."""
    return distilled_guidance(asked, embeds=bool(p.card.network.guidance_embeds), model=p.model)


def predict_velocity(p: Any, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
    """Velocity in float32 of a denoiser that predicts it, run in the pipeline's dtype."""
    return p.call(x, timestep, cond).float()


def predict_by_kind(p: Any, x: Tensor, timestep: Tensor, cond: Conditioning, kinds: Sequence[Any]) -> Tensor:
    """As `predict_velocity`, in a call for each kind of rows; `kinds` has the kind of each row."""
    if len(set(kinds)) == 1:
        return predict_velocity(p, x, timestep, cond)
    groups = [[row for row, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds)]
    places = [torch.tensor(rows, device=x.device) for rows in groups]
    times = timestep.expand(len(x))
    parts = [predict_velocity(p, x[at], times[at], cond[rows]) for at, rows in zip(places, groups, strict=True)]
    return torch.cat(parts)[torch.cat(places).argsort()]


def masked_arguments(x: Tensor, timestep: Tensor, cond: Conditioning) -> dict[str, Any]:
    """Arguments of a denoiser that reads a prompt's embeddings and their mask."""
    return {
        "hidden_states": x,
        "timestep": timestep,
        "encoder_hidden_states": cond.tensors["embeds"],
        "encoder_attention_mask": cond.tensors["mask"],
    }


def shown(x: Tensor, cond: Conditioning) -> Tensor:
    """Latents `[b, C, F, h, w]` or tokens `[b, n, C]` as a network sees them: with a first frame in its place, of a
    conditioning that has one."""
    if (first := cond.tensors.get("first_frame")) is None:
        return x
    dim = 2 if x.ndim == 5 else 1
    return torch.cat([first.to(x), x.narrow(dim, first.shape[dim], x.shape[dim] - first.shape[dim])], dim)


def held(velocity: Tensor, x: Tensor, sigma: Sigma, cond: Conditioning) -> Tensor:
    """The velocity that leads straight to a first frame if a conditioning has one; elsewhere the network's."""
    if (first := cond.tensors.get("first_frame")) is None:
        return velocity
    x, dim = x.to(velocity), 2 if x.ndim == 5 else 1
    count = first.shape[dim]
    led = (x.narrow(dim, 0, count) - first) / column(sigma, x)
    return torch.cat([led, velocity.narrow(dim, count, velocity.shape[dim] - count)], dim)


def token_times(timestep: Tensor, cond: Conditioning, grid: Sequence[int]) -> Tensor:
    """Times `[b, n]` of tokens of a grid (frames, rows, columns), 0 in a first frame that is held; one for all of a
    row, `[b]`, where there is none."""
    if "first_frame" not in cond.tensors:
        return timestep
    frames, rows, columns = grid
    times = timestep[:, None].repeat(1, frames * rows * columns)
    times[:, : rows * columns] = 0
    return times


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


def meta(*shape: int) -> Tensor:
    """A tensor without numbers in it."""
    return torch.empty(shape, device="meta")


@torch.no_grad()
def encode_slices(
    images: Tensor, wanted: tuple[int, ...], size: int, encode: Callable[[Tensor], Tensor], device: torch.device
) -> Tensor:
    """Latents of images in [0, 1], `size` at a time in float32; `encode` takes images in [-1, 1]. Raises ValueError:
    images have another shape than `wanted`, that which is drawn."""
    if tuple(images.shape[1:]) != wanted:
        raise ValueError(
            f"images must have the shape [b, {', '.join(map(str, wanted))}], the size that is drawn, got "
            f"{list(images.shape)}: resize them, or set pipeline.height and pipeline.width"
        )
    return torch.cat([encode(2 * part.to(device, torch.float32) - 1) for part in images.split(size)])


def decode(vae: Any, z: Tensor) -> Tensor:
    """What an autoencoder with a scale, and perhaps a shift, makes of latents as networks see them, in [-1, 1]."""
    images: Tensor = vae.decode(z / vae.config.scaling_factor + _shift(vae), return_dict=False)[0]
    return images


def encode(vae: Any, x: Tensor) -> Tensor:
    """Latents of images or clips in [-1, 1]: the posterior's mode, shifted and scaled as `decode` undoes it."""
    latents: Tensor = (vae.encode(x).latent_dist.mode() - _shift(vae)) * vae.config.scaling_factor
    return latents


def latent_statistics(p: Any) -> dict[str, Tensor]:
    """Mean and standard deviation `[C, 1, 1]` of each latent channel, `[C, 1, 1, 1]` of videos, as the VAE says."""
    config, ones = p.pipe.vae.config, (1,) * (3 if p.family.videos else 2)
    stated = {"mean": config.latents_mean, "std": config.latents_std}
    return {name: torch.tensor(values, device=p.device).view(-1, *ones) for name, values in stated.items()}


def normalise(p: Any, latents: Tensor) -> Tensor:
    """An autoencoder's latents as networks see them: by the mean and standard deviation among the constants."""
    return (latents - p.constants["mean"]) / p.constants["std"]


def restore(p: Any, z: Tensor) -> Tensor:
    """The inverse of `normalise`."""
    return z * p.constants["std"] + p.constants["mean"]


def _shift(vae: Any) -> float:
    return vae.config.get("shift_factor") or 0.0


def pixels_per_latent(vae: Mapping[str, Any], key: str = "block_out_channels", usual: int = 4) -> int:
    """Pixels of a latent's side: each level of an autoencoder but the first halves an image."""
    levels = vae.get(key)
    return int(2 ** ((usual if levels is None else len(levels)) - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sound:
    """How a family's videos sound; every function takes the pipeline first. A state holds the latents of both kinds in
    one tensor, so that kernels, ratios, counters of randomness and all that works by number need not know of it."""

    packed: Callable[[Any], tuple[int, ...]]
    """Shape of one latent with those of the sound in it, of the size that is drawn."""
    rate: Callable[[Any], int]
    """Samples per second."""
    decode: Callable[[Any, Tensor], Tensor]
    """Sound `[b, channels, samples]` in [-1, 1] of finished latents in float32."""


@torch.no_grad()
def decode_sound(p: Any, latents: Tensor) -> Tensor:
    """Sound float32 `[b, channels, samples]` of finished latents, as many clips at once as are decoded of videos.
    Raises ValueError: the family is silent."""
    if p.family.sound is None:
        raise ValueError(f"videos of {p.model} are silent: take a family with sound, such as ltx2")
    with p.awake("vae"):
        found = [p.family.sound.decode(p, part.float()) for part in latents.split(p.options.vae_slice)]
    return torch.cat(found).float().clamp(-1, 1)


@contextmanager
def standing_in(owner: Any, **members: Any) -> Iterator[None]:
    """Attributes of this object alone, removed at the end; a stock pipeline's configuration does not change."""
    own = vars(owner)
    before = {name: own[name] for name in members if name in own}
    own.update(members)
    try:
        yield
    finally:
        for name in members:
            own.pop(name)
        own.update(before)


def takes_lora(cls: Any, part: str) -> bool:
    """Whether a stock class has a LoRA for one of its parts."""
    write = getattr(cls, "save_lora_weights", None)
    return write is not None and f"{part}_lora_layers" in inspect.signature(write).parameters


def save_lora(
    cls: Any, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], names: Sequence[str], part: str
) -> Path:
    """Writes the LoRA of a denoiser as `pytorch_lora_weights.safetensors`, those of further experts (`names`) each in a
    folder of its name; alpha travels in its metadata, without which it would halve. A stock class that loads no LoRA
    has a denoiser that does: `load_lora_adapter(folder, weight_name=LORA_FILE)`."""
    if not takes_lora(cls, part):
        import diffusers

        # they write what any class with such a part would
        cls = diffusers.StableDiffusionPipeline if part == "unet" else diffusers.StableDiffusion3Pipeline
    for name in names:
        start = f"{name}." if len(names) > 1 else ""
        own = {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}
        layers = {f"{part}_lora_layers": lora_ready_for_diffusers(own)}
        metadata = {f"{part}_lora_adapter_metadata": dict(config)}
        cls.save_lora_weights(folder if name == part else folder / name, **layers, **metadata)
    return folder / LORA_FILE
