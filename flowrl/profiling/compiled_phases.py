"""The network with its blocks compiled, and what compiling itself takes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from flowrl.pipelines.arithmetic.compiling import check_compile, compile_blocks
from flowrl.profiling.bench_result import WRONG, Phase, Spread
from flowrl.profiling.bench_subject import Subject
from flowrl.profiling.network_phases import both_ways, forward_facts, with_backward
from flowrl.profiling.stopwatch import Stopwatch


def compiled(subject: Subject, watch: Stopwatch, *, backend: str = "inductor") -> Iterator[Phase]:
    """Forward and backward under `pipeline.compile: blocks`: the last section, since what is compiled stays so.

    Where an evaluation without gradient and one with it differ, no ratio would start at 1: that is said instead.
    """
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
    spent = Spread.of([time.process_time() - used if subject.device.type == "cpu" else time.perf_counter() - begun])
    told = "paid once: compiling, and the first calls; on a CPU in seconds of all its threads"
    yield Phase(
        section="compile", name="first calls", seconds=spent, wall=Spread.of([time.perf_counter() - begun]), repeats=1,
        note=told,
    )  # fmt: skip
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
