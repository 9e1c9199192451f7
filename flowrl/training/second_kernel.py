"""A gradient that is not finite, computed a second time under other kernels of attention.

Backward passes of attention kernels overflow, or read masked rows as NaN, in places where others do not. A run that has
learned for days does not end for that: the update takes a finite gradient, and the log says which kernel failed.

Every process tries the same kernels, and all go on to the next one if a kernel fails on any. If weights or tokens are
split, a process that fails leaves the others waiting for its part. So then only torch's own choice is tried, which
takes every mask, head and dtype. If memory runs out under it, that process ends, which ends the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from flowrl.config.sections import ParallelConfig
from flowrl.pipelines import Pipeline
from flowrl.pipelines.arithmetic.attention import give_kernel, kernels_put_back
from flowrl.pipelines.arithmetic.attention_words import usable
from flowrl.runtime.capabilities import this_machine
from flowrl.runtime.failures import lost_process
from flowrl.runtime.scrubbing import one_line
from flowrl.runtime.scrubbing import say as print
from flowrl.training.learner import GradientSum, NotFinite, Statistics
from flowrl.training.parts import DTYPES, Ready
from flowrl.training.run import Run

Descend = Callable[[GradientSum, Statistics], None]
"""Adds up the gradient of an update, and notes what is logged of it."""


def apply_finite(
    ready: Ready,
    pipeline: Pipeline,
    filled: tuple[GradientSum, Statistics],
    again: Descend | None,
    how: tuple[Run, torch.optim.Optimizer, float, int],
) -> Tensor | None:
    """`GradientSum.apply`; if the gradient is not finite, of one that `again` computes under another kernel.

    Overflows in float16 are the loss scale's until they are `doubted`. Then kernels are asked under the scale from
    before them: it was not too large if one gives a finite gradient, and stays. `again` fills a gradient and the
    statistics of its rows again; None where that cannot be done twice. `how` are arguments of `GradientSum.apply`.
    Raises NotFinite: as `GradientSum.apply`, under every kernel that could be tried.
    """
    gradient, stats = filled
    counters, where = gradient.counters, f"iteration {how[-1]}"
    try:
        norm = gradient.apply(*how)
    except NotFinite:
        if again is None:
            raise
        if tried := second_gradient(ready, pipeline, how[0], again, filled, where):
            raise NotFinite(where, tried) from None
        norm = gradient.apply(*how)
    if norm is None and again is not None and gradient.doubted:
        low, before = counters["loss_scale_log2"], counters["loss_scale_log2"] + counters["loss_scale_fell"]
        counters |= {"loss_scale_log2": before, "loss_scale_fell": 0}
        more = f" The loss scale is 2^{before} as before, since it was not what overflowed."
        if second_gradient(ready, pipeline, how[0], again, filled, where, more):
            counters |= {"loss_scale_log2": low, "kernel_failed": 0}
        else:
            norm = gradient.apply(*how)
            counters["kernel_failed"] = 1
    stats.settle()
    return norm


def second_gradient(
    ready: Ready,
    pipeline: Pipeline,
    run: Run,
    descend: Descend,
    filled: tuple[GradientSum, Statistics],
    where: str,
    more: str = "",
) -> str:
    """Fills a sum with the first finite gradient of other kernels; attention is as before afterwards.

    The log keeps the numbers of the run's own kernel, which drew the rollout, if they are finite. If a kernel is found,
    it prints `more`.

    Returns what was tried, in words, if no kernel gave a finite gradient; else "".

    Raises NotFinite: this process failed while others wait for its part.
    """
    gradient, stats = filled
    known, dtype = ready.family.attends(ready.location), DTYPES[ready.config.pipeline.dtype]
    told = run.of_all((pipeline.attention, usable(this_machine(run.device.type), dtype, known)))
    failed = {" and ".join(dict.fromkeys(own for own, _ in told)): ""}
    words, split = to_try(told, ready.config.parallel)
    for word in words:
        gradient.clear()
        unread = Statistics(*stats.names)
        with kernels_put_back(pipeline.denoiser):
            given = _fault(partial(give_kernel, [pipeline.denoiser], word, known, dtype, run.device))
            fault = _of_any(run, given)
            if not fault:
                mine = _fault(partial(descend, gradient, unread))
                if mine and split:
                    raise NotFinite(where, _tried(failed | {word: mine}) + split)
                fault = _of_any(run, mine)
        if not fault and gradient.is_finite(run):
            break
        failed[word] = fault
    else:
        return _tried(failed) + split
    stats.replace_not_finite(unread)
    if run.main:
        print(
            f"flowrl: warning, {where}: the gradient is not finite{_tried(failed)}, and under {word} it is, so this "
            f"update takes that one.{more} If it comes back, set pipeline.attention={word}",
            file=sys.stderr,
            flush=True,
        )
    return ""


def to_try(told: Sequence[tuple[str, Sequence[str]]], parallel: ParallelConfig) -> tuple[list[str], str]:
    """Kernels to try, in order, the same on every process; and words about the others. It leaves out kernels of the
    hub: a run does not download. Those that hold the scores of all tokens come last. Each process has `told` its own
    kernel and those of its machine; `parallel` is the layout of processes."""
    own = {word for word, _ in told}
    words = [word for word in told[0][1] if {word} != own and all(word in here for _, here in told)]
    words = sorted((word for word in words if not word.endswith("_hub")), key=lambda word: word == "math")
    if parallel.shard * parallel.context == 1:
        return words, ""
    split = f"; only native is tried with parallel.shard={parallel.shard} and parallel.context={parallel.context}"
    return [word for word in words if word == "native"], split


def _fault(work: Callable[[], object]) -> str:
    """Any error that work ends with, such as lack of memory or a compiler's: the other processes wait for the answer.
    It passes on the end of another process, which gives its own reason."""
    try:
        work()
    except Exception as error:
        if lost_process(error):
            raise
        return one_line(f"{type(error).__name__}: {error}")
    return ""


def _of_any(run: Run, mine: str) -> str:
    """The fault of the first process that has one; every process calls it."""
    found = run.of_all(mine)
    return next(
        (f"process {rank}: {fault}" if len(found) > 1 else fault for rank, fault in enumerate(found) if fault), ""
    )


def _tried(failed: Mapping[str, str]) -> str:
    """Kernels in words: those whose gradient was not finite, then those that could not run, each with the reason."""
    ran = ", ".join(word for word, fault in failed.items() if not fault)
    faults = (f"; {word} could not run ({fault})" for word, fault in failed.items() if fault)
    return f" under pipeline.attention={ran}{''.join(faults)}"
