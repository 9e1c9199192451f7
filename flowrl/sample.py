"""`flowrl sample`: images of a base or tuned model for given prompts and seeds, as PNG files and a grid."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from flowrl.evaluate import generate
from flowrl.evaluation.models import Source, find_source, load_source
from flowrl.images import grid, save_png
from flowrl.progress import progress
from flowrl.prompts import read_prompts
from flowrl.randomness import counter_normal
from flowrl.rlg import RLG, add_experts, generate_rlg, rlg_settings

__all__ = ["BATCH", "load_source", "parse_seeds", "resolve_source", "sample"]

BATCH = 16


def sample(options: argparse.Namespace) -> int:
    """Writes `<prompt>_<seed>.png` for every pair, and `grid.png` with a row a prompt and a column a seed.

    The start noise is a function of the seed alone, so a column shares it, and so do two models.

    Raises:
        ValueError: no prompt, a bad seed list, an unknown source, options of guidance that contradict each other.
    """
    if options.base and given_loras(options):
        raise ValueError("--base samples the model without a LoRA, so --lora has no place beside it: give one of them")
    listed = [row.text for row in read_prompts(options.prompts)] if options.prompts else []
    prompts = list(dict.fromkeys([*options.prompt, *listed]))
    if not prompts:
        raise ValueError('no prompt was given: add --prompt "a photo of a red circle" or --prompts FILE')
    seeds = parse_seeds(options.seeds)
    source = resolve_source(options)
    loras = given_loras(options) or ([source.lora] if source.lora is not None else [])
    draw = drawing(source, rlg_settings(options, loras))
    pairs = [(prompt, seed) for prompt in prompts for seed in seeds]
    options.out.mkdir(parents=True, exist_ok=True)
    images = []
    batches = range(0, len(pairs), BATCH)
    with progress("sampling", len(batches)) as advance:
        for first in batches:
            batch = pairs[first : first + BATCH]
            images.append(draw(batch).cpu())
            advance("")
    pictures = torch.cat(images)
    for (prompt, seed), picture in zip(pairs, pictures, strict=True):
        save_png(picture, options.out / f"{prompts.index(prompt):03d}_seed{seed}.png")
    captions = [f"{prompt} ({seed})" for prompt, seed in pairs]
    scale = max(1, 128 // pictures.shape[-1])
    save_png(grid(pictures, columns=len(seeds), captions=captions, scale=scale), options.out / "grid.png")
    print(f"wrote {len(pairs)} images and grid.png to {options.out}")
    return 0


def drawing(source: Source, settings: RLG | None) -> Callable[[Sequence[tuple[str, int]]], Tensor]:
    """Loads the model; returns what makes images of (prompt, seed) pairs, by its LoRA or by guidance between models."""
    if settings is not None:
        settings.check(source.num_steps)
    pipeline = load_source(source if settings is None else replace(source, lora=None))
    schedule = pipeline.schedule(source.num_steps, source.grid)
    names = [] if settings is None else add_experts(pipeline, settings.loras)
    if settings is not None:
        print(settings.describe(schedule, source.guidance_scale))

    def draw(batch: Sequence[tuple[str, int]]) -> Tensor:
        x = torch.stack([counter_normal(pipeline.latent_shape, seed, "sample") for _, seed in batch])
        texts = [prompt for prompt, _ in batch]
        if settings is None:
            return generate(pipeline, texts, x, schedule, guidance_scale=source.guidance_scale)
        return generate_rlg(pipeline, names, texts, x, schedule, settings, guidance_scale=source.guidance_scale)

    return draw


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
