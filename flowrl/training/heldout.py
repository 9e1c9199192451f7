"""Evaluation on held-out prompts: the deterministic (ODE) sampler, fixed start noise, scores with intervals.

The start noise of an image is a function of (eval.seed, prompt, sample), so that any two evaluations with one seed,
of one run or of several, show the same prompts from the same noise and can be paired.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flowrl.benchmarks.temporal import diagnose
from flowrl.media.kept import Sounds, write_samples
from flowrl.pipelines import Pipeline
from flowrl.prompts.identity import asked_for
from flowrl.prompts.loading import EvalItem, Prompt, load_sources, spread
from flowrl.rewards.compose import WeightedSum
from flowrl.runs.evaluation_rows import Row, summary
from flowrl.runtime.files import write_atomically
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import Part, counter_seed, sample_normals
from flowrl.samplers import ode_rollout
from flowrl.training.prompting import device_of, encode_prompts, guided, reward_inputs
from flowrl.training.run import Run
from flowrl.training.watchdog import look_at, stop_on_broken
from flowrl.trajectory import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What was drawn: images `[b, 3, H, W]` or videos `[b, F, 3, H, W]`, and `[b, channels, samples]` of their sound
    where their family has any."""

    images: Tensor
    sounds: Tensor | None

    def tracks(self, rate: int | None) -> list[tuple[Tensor, int] | None]:
        """The sound of each on the host with its samples per second, as clips are written; None of silent ones."""
        if self.sounds is None or rate is None:
            return [None] * len(self.images)
        return [(sound, rate) for sound in self.sounds.cpu()]


@torch.no_grad()
def generate(
    pipeline: Pipeline, prompts: Sequence[Prompt | str], x: Tensor, schedule: Schedule, *, guidance_scale: float
) -> Tensor:
    """Images float32 `[b, 3, H, W]`, or videos `[b, F, 3, H, W]`, of prompts from start noise `x` `[b, *latent]` by
    the ODE sampler. The noise may lie on any device."""
    return pipeline.decode(_final(pipeline, prompts, x, schedule, guidance_scale))


@torch.no_grad()
def made_of(
    pipeline: Pipeline, prompts: Sequence[Prompt | str], x: Tensor, schedule: Schedule, *, guidance_scale: float
) -> Made:
    """As `generate`, with the sound of videos that have any."""
    return decoded(pipeline, _final(pipeline, prompts, x, schedule, guidance_scale))


def decoded(pipeline: Pipeline, final: Tensor) -> Made:
    """Images or videos of finished latents, with the sound of videos that have any."""
    heard = pipeline.sound_rate is not None
    return Made(images=pipeline.decode(final), sounds=pipeline.decode_sound(final) if heard else None)


def _final(
    pipeline: Pipeline, prompts: Sequence[Prompt | str], x: Tensor, schedule: Schedule, guidance_scale: float
) -> Tensor:
    x = x.to(device_of(pipeline))
    velocity = guided(pipeline, pipeline.network, encode_prompts(pipeline, prompts), guidance_scale)
    return ode_rollout(velocity, x, schedule)


def evaluate(
    run: Run,
    pipeline: Pipeline,
    reward: WeightedSum | None,
    items: Sequence[EvalItem],
    schedule: Schedule,
    *,
    iteration: int,
    guidance_scale: float,
    batch_size: int,
    seed: int,
    num_images: int,
    show: bool,
    in_step: bool = False,
    temporal: bool = False,
) -> Row | None:
    """Samples and scores every item with the weights the network holds now, and writes rows, images and a grid.

    With `in_step` every process calls the network as often as the others: one with a shorter share draws its last
    batches for nothing. With `temporal` videos are diagnosed too (`flowrl.benchmarks.temporal`).

    Files: `eval/iteration_<n>.jsonl` (one line per image), `samples/iteration_<n>/<k>.png` for `num_images` items
    spread over the list, `samples/iteration_<n>.png`, `samples/prompts.json`.

    Returns:
        The metrics row: `eval/reward/<name>`, `eval/temporal/<name>` of diagnosed videos, and `eval/geneval/<...>`
        where a geneval reward took part. None where a stop was asked for meanwhile; nothing is written then.

    Raises:
        ValueError: an image is not finite; see `flowrl.training.watchdog.stop_on_broken`.
    """
    share = -(-len(items) // run.world)
    own = range(run.rank * share, min(len(items), (run.rank + 1) * share))
    shown = spread(len(items), num_images)
    rows: list[Row] = []
    kept: dict[int, Tensor] = {}
    heard: dict[int, Tensor] = {}
    broken = 0
    starts = range(own.start, own.stop, batch_size)
    with progress(f"evaluating at {iteration}", len(starts), enabled=show and run.main) as advance:
        for first in starts:
            if run.stop_requested and run.processes == 1:  # several processes would have to agree on it at each batch
                return None
            numbers = range(first, min(first + batch_size, own.stop))
            batch = [items[i] for i in numbers]
            x = sample_normals(pipeline.latent_shape, [(seed, *_noise_of(item)) for item in batch]).to(run.device)
            prompts = [item.prompt for item in batch]
            drawn = made_of(pipeline, prompts, x, schedule, guidance_scale=guidance_scale)
            images, sounds = drawn.images, drawn.sounds
            found = int(look_at(images).broken.sum())  # no reward sees them, and the run ends below
            broken += found
            made = _scored(pipeline, None if found or not run.first else reward, batch, drawn, iteration, seed)
            if temporal and run.first and not found:
                for row, video in zip(made, images, strict=True):
                    row["temporal"] = {name: _number(value) for name, value in diagnose(video).items()}
            rows += made
            kept |= {i: images[i - first].cpu() for i in numbers if i in shown}
            heard |= {i: sounds[i - first].cpu() for i in numbers if i in shown and sounds is not None}
            advance("")
    for _ in range(-(-share // batch_size) - len(starts) if in_step else 0):
        x = torch.zeros(1, *pipeline.latent_shape)
        generate(pipeline, [items[0].prompt], x, schedule, guidance_scale=guidance_scale)
    stop_on_broken(run, broken, len(own), iteration, learned=iteration > 0)
    rows, kept = run.joined(rows), dict(run.joined(list(kept.items())))
    heard = dict(run.joined(list(heard.items()))) if pipeline.sound_rate is not None else {}
    if run.main:
        rate = pipeline.sound_rate
        sounds_kept = None if rate is None else Sounds(waves=[heard[i] for i in sorted(kept)], rate=rate)
        _write(run.folder, iteration, rows, kept, items, seed, pipeline.fps, sounds_kept)
    return summary(rows)


def _noise_of(item: EvalItem) -> tuple[Part, ...]:
    """What the start noise of an image is a function of, besides the seed of evaluations."""
    return "eval", item.prompt.noise_name, item.sample if item.noise is None else item.noise


def _scored(
    pipeline: Pipeline, reward: WeightedSum | None, batch: Sequence[EvalItem], made: Made, iteration: int, seed: int
) -> list[Row]:
    inputs = reward_inputs(
        pipeline, [item.prompt for item in batch], made.images, made.sounds,
        group=torch.tensor([item.prompt_id for item in batch]), numbers=[item.sample for item in batch],
        iteration=iteration,
    )  # fmt: skip
    output = None if reward is None else reward(inputs)
    found = {} if output is None else output.parts
    verdicts = "" if reward is None else reward.verdicts
    rows = []
    for i, item in enumerate(batch):
        parts = {name.removeprefix("reward/"): _number(float(value[i])) for name, value in found.items()}
        official = parts.get(f"{verdicts}/official")
        rows.append({
            "prompt_id": item.prompt_id, "prompt": item.prompt.text, "key": item.key or asked_for(item.prompt),
            "task": item.prompt.metadata.get("tag", ""), "sample": item.sample,
            "seed": counter_seed(seed, *_noise_of(item)), "correct": None if official is None else official > 0.5,
            "graded": parts.get(f"{verdicts}/graded"), "rewards": parts,
        })  # fmt: skip
    return rows


def _number(value: float) -> float | None:
    """NaN, an item that failed, is null in files: JSON knows no NaN."""
    return None if math.isnan(value) else value


def _write(
    folder: Path, iteration: int, rows: list[Row], kept: dict[int, Tensor], items: Sequence[EvalItem], seed: int,
    fps: float | None, sounds: Sounds | None = None,
) -> None:  # fmt: skip
    name = f"iteration_{iteration:06d}"
    write_atomically(folder / "eval" / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    numbers = sorted(kept)
    if not numbers:
        return
    prompts = [items[number].prompt for number in numbers]
    sources = [load_sources(prompt) for prompt in prompts] if any(prompt.sources for prompt in prompts) else None
    write_samples(
        folder / "samples",
        iteration,
        [kept[n] for n in numbers],
        [prompt.text for prompt in prompts],
        sources,
        fps,
        sounds,
    )
    listed = [
        {"prompt": items[n].prompt.text, "sample": items[n].sample,
         "seed": counter_seed(seed, *_noise_of(items[n]))}
        | ({"sources": list(items[n].prompt.sources)} if items[n].prompt.sources else {})
        for n in numbers
    ]  # fmt: skip
    write_atomically(folder / "samples" / "prompts.json", json.dumps(listed, indent=1) + "\n")
