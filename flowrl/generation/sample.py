"""Images or videos of a base or tuned model for prompts and seeds, as PNG or MP4 files and a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.config.bounds import IMAGES, check_counts
from flowrl.config.train import resolve_path
from flowrl.generation.drawing import find_device
from flowrl.generation.models import (
    EMBEDDED,
    Model,
    Source,
    Words,
    check_lora,
    check_source,
    find_source,
    load_source,
    place_of,
    schedule_of,
    several,
)
from flowrl.generation.prompt_checks import refuse_sources
from flowrl.generation.rlg import RLG, Numbers, add_experts, rlg_settings, rlg_velocity
from flowrl.generation.sampling_options import SamplingOptions, check_guidance
from flowrl.media.images import grid, save_png, to_pixels
from flowrl.media.videos import contact_sheet, save_mp4
from flowrl.pipelines import stock_of
from flowrl.prompts.identity import distinct
from flowrl.prompts.loading import Prompt, load_prompts
from flowrl.prompts.source_images import check_image
from flowrl.rendering.notebook import heading, images_row
from flowrl.runtime.files import refuse_foreign
from flowrl.runtime.progress import progress
from flowrl.runtime.public import public
from flowrl.runtime.randomness import counter_normal
from flowrl.runtime.scrubbing import say as print
from flowrl.samplers import Velocity, ode_rollout
from flowrl.training.heldout import decode
from flowrl.training.prompting import caching, device_of, encode_prompts, guided

BATCH = 16
"""Default number of images at once; videos are drawn one by one."""
MOST_SEEDS = 10_000
"""Largest number of seeds of a call, whose images stay in memory until all are drawn."""

Pair = tuple[Prompt, int]
"""A prompt, and the seed of its start noise."""
Track = tuple[Tensor, int] | None
"""The sound of a clip, and its samples per second."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """The drawn images, prompt by prompt and seed by seed.

    Attributes:
        prompts: the prompt of each image.
        seeds: the seed of each image's start noise.
        images: PIL images; empty if the model draws videos.
        videos: the frames of each video as PIL images; empty if the model draws images.
        fps: frames per second of the videos; 0 for images.
        sound: whether any video has sound.
        grid: one image of them all, with captions.
        folder: where the files are; None if none were written.
        drawn_with: steps, guidance, size and seeds, in words.
    """

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    images: tuple[Image.Image, ...] = field(repr=False)
    videos: tuple[tuple[Image.Image, ...], ...] = field(repr=False)
    fps: float
    sound: bool
    grid: Image.Image = field(repr=False)
    folder: Path | None
    drawn_with: str = ""

    def _repr_html_(self) -> str:
        shown = self.images or tuple(frames[0] for frames in self.videos)
        said = [f"{words} ({seed})" for words, seed in zip(self.prompts, self.seeds, strict=True)]
        return heading(f"{len(shown)} {'videos, their first frames' if self.videos else 'images'}") + images_row(
            shown, said
        )


@public
def sample(
    model: Model = EMBEDDED,
    prompts: Words = (),
    *,
    prompt_file: str | Path | None = None,
    seeds: int | str | Iterable[int] = 0,
    out: str | Path | None = None,
    source: Words = (),
    lora: Words = (),
    before_training: bool = False,
    rlg: Numbers | None = None,
    rlg_from: int | None = None,
    rlg_interval: Numbers | None = None,
    base_guidance: float | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    height: int | None = None,
    width: int | None = None,
    dtype: str | None = None,
    max_sequence_length: int | None = None,
    first_block_cache: float | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    show: bool = True,
) -> Samples:
    """Draws every prompt with every seed.

    Args:
        model: run folder or what `train` returned, LoRA or model folder, hub id or `asset:NAME`.
        prompts: one text or several.
        prompt_file: .txt, .jsonl or .csv, or `asset:NAME`; in addition to or instead of `prompts`.
        seeds: the seeds of the start noise: a number, several, or a text such as "0-3,7". A seed gives all models and
            prompts the same noise.
        out: folder of `<prompt>_seed<seed>.png` or `.mp4` and `grid.png`; None writes none.
        source: images that `prompts` edit or animate.
        lora: folders of LoRAs to add to the model; several with `rlg`.
        before_training: draw with the run's model before training.
        rlg: guidance from the base to the tuned model, a scale per LoRA: 0 is the base, 1 the tuned model.
        rlg_from: number of first steps without this guidance.
        rlg_interval: two noise levels, outside which there is no such guidance.
        base_guidance: guidance scale of the base model under `rlg`; None takes that of the tuned model.
        steps, guidance, height, width, dtype, max_sequence_length, first_block_cache: how to sample the model
            (`SamplingOptions`).
        batch_size: images drawn at once.
        device: "cpu", "cuda" or "cuda:N".
        show: show notes and progress.

    Raises:
        ValueError: no prompt, a bad seed list, an unknown model, options of guidance that contradict each other.

    >>> drawn = flowrl.sample("asset:tiny-sd3", "a photo of a red circle", seeds=[0, 1], steps=2, show=False)
    >>> [image.size for image in drawn.images], drawn.seeds, drawn.grid.size > (64, 64)
    ([(64, 64), (64, 64)], (0, 1), True)
    """
    sampling = SamplingOptions(
        steps=steps,
        guidance=guidance,
        height=height,
        width=width,
        dtype=dtype,
        max_sequence_length=max_sequence_length,
        first_block_cache=first_block_cache,
    )
    check_counts(IMAGES, batch_size=batch_size)
    check_guidance(base_guidance=base_guidance)
    loras, texts = list(map(Path, several(lora))), list(map(str, several(prompts)))
    folder = None if out is None else Path(out)
    if before_training and loras:
        raise ValueError("`before_training` samples the model without a LoRA, and `lora` adds one: give one of them")
    if not texts and not prompt_file:
        raise ValueError('no prompt was given: add `prompts` "a photo of a red circle" or `prompt_file` FILE')
    numbers, where = parse_seeds(seeds), str(find_device(device))
    drawn = find_source(place_of(model), base=before_training, lora=next(iter(loras), None), sampling=sampling)
    asked = wanted_prompts(texts, several(source), prompt_file, drawn.negative)
    if rlg is not None and drawn.trained_from is not None:
        raise ValueError(
            f"`rlg` holds tuned models as LoRAs beside one base, and {place_of(model)} trained all weights: give it "
            "runs that trained a LoRA (policy.train=lora), or leave `rlg` out"
        )
    loras = loras or [place for place in (drawn.lora,) if place is not None]
    settings = rlg_settings(
        loras,
        rlg,
        first_steps=rlg_from,
        interval=rlg_interval,
        base_guidance=base_guidance,
        before_training=before_training,
    )
    _check_models(drawn, settings)
    refuse_sources(asked, drawn)
    if folder is not None:
        refuse_foreign(folder / "grid.png", own=any(folder.glob("[0-9]*_seed[0-9]*.*")), flag="`out`")
    drawing, fps = load_drawing(drawn, settings, where)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    pairs = list(product(asked, numbers))
    whole, tracks = draw_pairs(drawing, pairs, batch_size or (1 if fps else BATCH))
    height, width = whole.shape[-2:]
    said = f"{drawn.told}, {width} x {height} pixels, "
    said += f"seed {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} seeds from {numbers[0]} to {numbers[-1]}"
    return replace(_collect(asked, pairs, whole, tracks, fps, folder), drawn_with=said)


def _check_models(drawn: Source, settings: RLG | None) -> None:
    """Refuses guidance that does not fit the steps, a model that cannot be drawn, and a LoRA that does not fit it."""
    if settings is not None:
        settings.check(drawn.num_steps)
    check_source(drawn)
    for place in settings.loras if settings is not None else ():
        check_lora(place, drawn)


def _collect(
    asked: Sequence[Prompt],
    pairs: Sequence[Pair],
    whole: Tensor,
    tracks: Sequence[Track],
    fps: float,
    folder: Path | None,
) -> Samples:
    """The images or videos of pairs with their grid, a row per prompt; written into a folder if one is given."""
    captions = [f"{prompt.text} ({seed})" for prompt, seed in pairs]
    sheet = (
        as_image(contact_sheet(list(whole), captions))
        if fps
        else grid(whole, columns=len(pairs) // len(asked), captions=captions, scale=max(1, 128 // whole.shape[-1]))
    )
    if folder is not None:
        for (prompt, seed), image, track in zip(pairs, whole, tracks, strict=True):
            name = f"{asked.index(prompt):03d}_seed{seed}"
            if fps:
                save_mp4(image, folder / f"{name}.mp4", fps, track)
            else:
                save_png(image, folder / f"{name}.png")
        save_png(sheet, folder / "grid.png")
    return Samples(
        prompts=tuple(prompt.text for prompt, _ in pairs),
        seeds=tuple(seed for _, seed in pairs),
        images=() if fps else tuple(map(as_image, whole)),
        videos=tuple(tuple(map(as_image, video)) for video in whole) if fps else (),
        fps=fps,
        sound=any(track is not None for track in tracks),
        grid=sheet,
        folder=folder,
    )


def parse_seeds(given: int | str | Iterable[int]) -> list[int]:
    """Parses seeds: a number, several, "0,3,7", "0-3" or a mix; each once. Raises ValueError: anything else."""
    text = given if isinstance(given, str) else ",".join(map(str, several(given)))
    seeds: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or max(len(low), len(high)) > 18:
            raise ValueError(f"`seeds` {text!r}: give numbers such as 0,3,7 or a range such as 0-3")
        first, last = int(low), int(high if dash else low)
        if not 0 <= last - first < MOST_SEEDS - len(seeds):
            raise ValueError(f"`seeds` {text!r}: ranges rise, such as 0-3, and at most {MOST_SEEDS:,} seeds are drawn")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


def wanted_prompts(
    texts: Sequence[str], source: Sequence[str | Path], file: str | Path | None, negative: str
) -> list[Prompt]:
    """The texts, with the source images, and the prompts of a file; each once.

    `negative` is the negative prompt for prompts without their own.

    Raises ValueError: an image or a row of the file is bad.
    """
    images = tuple(str(Path(path).resolve()) for path in source)
    for image in images:
        check_image(image)
    rows = [Prompt(text=text, metadata={}, negative=negative, sources=images) for text in texts]
    rows += load_prompts(str(file), negative, resolve=resolve_path) if file else []
    return distinct(rows)


def load_drawing(
    source: Source, settings: RLG | None, device: str
) -> tuple[Callable[[Sequence[Pair]], tuple[Tensor, list[Track]]], float]:
    """Loads the model; returns a function that draws images of pairs and the sounds of clips, on the host, with its
    LoRA or with guidance between models, and the frames per second of videos (0 for images)."""
    if settings is not None and source.first_block_cache:
        raise ValueError("`rlg` mixes networks, and `first_block_cache` would mix up their blocks: give one of them")
    pipeline = load_source(source if settings is None else replace(source, lora=None), device)
    schedule, scale = schedule_of(source, pipeline), source.guidance_scale
    names = [] if settings is None else add_experts(pipeline, settings.loras, stock_of(source.family, source.model))
    if settings is not None:
        print(settings.describe(schedule, scale))

    def make(prompts: Sequence[Prompt]) -> Velocity:
        if settings is None:
            return guided(pipeline, pipeline.network, encode_prompts(pipeline, prompts), scale)
        return rlg_velocity(
            pipeline,
            names,
            prompts,
            settings.schedules(schedule),
            guidance_scale=scale,
            base_guidance_scale=settings.base_guidance_scale,
        )

    @torch.no_grad()
    def drawing(pairs: Sequence[Pair]) -> tuple[Tensor, list[Track]]:
        x = torch.stack([counter_normal(pipeline.latent_shape, seed, "sample") for _, seed in pairs])
        velocity = make([prompt for prompt, _ in pairs])
        with caching(pipeline, source.first_block_cache) as cached:
            made = decode(pipeline, ode_rollout(cached(velocity), x.to(device_of(pipeline)), schedule))
        return made.images.cpu(), made.tracks(pipeline.sound_rate)

    return drawing, pipeline.fps or 0.0


def draw_pairs(
    drawing: Callable[[Sequence[Pair]], tuple[Tensor, list[Track]]], pairs: Sequence[Pair], size: int
) -> tuple[Tensor, list[Track]]:
    """Images [B, 3, H, W] or videos [B, F, 3, H, W] in [0, 1] of pairs, `size` at once, and the sounds."""
    images, tracks = [], list[Track]()
    with progress("sampling", -(-len(pairs) // size)) as advance:
        for first in range(0, len(pairs), size):
            batch, heard = drawing(pairs[first : first + size])
            images.append(batch)
            tracks += heard
            advance("")
    return torch.cat(images), tracks


def as_image(pixels: Any) -> Image.Image:
    """Converts an image [3, H, W] in [0, 1] to PIL."""
    return Image.fromarray(np.ascontiguousarray(to_pixels(pixels)))
