"""A gradient that is not finite, computed a second time under other kernels of attention.

Backward passes of attention kernels overflow, or read masked rows as NaN, in places where others do not. A run that has
learned for days does not end for that: the update takes a finite gradient, and the log says which kernel failed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from flowrl.pipelines import Pipeline
from flowrl.pipelines.arithmetic.attention import give_kernel
from flowrl.pipelines.arithmetic.attention_words import usable
from flowrl.runtime.capabilities import this_machine
from flowrl.runtime.scrubbing import say as print
from flowrl.training.learner import GradientSum, NotFinite, Statistics
from flowrl.training.parts import DTYPES
from flowrl.training.ready import Ready
from flowrl.training.run import Run

Descend = Callable[[GradientSum, Statistics], None]
"""Adds up the gradient of an update, and notes what is logged of it."""


def second_gradient(
    ready: Ready,
    pipeline: Pipeline,
    run: Run,
    descend: Descend,
    filled: tuple[GradientSum, Statistics],
    error: NotFinite,
) -> GradientSum:
    """The first finite gradient of other kernels, joined over the processes; attention is as before afterwards.

    Kernels of the hub are left out: a run does not download. Those that hold the scores of all tokens come last.

    Args:
        ready: the run's settings.
        pipeline: whose attention it is.
        run: of all processes, which come here together.
        descend: fills a sum.
        filled: what the first gradient and its statistics are in.
        error: of the first gradient.

    Raises:
        NotFinite: it is finite under none, with those that were tried.
    """
    own, stats = filled
    known, failed = ready.family.attends(ready.location), [pipeline.attention]
    dtype, device = DTYPES[ready.config.pipeline.dtype], run.device
    words = usable(this_machine(device.type), dtype, known)
    for word in sorted(words, key=lambda word: word == "math"):
        # With a context in parallel, kernels are bound to the exchange of tokens.
        if word == pipeline.attention or word.endswith("_hub") or ready.config.parallel.context > 1:
            continue
        try:
            give_kernel([pipeline.denoiser], word, known, dtype, device)
        except ValueError:
            continue
        gradient, unread = GradientSum(own.policy, own.counters, scale_loss=own.scale_loss), Statistics(*stats.names)
        try:
            descend(gradient, unread)
        finally:
            give_kernel([pipeline.denoiser], pipeline.attention, known, dtype, device)
        if not gradient.is_finite(run):
            failed.append(word)
            continue
        if run.main:
            print(
                f"flowrl: warning, {error.where}: the gradient is not finite under pipeline.attention="
                f"{', '.join(failed)}, and under {word} it is, so this update takes that one. If it comes back, set "
                f"pipeline.attention={word}",
                file=sys.stderr,
                flush=True,
            )
        return gradient
    raise NotFinite(error.where, failed) from error
