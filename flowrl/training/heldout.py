"""Evaluation on held-out prompts: the deterministic (ODE) sampler, fixed start noise, scores with intervals.

The start noise of an image is a function of (eval.seed, prompt, sample). So any two evaluations with one seed, of one
run or of several, draw the same prompts from the same noise and can be paired.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

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
from flowrl.runtime.placement import sent
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import Part, counter_seed, sample_normals
from flowrl.samplers import ode_rollout
from flowrl.training.draws import EvalRequest
from flowrl.training.prompting import caching, device_of, encode_prompts, guided, reward_inputs
from flowrl.training.run import Run
from flowrl.training.watchdog import look_at, stop_on_broken
from flowrl.trajectory import Conditioning, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Images `[b, 3, H, W]` or videos `[b, F, 3, H, W]` as drawn, perhaps with sound `[b, channels, samples]`."""

    images: Tensor
    sounds: Tensor | None

    def tracks(self, rate: int | None) -> list[tuple[Tensor, int] | None]:
        """The sound of each on the host with its sample rate, as clips are written; None for silent ones."""
        if self.sounds is None or rate is None:
            return [None] * len(self.images)
        return [(sound, rate) for sound in self.sounds.cpu()]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawing:
    """How an evaluation draws: along which levels, guided how far, from the start noise of which seed, how many at
    once; where the run's workers draw, under which weights that they were sent, how many tickets ahead, and how many
    batches a worker takes together."""

    schedule: Schedule
    guidance_scale: float
    seed: int
    batch_size: int
    weights: Any = None
    ahead: int = 0
    at_once: int = 1


@torch.no_grad()
def generate(
    pipeline: Pipeline, prompts: Sequence[Prompt | str], x: Tensor, schedule: Schedule, *, guidance_scale: float
) -> Tensor:
    """Images float32 `[b, 3, H, W]`, or videos `[b, F, 3, H, W]`, of prompts from start noise `x` `[b, *latent]` by
    the ODE sampler. The noise may lie on any device."""
    return pipeline.decode(finished(pipeline, encode_prompts(pipeline, prompts), x, schedule, guidance_scale))


def decode(pipeline: Pipeline, final: Tensor) -> Made:
    """Images or videos of finished latents, with the sound of videos that have any."""
    heard = pipeline.sound_rate is not None
    return Made(images=pipeline.decode(final), sounds=pipeline.decode_sound(final) if heard else None)


@torch.no_grad()
def finished(
    pipeline: Pipeline, cond: Conditioning, x: Tensor, schedule: Schedule, guidance_scale: float, cache: float = 0.0
) -> Tensor:
    """Finished latents `[b, *latent]` of start noise `x`; `cache` is a threshold of First-Block Cache."""
    device = device_of(pipeline)
    velocity = guided(pipeline, pipeline.network, cond.to(device), guidance_scale)
    with caching(pipeline, cache) as cached:
        return ode_rollout(cached(velocity), x.to(device), schedule)


@torch.no_grad()
def final_of(pipeline: Pipeline, request: EvalRequest, schedule: Schedule) -> Tensor:
    """Finished latents `[b, *latent]` of a batch, under the network's current weights."""
    x = sample_normals(pipeline.latent_shape, request.keys)
    return finished(pipeline, request.cond, x, schedule, request.scale)


def finals_of(run: Run, pipeline: Pipeline, items: Sequence[EvalItem], how: Drawing) -> Iterator[Tensor]:
    """Finished latents of items, batch by batch in order; if workers draw, it asks for some batches ahead."""
    workers = run.rollouts
    asked, waiting = deque[Sequence[int]](), list[EvalRequest]()
    for first in range(0, len(items), how.batch_size):
        batch = items[first : first + how.batch_size]
        cond = encode_prompts(pipeline, [item.prompt for item in batch])
        keys = tuple((how.seed, *_noise_of(item)) for item in batch)
        request = EvalRequest(cond=cond, keys=keys, scale=how.guidance_scale)
        if how.weights is None:
            yield final_of(pipeline, request, how.schedule)
            continue
        waiting.append(replace(request, cond=cond.to("cpu")))
        if len(waiting) == how.at_once or first + how.batch_size >= len(items):
            asked.append(workers.submit(waiting, how.weights))
            waiting = []
        if len(asked) > how.ahead:
            yield from (cast(Tensor, drawn.found) for drawn in workers.collect(asked.popleft()))
    yield from (cast(Tensor, drawn.found) for tickets in asked for drawn in workers.collect(tickets))


def evaluate(
    run: Run,
    pipeline: Pipeline,
    reward: WeightedSum | None,
    items: Sequence[EvalItem],
    how: Drawing,
    *,
    iteration: int,
    num_images: int,
    show: bool,
    in_step: bool = False,
    temporal: bool = False,
) -> Row | None:
    """Samples and scores every item with the weights the network holds now, and writes rows, images and a grid. The
    metrics row: `eval/reward/<name>`, `eval/temporal/<name>` of diagnosed videos, and `eval/geneval/<...>` where a
    geneval reward took part; None if a stop was requested meanwhile, and then it writes nothing.

    With `in_step` every process calls the network as often as the others: one with a shorter share repeats its last
    batches. With `temporal` it diagnoses videos too (`flowrl.benchmarks.temporal`).

    Files: `eval/iteration_<n>.jsonl` (one line per image), `samples/iteration_<n>/<k>.png` for `num_images` items
    spread over the list, `samples/iteration_<n>.png`, `samples/prompts.json`. Raises ValueError: an image is not
    finite; see `flowrl.training.watchdog.stop_on_broken`.
    """
    share = -(-len(items) // run.world)
    own = range(run.rank * share, min(len(items), (run.rank + 1) * share))
    shown = spread(len(items), num_images)
    rows: list[Row] = []
    kept: dict[int, Tensor] = {}
    heard: dict[int, Tensor] = {}
    broken = 0
    starts = range(own.start, own.stop, how.batch_size)
    finals = finals_of(run, pipeline, items[own.start : own.stop], how)
    with progress(f"evaluating at {iteration}", len(starts), enabled=show and run.main) as advance:
        for first in starts:
            if run.stop_requested and run.processes == 1:  # several processes would have to agree at each batch
                return None
            numbers = range(first, min(first + how.batch_size, own.stop))
            with torch.no_grad():
                made = decode(pipeline, sent(next(finals), run.device))
            batch = items[first : numbers.stop]
            scored, found = _measure(run, pipeline, reward, batch, made, how.seed, iteration, temporal)
            rows += scored
            broken += found
            for number in [number for number in shown if number in numbers]:
                kept[number] = made.images[number - first].cpu()
                if made.sounds is not None:
                    heard[number] = made.sounds[number - first].cpu()
            advance("")
    for _ in range(-(-share // how.batch_size) - len(starts) if in_step else 0):
        x = torch.zeros(1, *pipeline.latent_shape)
        generate(pipeline, [items[0].prompt], x, how.schedule, guidance_scale=how.guidance_scale)
    stop_on_broken(run, broken, len(own), iteration, learned=iteration > 0)
    rows, kept = run.joined(rows), dict(run.joined(list(kept.items())))
    heard = {} if pipeline.sound_rate is None else dict(run.joined(list(heard.items())))
    if run.main:
        name = f"iteration_{iteration:06d}.jsonl"
        write_atomically(run.folder / "eval" / name, "".join(json.dumps(row) + "\n" for row in rows))
        if kept:
            _write_samples(run.folder / "samples", pipeline, iteration, items, kept, heard, how.seed)
    return summary(rows)


def _noise_of(item: EvalItem) -> tuple[Part, ...]:
    """Counters of an image's start noise, besides the seed of evaluations."""
    return "eval", item.prompt.noise_name, item.sample if item.noise is None else item.noise


def _measure(
    run: Run,
    pipeline: Pipeline,
    reward: WeightedSum | None,
    batch: Sequence[EvalItem],
    made: Made,
    seed: int,
    iteration: int,
    temporal: bool,
) -> tuple[list[Row], int]:
    """The rows of a batch's results, and how many of them are not finite; rewards never see those."""
    broken = int(look_at(made.images).broken.sum())
    looks = run.first and not broken
    group, numbers = torch.tensor([item.prompt_id for item in batch]), [item.sample for item in batch]
    prompts = [item.prompt for item in batch]
    inputs = reward_inputs(
        pipeline, prompts, made.images, made.sounds, group=group, numbers=numbers, iteration=iteration
    )
    found: Mapping[str, Tensor] = {}
    verdicts, rows = "", list[Row]()
    if reward is not None and looks:
        found, verdicts = reward(inputs).parts, reward.verdicts
    for i, item in enumerate(batch):
        parts = {name.removeprefix("reward/"): _number(float(value[i])) for name, value in found.items()}
        official = parts.get(f"{verdicts}/official")
        row: Row = {"prompt_id": item.prompt_id, "prompt": item.prompt.text, "key": item.key or asked_for(item.prompt)}
        row |= {"task": item.prompt.metadata.get("tag", ""), "sample": item.sample}
        row |= {"seed": counter_seed(seed, *_noise_of(item)), "correct": None if official is None else official > 0.5}
        row |= {"graded": parts.get(f"{verdicts}/graded"), "rewards": parts}
        if temporal and looks:
            row["temporal"] = {name: _number(value) for name, value in diagnose(made.images[i]).items()}
        rows.append(row)
    return rows, broken


def _number(value: float) -> float | None:
    """NaN, a failed item, becomes null in files, since JSON has no NaN."""
    return None if math.isnan(value) else value


def _write_samples(
    folder: Path,
    pipeline: Pipeline,
    iteration: int,
    items: Sequence[EvalItem],
    kept: Mapping[int, Tensor],
    heard: Mapping[int, Tensor],
    seed: int,
) -> None:
    """Writes what an evaluation kept: images and sounds, by numbers of their items."""
    numbers, rate = sorted(kept), pipeline.sound_rate
    prompts = [items[number].prompt for number in numbers]
    sources = [load_sources(prompt) for prompt in prompts] if any(prompt.sources for prompt in prompts) else None
    sounds = None if rate is None else Sounds(waves=[heard[number] for number in numbers], rate=rate)
    images, texts = [kept[number] for number in numbers], [prompt.text for prompt in prompts]
    write_samples(folder, iteration, images, texts, sources, pipeline.fps, sounds)
    listed = []
    for item in [items[number] for number in numbers]:
        row: Row = {"prompt": item.prompt.text, "sample": item.sample, "seed": counter_seed(seed, *_noise_of(item))}
        listed.append(row | ({"sources": list(item.prompt.sources)} if item.prompt.sources else {}))
    write_atomically(folder / "prompts.json", json.dumps(listed, indent=1) + "\n")
