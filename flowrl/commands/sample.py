"""`flowrl sample`: images of a base or tuned model for given prompts and seeds, as PNG files and a grid."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from flowrl.generation.models import Source, find_source, load_source, schedule_of
from flowrl.generation.rlg import RLG, add_experts, generate_rlg, rlg_settings
from flowrl.media.images import grid, save_png
from flowrl.media.videos import contact_sheet, save_mp4
from flowrl.progress import progress
from flowrl.prompts.loading import Prompt, read_prompts
from flowrl.prompts.source_images import check_image
from flowrl.randomness import counter_normal
from flowrl.training.heldout import generate

__all__ = ["BATCH", "load_source", "parse_seeds", "resolve_source", "sample"]

BATCH = 16
"""Images at once; videos are drawn one by one."""


def sample(options: argparse.Namespace) -> int:
    """Writes `<prompt>_<seed>.png` for every pair, and `grid.png` with a row a prompt and a column a seed.

    The start noise is a function of the seed alone, so a column shares it, and so do two models.

    Raises:
        ValueError: no prompt, a bad seed list, an unknown source, options of guidance that contradict each other.
    """
    if options.base and given_loras(options):
        raise ValueError("--base samples the model without a LoRA, so --lora has no place beside it: give one of them")
    if not options.prompt and not options.prompts:
        raise ValueError('no prompt was given: add --prompt "a photo of a red circle" or --prompts FILE')
    seeds, source = parse_seeds(options.seeds), resolve_source(options)
    prompts = wanted_prompts(options, source.negative)
    loras = given_loras(options) or ([source.lora] if source.lora is not None else [])
    draw, fps = drawing(source, rlg_settings(options, loras))
    pairs = [(prompt, seed) for prompt in prompts for seed in seeds]
    options.out.mkdir(parents=True, exist_ok=True)
    images = []
    size = 1 if fps else BATCH
    batches = range(0, len(pairs), size)
    with progress("sampling", len(batches)) as advance:
        for first in batches:
            batch = pairs[first : first + size]
            images.append(draw(batch).cpu())
            advance("")
    drawn = torch.cat(images)
    names = [f"{prompts.index(prompt):03d}_seed{seed}" for prompt, seed in pairs]
    captions = [f"{prompt.text} ({seed})" for prompt, seed in pairs]
    if drawn.ndim == 5:
        for name, clip in zip(names, drawn, strict=True):
            save_mp4(clip, options.out / f"{name}.mp4", fps)
        save_png(contact_sheet(list(drawn), captions), options.out / "grid.png")
    else:
        for name, image in zip(names, drawn, strict=True):
            save_png(image, options.out / f"{name}.png")
        scale = max(1, 128 // drawn.shape[-1])
        save_png(grid(drawn, columns=len(seeds), captions=captions, scale=scale), options.out / "grid.png")
    print(f"wrote {len(pairs)} {'videos' if drawn.ndim == 5 else 'images'} and grid.png to {options.out}")
    return 0


def wanted_prompts(options: argparse.Namespace, negative: str) -> list[Prompt]:
    """The prompts of `--prompt`, with the images of `--source`, and those of `--prompts`; each once.

    Args:
        options: of the command line.
        negative: for the prompts without a negative prompt of their own.

    Raises:
        ValueError: an image or a row of the file is bad.
    """
    images = tuple(str(path.resolve()) for path in getattr(options, "source_image", None) or [])
    for image in images:
        check_image(image)
    rows = [Prompt(text=text, metadata={}, negative=negative, sources=images) for text in options.prompt]
    rows += read_prompts(options.prompts, negative) if options.prompts else []
    return list({row.key: row for row in rows}.values())


def drawing(source: Source, settings: RLG | None) -> tuple[Callable[[Sequence[tuple[Prompt, int]]], Tensor], float]:
    """Loads the model; returns what makes images of (prompt, seed) pairs, by its LoRA or by guidance between models,
    and the frames a second of videos (0 of images)."""
    if settings is not None:
        settings.check(source.num_steps)
    pipeline = load_source(source if settings is None else replace(source, lora=None))
    schedule = schedule_of(source, pipeline)
    names = [] if settings is None else add_experts(pipeline, settings.loras)
    if settings is not None:
        print(settings.describe(schedule, source.guidance_scale))

    def draw(batch: Sequence[tuple[Prompt, int]]) -> Tensor:
        x = torch.stack([counter_normal(pipeline.latent_shape, seed, "sample") for _, seed in batch])
        rows = [prompt for prompt, _ in batch]
        if settings is None:
            return generate(pipeline, rows, x, schedule, guidance_scale=source.guidance_scale)
        return generate_rlg(pipeline, names, rows, x, schedule, settings, guidance_scale=source.guidance_scale)

    return draw, pipeline.fps or 0.0


def given_loras(options: argparse.Namespace) -> list[Path]:
    """The LoRA folders of `--lora`, which may be given several times."""
    return [options.lora] if isinstance(options.lora, Path) else list(options.lora or [])


def parse_seeds(text: str) -> list[int]:
    """Seeds of "0,3,7" or "0-3" or a mix.

    Raises:
        ValueError: anything else.
    """
    seeds: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or (dash and int(high) < int(low)):
            raise ValueError(f"--seeds {text!r}: give numbers such as 0,3,7 or a range such as 0-3")
        seeds += range(int(low), int(high if dash else low) + 1)
    return list(dict.fromkeys(seeds))


def resolve_source(options: argparse.Namespace) -> Source:
    """Reads a run's own settings, or takes a model with defaults; options on the command line win."""
    lora = next(iter(given_loras(options)), None)
    return find_source(
        options.source, base=options.base, lora=lora, num_steps=options.num_steps,
        guidance_scale=options.guidance_scale, max_sequence_length=options.max_sequence_length,
    )  # fmt: skip
