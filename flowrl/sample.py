"""`flowrl sample`: images of a base or tuned model for given prompts and seeds, as PNG files and a grid."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flowrl.config import load_config
from flowrl.evaluate import generate
from flowrl.images import grid, save_png
from flowrl.parts import DTYPES, model_location
from flowrl.pipelines import Pipeline, family
from flowrl.pipelines.lora import add_saved_lora
from flowrl.pipelines.tiny import CONTEXT, GUIDANCE_SCALE, NUM_STEPS
from flowrl.progress import progress
from flowrl.prompts import read_prompts
from flowrl.randomness import counter_normal

EMBEDDED = "asset:tiny-sd3"
BATCH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What to sample from, and how its owner samples it."""

    model: str
    lora: Path | None
    num_steps: int
    guidance_scale: float
    grid: str
    max_sequence_length: int
    dtype: str
    height: int | None = None
    width: int | None = None


def sample(options: argparse.Namespace) -> int:
    """Writes `<prompt>_<seed>.png` for every pair, and `grid.png` with a row a prompt and a column a seed.

    The start noise is a function of the seed alone, so a column shares it, and so do two models.

    Raises:
        ValueError: no prompt, a bad seed list, an unknown source.
    """
    if options.base and options.lora is not None:
        raise ValueError("--base samples the model without a LoRA, so --lora has no place beside it: give one of them")
    listed = [row.text for row in read_prompts(options.prompts)] if options.prompts else []
    prompts = list(dict.fromkeys([*options.prompt, *listed]))
    if not prompts:
        raise ValueError('no prompt was given: add --prompt "a photo of a red circle" or --prompts FILE')
    seeds = parse_seeds(options.seeds)
    source = resolve_source(options)
    pipeline = load_source(source)
    schedule = pipeline.schedule(source.num_steps, source.grid)
    pairs = [(prompt, seed) for prompt in prompts for seed in seeds]
    options.out.mkdir(parents=True, exist_ok=True)
    images = []
    batches = range(0, len(pairs), BATCH)
    with progress("sampling", len(batches)) as advance:
        for first in batches:
            batch = pairs[first : first + BATCH]
            x = torch.stack([counter_normal(pipeline.latent_shape, seed, "sample") for _, seed in batch])
            texts = [prompt for prompt, _ in batch]
            images.append(generate(pipeline, texts, x, schedule, guidance_scale=source.guidance_scale).cpu())
            advance("")
    pictures = torch.cat(images)
    for (prompt, seed), picture in zip(pairs, pictures, strict=True):
        save_png(picture, options.out / f"{prompts.index(prompt):03d}_seed{seed}.png")
    captions = [f"{prompt} ({seed})" for prompt, seed in pairs]
    scale = max(1, 128 // pictures.shape[-1])
    save_png(grid(pictures, columns=len(seeds), captions=captions, scale=scale), options.out / "grid.png")
    print(f"wrote {len(pairs)} images and grid.png to {options.out}")
    return 0


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
    folder = Path(options.source)
    if (folder / "config.yaml").is_file():
        config = load_config(folder / "config.yaml")
        lora = None if options.base else options.lora or folder / "lora"
        steps, scale = config.eval.num_steps or config.sampler.num_steps, config.eval.guidance_scale
        found = Source(
            model=config.pipeline.model, lora=lora, num_steps=steps, grid=config.eval.grid or config.sampler.grid,
            guidance_scale=config.sampler.guidance_scale if scale is None else scale,
            max_sequence_length=config.pipeline.max_sequence_length, dtype=config.pipeline.dtype,
            height=config.pipeline.height, width=config.pipeline.width,
        )  # fmt: skip
    else:
        embedded = options.source == EMBEDDED
        found = Source(
            model=options.source, lora=options.lora, num_steps=NUM_STEPS if embedded else 40, grid="diffusers",
            guidance_scale=GUIDANCE_SCALE if embedded else 4.5, dtype="float32",
            max_sequence_length=CONTEXT if embedded else 128,
        )  # fmt: skip
    given = {
        name: value
        for name in ("num_steps", "guidance_scale", "max_sequence_length")
        if (value := vars(options)[name]) is not None
    }
    for name in ("num_steps", "max_sequence_length"):
        if given.get(name, 1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {given[name]}")
    return replace(found, **given)


def load_source(source: Source) -> Pipeline:
    """The pipeline with its LoRA, on the best device there is."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipeline: Pipeline = family("sd3").load(
        model_location(source.model), dtype=DTYPES[source.dtype], device=device, height=source.height,
        width=source.width, max_sequence_length=source.max_sequence_length,
    )  # fmt: skip
    if source.lora is not None:
        add_saved_lora(pipeline.transformer, source.lora)
    return pipeline
