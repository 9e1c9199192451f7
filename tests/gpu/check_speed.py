"""Speed, as figures: products, the network's passes, stages of an iteration, operations of a block.

Only what says that something else is wrong is a fault: a Hopper card below a quarter of what it can.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from gpu_networks import release, subject_of
from gpu_place import Figures, Place
from torch.profiler import ProfilerActivity, profile

from flowrl.pipelines.arithmetic.compiling import repeated_blocks
from flowrl.profiling.iterations import iteration
from flowrl.profiling.network import network, with_backward
from flowrl.profiling.result import WHOLE, Phase
from flowrl.profiling.stopwatch import Operations, Stopwatch, storages
from flowrl.profiling.subject import BenchSubject

HOPPER = (9, 0)
LEAST_TFLOPS = 150
"""Of forward and backward of SD3.5-Medium on Hopper; 250 to 360 are foretold."""


def watch_of(place: Place, seconds: float, found: BenchSubject | None = None) -> Stopwatch:
    """A stopwatch for so long."""
    weights = frozenset[int]() if found is None else storages(found.pipeline.denoiser.parameters())
    return Stopwatch(
        device=place.device,
        repeats=place.pick(5, 1),
        warm_ups=place.pick(3, 1),
        weights=weights,
        deadline=time.monotonic() + seconds,
    )


def note(figures: Figures, phase: Phase) -> float:
    """Notes a phase's seconds and TFLOP/s; the latter."""
    assert phase.seconds is not None, f"{phase.name}: {phase.note}"
    pace = phase.flops / phase.seconds.median / 1e12
    figures |= {f"{phase.name}: ms": 1e3 * phase.seconds.median, f"{phase.name}: TFLOP/s": pace}
    if phase.peak_bytes is not None:
        figures[f"{phase.name}: peak GiB"] = phase.peak_bytes / 2**30
    if phase.operations is not None:
        figures[f"{phase.name}: operations"] = phase.operations
    return pace


@pytest.fixture(scope="module")
def sd3(place: Place) -> Iterator[BenchSubject]:
    """SD3.5-Medium of all layers at 512 px on a card, tiny-sd3 in the CPU form."""
    small = ("prompts_per_step=2", "group_size=4", "micro_batch_size=4")
    sizes = place.pick(("micro_batch_size=12", "rollout_batch_size=12"), small)
    yield subject_of(place, "sd3", *sizes, layers=None)
    release(place)


def check_ceilings(place: Place, figures: Figures) -> None:
    """A large product in bfloat16 and float32, and a copy: what all else is held against."""
    watch, size = watch_of(place, 20), place.pick(8192, 256)
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(size, size, device=place.device).to(dtype)
        phase = watch.phase(
            "ceilings", f"product in {dtype}", partial(torch.matmul, a, a), flops=2.0 * size**3, ceiling=""
        )
        assert note(figures, phase) > 0
    big = torch.ones(place.pick(2**30, 2**20), dtype=torch.bfloat16, device=place.device)
    copied = watch.phase("ceilings", "copy", big.clone)
    assert copied.seconds is not None
    figures["copy: GB/s"] = 4e-9 * big.numel() / copied.seconds.median


@pytest.mark.seconds(60)
def check_network(place: Place, figures: Figures, sd3: BenchSubject) -> None:
    """Forward as in a rollout, forward and backward as in an update, with and without checkpointing."""
    paces = {phase.name: note(figures, phase) for phase in network(sd3, watch_of(place, 50, sd3))}
    assert paces["forward"] > 0
    assert "forward and backward" in paces
    if place.on_card and torch.cuda.get_device_capability(place.device) == HOPPER:
        assert paces["forward and backward"] > LEAST_TFLOPS


@pytest.mark.seconds(120)
def check_iteration(place: Place, figures: Figures, sd3: BenchSubject) -> None:
    """Whole iterations by the recipe, the first left out, with the seconds of their stages."""
    watch = watch_of(place, place.pick(100.0, 15.0), sd3)
    found = {phase.name: phase for phase in iteration(sd3, watch, place.pick(2e14, None))}
    whole = found[WHOLE]
    assert whole.seconds is not None, whole.note
    for name, phase in found.items():
        if phase.seconds is not None:
            figures[f"{name}: s"] = phase.seconds.median
    figures |= {"images": whole.items, "ratio_first_deviation": whole.ratio_first_deviation}
    figures["peak GiB"] = None if whole.peak_bytes is None else whole.peak_bytes / 2**30
    assert whole.items > 0
    assert (whole.ratio_first_deviation or 0.0) < 0.1


def check_operations(place: Place, figures: Figures, sd3: BenchSubject) -> None:
    """Operations of a block, forward and with backward; kernels too on a card."""
    blocks = sum(len(repeated_blocks(part)) for part in sd3.denoisers)
    call = sd3.evaluation(2)
    both = with_backward(sd3, call)
    both()
    with Operations() as forward, torch.no_grad():
        call()
    with Operations() as whole:
        both()
    figures |= {"blocks": blocks, "forward": forward.number / blocks, "both ways": whole.number / blocks}
    assert whole.number > 2 * forward.number > 0
    if not place.on_card:
        return
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        both()
        place.wait()
    kernels = [event for event in seen.events() if str(event.device_type).endswith("CUDA")]
    figures["kernels, both ways"] = len(kernels) / blocks
