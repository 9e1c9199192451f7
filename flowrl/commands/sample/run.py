"""`flowrl sample`: images of a base or tuned model for given prompts and seeds, as PNG files and a grid."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from flowrl.commands.sampling_arguments import sampling_options
from flowrl.config.train import resolve_path
from flowrl.generation.drawing import draw_made, find_device
from flowrl.generation.models import Source, check_lora, check_source, find_source, load_source, schedule_of
from flowrl.generation.prompt_checks import refuse_sources
from flowrl.generation.rlg import RLG, add_experts, rlg_settings, rlg_velocity
from flowrl.media.images import grid, save_png
from flowrl.media.videos import contact_sheet, save_mp4
from flowrl.pipelines import Pipeline, stock_of
from flowrl.prompts.identity import distinct
from flowrl.prompts.loading import Prompt, load_prompts
from flowrl.prompts.source_images import check_image
from flowrl.rendering.markup import plural
from flowrl.runtime.files import refuse_foreign
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import counter_normal
from flowrl.runtime.scrubbing import say as print
from flowrl.samplers import Velocity
from flowrl.training.prompting import encode_prompts, guided

BATCH = 16
"""Images at once where `--batch-size` does not say; videos are drawn one by one."""
MOST_SEEDS = 10_000
"""Seeds of one command; their images are held until all are drawn."""

Pair = tuple[Prompt, int]
"""A prompt, and the seed of its start noise."""
Track = tuple[Tensor, int] | None
"""The sound of a clip, and its samples per second."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """Images [B, 3, H, W] or videos [B, F, 3, H, W] in [0, 1] of pairs; `fps` is 0 of images, `heard` whether any has
    sound."""

    pairs: tuple[Pair, ...]
    images: Tensor
    fps: float
    heard: bool
    sheet: Tensor | Image.Image


def run(parsed: argparse.Namespace) -> int:
    """Writes `<prompt>_seed<seed>.png` for every pair, and `grid.png` with one row per prompt and one column per seed.

    Raises:
        ValueError: as `drawn`.
    """
    made = drawn(parsed)
    what = plural(len(made.pairs), "video" if made.fps else "image") + (" with sound" if made.heard else "")
    print(f"wrote {what} and grid.png to {parsed.out}")
    return 0


def drawn(parsed: argparse.Namespace) -> Drawn:
    """Draws every pair of prompt and seed, and writes files where `parsed.out` names a folder; None names none.

    The start noise is a function of the seed alone, so a column shares it, and so do two models.

    Raises:
        ValueError: no prompt, a bad seed list, an unknown model, options of guidance that contradict each other.
    """
    if parsed.before_training and parsed.lora:
        raise ValueError("--before-training samples the model without a LoRA, and --lora adds one: give one of them")
    if not parsed.prompt and not parsed.prompts:
        raise ValueError('no prompt was given: add --prompt "a photo of a red circle" or --prompts FILE')
    seeds, device = parse_seeds(parsed.seeds), find_device(parsed.device)
    source = find_source(
        parsed.model, base=parsed.before_training, lora=next(iter(parsed.lora), None), **sampling_options(parsed)
    )
    prompts = wanted_prompts(parsed, source.negative)
    if parsed.rlg is not None and source.trained_from is not None:
        raise ValueError(
            f"--rlg holds tuned models as LoRAs beside one base, and {parsed.model} trained all weights: give it runs "
            "that trained a LoRA (policy.train=lora), or leave --rlg out"
        )
    settings = rlg_settings(parsed, parsed.lora or ([source.lora] if source.lora is not None else []))
    if settings is not None:
        settings.check(source.num_steps)
    check_source(source)
    for place in settings.loras if settings is not None else ():
        check_lora(place, source)
    refuse_sources(prompts, source)
    if parsed.out is not None:
        refuse_foreign(parsed.out / "grid.png", own=any(parsed.out.glob("[0-9]*_seed[0-9]*.*")))
    drawing, fps = load_drawing(source, settings, str(device))
    pairs = [(prompt, seed) for prompt in prompts for seed in seeds]
    size = parsed.batch_size or (1 if fps else BATCH)
    if parsed.out is not None:
        parsed.out.mkdir(parents=True, exist_ok=True)
    images, tracks = [], list[Track]()
    with progress("sampling", -(-len(pairs) // size)) as advance:
        for first in range(0, len(pairs), size):
            batch, heard = drawing(pairs[first : first + size])
            images.append(batch)
            tracks += heard
            advance("")
    whole = torch.cat(images)
    captions = [f"{prompt.text} ({seed})" for prompt, seed in pairs]
    scale = max(1, 128 // whole.shape[-1])
    sheet = (
        contact_sheet(list(whole), captions) if fps
        else grid(whole, columns=len(seeds), captions=captions, scale=scale)
    )  # fmt: skip
    made = Drawn(pairs=tuple(pairs), images=whole, fps=fps, heard=any(tracks), sheet=sheet)
    if parsed.out is not None:
        write(parsed.out, made, [f"{prompts.index(prompt):03d}_seed{seed}" for prompt, seed in pairs], tracks)
    return made


def write(folder: Path, made: Drawn, names: Sequence[str], tracks: Sequence[Track]) -> None:
    """Writes a file per pair, PNG or MP4 by its name and with its sound, and last `grid.png`."""
    for name, image, track in zip(names, made.images, tracks, strict=True):
        if made.fps:
            save_mp4(image, folder / f"{name}.mp4", made.fps, track)
        else:
            save_png(image, folder / f"{name}.png")
    save_png(made.sheet, folder / "grid.png")


def wanted_prompts(parsed: argparse.Namespace, negative: str) -> list[Prompt]:
    """The prompts of `--prompt`, with the images of `--source`, and those of `--prompts`; each once.

    Args:
        parsed: the command line.
        negative: for the prompts without a negative prompt of their own.

    Raises:
        ValueError: an image or a row of the file is bad.
    """
    images = tuple(str(path.resolve()) for path in parsed.source)
    for image in images:
        check_image(image)
    rows = [Prompt(text=text, metadata={}, negative=negative, sources=images) for text in parsed.prompt]
    rows += load_prompts(parsed.prompts, negative, resolve=resolve_path) if parsed.prompts else []
    return distinct(rows)


def load_drawing(
    source: Source, settings: RLG | None, device: str
) -> tuple[Callable[[Sequence[Pair]], tuple[Tensor, list[Track]]], float]:
    """Loads the model; returns what makes images of pairs and the sounds of clips, on the host, by its LoRA or by
    guidance between models, and the frames per second of videos (0 of images)."""
    pipeline: Pipeline = load_source(source if settings is None else replace(source, lora=None), device)
    schedule, scale = schedule_of(source, pipeline), source.guidance_scale
    names = [] if settings is None else add_experts(pipeline, settings.loras, stock_of(source.family, source.model))
    if settings is not None:
        print(settings.describe(schedule, scale))

    def make(prompts: Sequence[Prompt]) -> Velocity:
        if settings is None:
            return guided(pipeline, pipeline.network, encode_prompts(pipeline, prompts), scale)
        return rlg_velocity(
            pipeline, names, prompts, settings.schedules(schedule), guidance_scale=scale,
            base_guidance_scale=settings.base_guidance_scale,
        )  # fmt: skip

    def drawing(pairs: Sequence[Pair]) -> tuple[Tensor, list[Track]]:
        x = torch.stack([counter_normal(pipeline.latent_shape, seed, "sample") for _, seed in pairs])
        made = draw_made(pipeline, make, [prompt for prompt, _ in pairs], x, schedule)
        return made.images.cpu(), made.tracks(pipeline.sound_rate)

    return drawing, pipeline.fps or 0.0


def parse_seeds(text: str) -> list[int]:
    """Seeds of "0,3,7" or "0-3" or a mix.

    Raises:
        ValueError: anything else.
    """
    seeds: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or max(len(low), len(high)) > 18:
            raise ValueError(f"--seeds {text!r}: give numbers such as 0,3,7 or a range such as 0-3")
        first, last = int(low), int(high if dash else low)
        if not 0 <= last - first < MOST_SEEDS - len(seeds):
            raise ValueError(f"--seeds {text!r}: ranges rise, such as 0-3, and at most {MOST_SEEDS:,} seeds are drawn")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))
