"""Other parts of an iteration, each by itself: text, decoding, rewards, noise, gradients, optimizer, checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import torch

from flowrl.config.train import location_of
from flowrl.planning.cost import decode_flops
from flowrl.planning.published_models import other_parts
from flowrl.profiling.ceilings import exact_ceiling
from flowrl.profiling.result import Phase
from flowrl.profiling.stopwatch import Stopwatch
from flowrl.profiling.subject import CANNOT_LOAD, BenchSubject
from flowrl.rewards import Reward
from flowrl.runtime.failures import explain
from flowrl.runtime.placement import sent
from flowrl.runtime.precision import arithmetic
from flowrl.runtime.randomness import sample_normals
from flowrl.runtime.temporary import TemporaryFolder
from flowrl.training.checkpoints import save_lora, write_checkpoint
from flowrl.training.learner import GradientSum
from flowrl.training.optimizers import make_optimizer
from flowrl.training.prompting import encode_prompts, reward_inputs
from flowrl.training.trackers.metric_rows import Sealed

_SOME = 24  # images that a reward is timed on at most, if it need not see a whole group


def text(subject: BenchSubject, watch: Stopwatch) -> Iterator[Phase]:
    """Embedding one prompt that is new."""
    if not subject.text_encoders:
        yield Phase(section="text", name="a prompt", note="text encoders are not there on random weights")
        return
    number, prompt = count(), subject.prompts.train[0]

    def embed() -> None:
        encode_prompts(subject.pipeline, [replace(prompt, text=f"{prompt.text} {next(number)}")])

    yield watch.phase("text", "a prompt", embed, items=1)


def parts(subject: BenchSubject, watch: Stopwatch) -> Iterator[Phase]:
    """Noise, decoding, gradient sums, the optimizer and a checkpoint."""
    geometry, shape = subject.geometry, subject.pipeline.latent_shape
    keys = [(0, "step", 0, 0, image, 0) for image in range(geometry.rollout_batch_size)]
    yield watch.phase(
        "parts", "noise of a step", lambda: sent(sample_normals(shape, keys), subject.device), items=len(keys)
    )
    # One slice of images, as many as are decoded at once.
    wanted = subject.config.pipeline.vae_slice
    images = min(geometry.rollout_batch_size, subject.config.num_images if wanted is None else wanted)
    latents = subject.latents(images)
    with torch.no_grad():
        decoding = watch.phase(
            "parts",
            "decoding",
            lambda: subject.pipeline.decode(latents),
            items=images,
            flops=images * decoding_flops(subject),
            ceiling=exact_ceiling(subject),
            least_bytes=latents.nbytes + 4.0 * images * math.prod(subject.pipeline.image_shape),
        )
    yield decoding
    weights = subject.parameters
    total = GradientSum(subject.policy, {}, scale_loss=False)
    yield watch.phase(
        "parts",
        "gradient sum",
        lambda: total.add(torch.stack([weight.sum() for weight in weights]).sum()),
        note="with the backward pass of a plain sum of the weights",
    )
    with subject.unchanged_weights(), TemporaryFolder("flowrl-bench-") as name:
        optimizer = make_optimizer(subject.config.optim, subject.policy, subject.device)
        for weight in weights:
            weight.grad = torch.full_like(weight, 1e-6)
        yield watch.phase("parts", "optimizer step", optimizer.step)
        folder = Path(name)
        state = {"policy": subject.policy.tensors(), "optimizer": optimizer.state_dict()}

        def save() -> None:
            save_lora(folder / "lora", subject.pipeline, subject.policy)
            write_checkpoint(folder, 0, state, keep=1, rows=Sealed(), run="bench", inputs="bench")

        yield watch.phase("parts", "checkpoint", save, note="the LoRA for diffusers beside it")


def rewards(subject: BenchSubject, watch: Stopwatch) -> Iterator[Phase]:
    """Each reward by itself, on decoded images of one group."""
    for name, reason in subject.absent:
        yield Phase(section="rewards", name=name, note=f"not measured: {reason}")
    whole = any(reward.kind in ("groupwise", "pairwise") for reward, _ in subject.rewards)
    images = subject.config.group_size if whole else min(_SOME, subject.config.group_size)
    prompts = [subject.prompts.train[0]] * images
    with torch.no_grad():
        decoded = subject.pipeline.decode(subject.latents(images))
    inputs = reward_inputs(
        subject.pipeline,
        prompts,
        decoded,
        group=torch.zeros(images, dtype=torch.long),
        numbers=range(images),
        iteration=0,
    )

    def score(reward: Reward) -> None:
        reward(replace(inputs))  # some rewards remember what they found in the last ones

    for place, (reward, entry) in enumerate(subject.rewards):
        name = f"{entry.label or entry.called}" + f" ({place + 1})" * (
            [other.called for _, other in subject.rewards].count(entry.called) > 1
        )
        dtype = "float32" if reward.kind == "adversarial" else subject.config.reward_dtype
        try:
            with torch.no_grad(), arithmetic(dtype):
                found = watch.phase("rewards", name, partial(score, reward), items=images)
        except CANNOT_LOAD as error:
            found = Phase(section="rewards", name=name, note=f"not measured: {explain(error)}")
        yield found


def decoding_flops(subject: BenchSubject) -> float:
    """FLOPs of decoding one image or video; 0 where the decoder is not known."""
    model, shape = location_of(subject.config.pipeline), subject.pipeline.image_shape
    size = (shape[-2], shape[-1], shape[0] if len(shape) == 4 else None)
    return decode_flops(model, other_parts(model), size) or 0.0
