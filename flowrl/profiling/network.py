"""The network: forward as in rollouts, forward and backward as in updates, guided, checkpointed, compiled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flowrl.config.train import location_of
from flowrl.pipelines.arithmetic.attention import give_kernel
from flowrl.pipelines.arithmetic.attention_words import usable
from flowrl.pipelines.arithmetic.compiling import check_compile, compile_blocks
from flowrl.pipelines.arithmetic.wide_products import checkpoint_blocks
from flowrl.profiling.ceilings import GEMM
from flowrl.profiling.result import WRONG, Phase, TimeSpread
from flowrl.profiling.stopwatch import Stopwatch
from flowrl.profiling.subject import BenchSubject
from flowrl.runtime.capabilities import this_machine
from flowrl.runtime.private_names import can_checkpoint
from flowrl.samplers.guidance import TrainNegative
from flowrl.training.parts import DTYPES, model_family
from flowrl.training.prompting import guided

_SMALLEST, _LARGEST = 1e-3, 1e3
"""Standard deviations between which an answer of the network is of order 1."""

_NEGATIVE: dict[TrainNegative, str] = {
    True: "both halves trained",
    False: "negative half constant",
    "recompute": "negative half recomputed",
}
"""Values of `sampler.train_negative`, in words."""


def network(subject: BenchSubject, watch: Stopwatch) -> Iterator[Phase]:
    """Evaluations without guidance: forward at the rollout's rows, forward and backward at the micro-batch's."""
    rows = subject.geometry.rollout_batch_size * subject.passes
    call = subject.evaluation(rows)
    with torch.no_grad():
        check_answer(subject.evaluation(1)())
        yield watch.phase("network", "forward", call, **forward_facts(subject, rows))
    rows = subject.geometry.micro_batch_size
    call = subject.evaluation(rows)
    configured = subject.config.pipeline.gradient_checkpointing
    for checkpointing in (configured, not configured):
        with switch_checkpointing(subject, checkpointing) as done:
            if done or checkpointing == configured:
                name = "forward and backward" + (", checkpointed" if checkpointing else ", not checkpointed") * (
                    checkpointing != configured
                )
                yield watch.phase(
                    "network", name, with_backward(subject, call), **both_ways(subject, rows, checkpointing)
                )


def guidance(subject: BenchSubject, watch: Stopwatch) -> Iterator[Phase]:
    """A step of the rollout and a micro-batch of the update, guided, by each `sampler.train_negative`."""
    settings, passes = subject.config.sampler, subject.passes
    if passes == 1:
        told = f"guidance at scale {settings.guidance_scale:g} is one row an image here"
        yield Phase(section="guidance", name="guided", note=told)
        return
    for trained, words in _NEGATIVE.items():
        told = "as configured" if trained == settings.train_negative else ""
        try:
            _guided(subject, 1, trained)
        except ValueError as error:  # of pipelines whose guidance is one thing
            yield Phase(section="guidance", name=words, note=f"not measured: {error}")
            continue
        if trained != "recompute":  # which samples as True does
            images = subject.geometry.rollout_batch_size
            facts = forward_facts(subject, images * passes) | {"items": images, "note": told}
            with torch.no_grad():
                call = _guided(subject, images, trained)
                yield watch.phase("guidance", f"rollout, {words}", call, **facts)
        images = subject.geometry.micro_batch_size
        once, rows = subject.forward_flops(images), images * (1 if trained is False else 2)  # rows walked back
        facts = both_ways(subject, rows, subject.config.pipeline.gradient_checkpointing)
        facts |= {"rows": 2 * images, "items": images, "note": told}
        if trained is False:
            facts["flops"] += once
        if trained == "recompute":
            facts["recomputed"] += once
        call = _guided(subject, images, trained)
        yield watch.phase("guidance", f"update, {words}", with_backward(subject, call), **facts)


def attention(subject: BenchSubject, watch: Stopwatch) -> Iterator[Phase]:
    """The network under each word of `pipeline.attention` that this machine has, forward and with backward."""
    family, model = model_family(subject.config.pipeline), location_of(subject.config.pipeline)
    known, dtype = family.attends(model), DTYPES[subject.config.pipeline.dtype]
    words = usable(this_machine(subject.device.type), dtype, known)
    if not words:
        yield Phase(section="attention", name="kernels", note="nothing is known of this model's attention")
    images = subject.geometry.micro_batch_size
    rows = subject.geometry.rollout_batch_size * subject.passes
    before = subject.pipeline.attention
    try:
        for word in words:
            told = "as configured" if word == before else ""
            try:
                give_kernel(subject.denoisers, word, known, dtype, subject.device)
            except ValueError as error:
                yield Phase(section="attention", name=word, note=f"not measured: {error}")
                continue
            call = subject.evaluation(rows)
            with torch.no_grad():
                yield watch.phase("attention", f"forward, {word}", call, **forward_facts(subject, rows), note=told)
            trained = with_backward(subject, subject.evaluation(images))
            facts = both_ways(subject, images, subject.config.pipeline.gradient_checkpointing)
            yield watch.phase("attention", f"forward and backward, {word}", trained, **facts, note=told)
    finally:
        give_kernel(subject.denoisers, before, known, dtype, subject.device)


def check_answer(answer: Tensor) -> None:
    """Refuses a network with results that are not finite, or far from order 1, because its speed would mean nothing.
    Raises ValueError: with the standard deviation."""
    std = float(answer.double().std())
    if not _SMALLEST < std < _LARGEST:  # NaN too
        raise ValueError(
            f"the network answers with a standard deviation of {std:.3g} instead of one near 1, so that it would be "
            "measured on numbers that no run has: try pipeline.dtype=bfloat16 or float32"
        )


@contextmanager
def switch_checkpointing(subject: BenchSubject, wanted: bool) -> Iterator[bool]:
    """A context with or without recomputation of blocks in the backward pass; yields whether the network can switch."""
    parts = [part for part in subject.denoisers if can_checkpoint(part)]
    before = [part.is_gradient_checkpointing for part in parts]

    def switch(part: Any, on: bool) -> None:
        if on:
            checkpoint_blocks(part, part.device, DTYPES[subject.config.pipeline.dtype])
        else:
            part.disable_gradient_checkpointing()

    for part in parts:
        switch(part, wanted)
    try:
        yield bool(parts)
    finally:
        for part, was in zip(parts, before, strict=True):
            switch(part, was)


def _guided(subject: BenchSubject, images: int, trained: TrainNegative) -> Callable[[], Tensor]:
    schedule, step, scale = subject.schedule, subject.schedule.num_steps // 2, subject.config.sampler.guidance_scale
    cond, latents = subject.conditioning(images), subject.latents(images)
    velocity = guided(subject.pipeline, subject.pipeline.network, cond, scale, trained)
    return lambda: velocity(latents, schedule.sigma[step], schedule.timestep[step])


def with_backward(subject: BenchSubject, call: Callable[[], Tensor]) -> Callable[[], object]:
    """A call, and the gradient of its mean square."""
    return lambda: torch.autograd.grad(call().square().mean(), subject.parameters, allow_unused=True)


def forward_facts(subject: BenchSubject, rows: int) -> dict[str, Any]:
    """Bytes of a forward pass: each weight is read once, latents are read and written."""
    latents = 2.0 * rows * math.prod(subject.pipeline.latent_shape) * 4
    return {
        "rows": rows,
        "flops": subject.forward_flops(rows),
        "ceiling": GEMM,
        "least_bytes": subject.weight_bytes + latents,
    }


def both_ways(subject: BenchSubject, rows: int, checkpointing: bool) -> dict[str, Any]:
    """Bytes of forward and backward: weights are read twice, saved tensors are written and read."""
    there, facts = subject.network, forward_facts(subject, rows)
    saved = 0 if there is None else rows * (there.saved_checkpointed if checkpointing else there.saved)
    return facts | {
        "flops": facts["flops"] + subject.backward_flops(rows),
        "recomputed": facts["flops"] if checkpointing else 0.0,
        "least_bytes": facts["least_bytes"] + subject.weight_bytes + 2.0 * saved,
    }


def measure_compiled(subject: BenchSubject, watch: Stopwatch, *, backend: str = "inductor") -> Iterator[Phase]:
    """Forward and backward under `pipeline.compile: blocks`: the last section, since blocks stay compiled. The phase
    says if evaluations with and without gradient differ, since no ratio would then start at 1."""
    if subject.config.pipeline.compile != "none":
        yield Phase(section="compile", name="blocks", note="as configured: all that was measured is compiled")
        return
    try:
        check_compile("blocks", subject.device)
    except ValueError as error:
        yield Phase(section="compile", name="blocks", note=f"not measured: {error}")
        return
    for part in subject.denoisers:
        compile_blocks(part, backend=backend)
    images = subject.geometry.micro_batch_size
    call, rows = subject.evaluation(images), subject.geometry.rollout_batch_size * subject.passes
    begun, used = time.perf_counter(), time.process_time()
    kept = call().detach()
    with torch.no_grad():
        equal = torch.equal(call(), kept)
    with_backward(subject, call)()
    spent = TimeSpread.of([time.process_time() - used if subject.device.type == "cpu" else time.perf_counter() - begun])
    told = "paid once: compiling, and the first calls; on a CPU in seconds of all its threads"
    yield Phase(
        section="compile",
        name="first calls",
        seconds=spent,
        wall=TimeSpread.of([time.perf_counter() - begun]),
        repeats=1,
        note=told,
    )
    if not equal:
        told = (
            f"{WRONG}: compiled blocks answer differently with and without gradient, so that no importance ratio would "
            "start at 1: set pipeline.compile=none"
        )
        yield Phase(section="compile", name="answers", note=told)
        return
    forward = subject.evaluation(rows)
    with torch.no_grad():
        yield watch.phase("compile", "forward", forward, counted=False, **forward_facts(subject, rows))
    facts = both_ways(subject, images, subject.config.pipeline.gradient_checkpointing)
    yield watch.phase("compile", "forward and backward", with_backward(subject, call), counted=False, **facts)
