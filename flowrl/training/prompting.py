"""From prompts to what a pipeline and rewards take: embeddings, guided velocities, reward inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.media.lossless import read_clip
from flowrl.pipelines import Pipeline
from flowrl.prompts.loading import Prompt, load_sources
from flowrl.prompts.source_images import read_image
from flowrl.rewards import RewardInputs
from flowrl.samplers import Network, Velocity
from flowrl.samplers.guidance import TrainNegative
from flowrl.trajectory import Conditioning


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPrompts:
    """The prompts of a run, read once."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...] = ()
    """To evaluate on; empty if the run never evaluates."""
    more: tuple[Prompt, ...] = ()
    """Others to encode, such as those of preference pairs."""


_NEGATIVE = "negative/"  # prefix of the names of a negative prompt's tensors in a conditioning


def encode_prompts(pipeline: Pipeline, prompts: Sequence[Prompt | str]) -> Conditioning:
    """Conditioning of prompts, one row each: with their source images, and their negative prompts if the family reads
    them. Raises ValueError: a prompt has source images that the family does not take, or lacks those it needs."""
    rows = [prompt if isinstance(prompt, Prompt) else Prompt(text=prompt, metadata={}) for prompt in prompts]
    sources = [_given(row) for row in rows]  # at their own size: families resize them
    positive = pipeline.encode([row.text for row in rows], sources)
    if not reads_negative(pipeline):
        return positive
    negative = pipeline.encode([row.negative for row in rows], sources)
    return Conditioning(
        {**positive.tensors, **{f"{_NEGATIVE}{name}": tensor for name, tensor in negative.tensors.items()}}
    )


def _given(prompt: Prompt) -> list[Tensor]:
    """What a prompt is about, as pipelines take it: clips `[F, 3, h, w]`, then images `[3, h, w]`."""
    return [*map(read_clip, prompt.clips), *load_sources(prompt)]


def not_kept(prompts: Iterable[tuple[Pipeline, Prompt]]) -> list[tuple[Pipeline, Prompt]]:
    """Those of prompts, each with the pipeline that draws it, whose embedding needs a text encoder."""
    found = []
    for pipeline, prompt in prompts:
        texts = [prompt.text, prompt.negative] if reads_negative(pipeline) else [prompt.text]
        if not pipeline.keeps(texts, [_given(prompt)] * len(texts)):
            found.append((pipeline, prompt))
    return found


def encode_all(pipeline: Pipeline, prompts: Iterable[Prompt]) -> None:
    """Embeds prompts one by one and keeps the embeddings, so that the text encoders can go."""
    from flowrl.pipelines.shared.prompt_embeddings import keeping_all  # diffusers takes seconds to import

    with keeping_all(), pipeline.awake("text_encoders"):
        for prompt in prompts:
            encode_prompts(pipeline, [prompt])


def reads_negative(pipeline: Pipeline) -> bool:
    """Whether guidance of this family reads a negative prompt at some scale."""
    return pipeline.passes(2.0) == 2


def guided(
    pipeline: Pipeline, network: Network, cond: Conditioning, scale: float, train_negative: TrainNegative = True
) -> Velocity:
    """The family's guided velocity of a network, for conditioning made by `encode_prompts`."""
    negative = {
        name.removeprefix(_NEGATIVE): tensor for name, tensor in cond.tensors.items() if name.startswith(_NEGATIVE)
    }
    positive = {name: tensor for name, tensor in cond.tensors.items() if not name.startswith(_NEGATIVE)}
    against = Conditioning(negative) if negative else None
    return pipeline.guided(network, Conditioning(positive), against, scale, train_negative)


def caching(pipeline: Pipeline, threshold: float) -> AbstractContextManager[Callable[[Velocity], Velocity]]:
    """Inside, one rollout's velocities through what it gives use First-Block Cache; at threshold 0 none do."""
    if threshold == 0:
        return nullcontext(lambda velocity: velocity)
    from flowrl.pipelines.arithmetic.first_block import first_block_cache  # diffusers takes seconds to import

    return first_block_cache(pipeline.denoiser, threshold)


def device_of(pipeline: Pipeline) -> torch.device:
    """Where the denoising network lives."""
    return next(pipeline.denoiser.parameters()).device


def reward_inputs(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    decoded: Tensor,
    sounds: Tensor | None = None,
    *,
    group: Tensor,
    numbers: Sequence[int],
    iteration: int,
) -> RewardInputs:
    """The inputs of rewards for decoded samples, with the images that their prompts name.

    Args:
        pipeline: says how fast videos run.
        decoded: float32 `[b, 3, H, W]`, or `[b, F, 3, H, W]` of a video family, whose first frames are the images.
        sounds: float32 `[b, channels, samples]` of the videos, if the family has sound and it was decoded.
    """
    video = decoded.ndim == 5
    size = (int(decoded.shape[-2]), int(decoded.shape[-1]))
    named = {file for prompt in prompts for file in (*prompt.sources, *prompt.references)}
    loaded = {file: read_image(file, size).to(decoded.device) for file in named}  # samples of a prompt share them
    return RewardInputs(
        prompts=[prompt.text for prompt in prompts],
        images=decoded[:, 0] if video else decoded,
        videos=decoded if video else None,
        fps=pipeline.fps if video else None,
        sounds=sounds,
        sound_rate=None if sounds is None else pipeline.sound_rate,
        metadata=[prompt.metadata for prompt in prompts],
        group_ids=group,
        sample_ids=torch.tensor(list(numbers)),
        source_images=_of_rows(loaded, [prompt.sources for prompt in prompts]),
        reference_images=_of_rows(loaded, [prompt.references for prompt in prompts]),
        iteration=iteration,
    )


def _of_rows(images: Mapping[str, Tensor], rows: Sequence[Sequence[str]]) -> list[list[Tensor]] | None:
    """The images of each row by their files; None if no row names any."""
    return [[images[file] for file in files] for files in rows] if any(rows) else None
