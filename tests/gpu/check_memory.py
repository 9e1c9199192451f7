"""Bytes on the card against what `flowrl plan` foretells; nothing grows from iteration to iteration."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_networks import PUBLISHED as PUBLISHED_CONFIGS
from gpu_networks import release, subject_of
from gpu_place import Figures, Place
from gpu_runs import train
from torch import Tensor, nn

from flowrl.config.base import named_config
from flowrl.config.train import load_config, location_of
from flowrl.planning.memory import base_bytes
from flowrl.planning.network import Trained, few_blocks, measure
from flowrl.profiling.network import with_backward
from flowrl.profiling.stopwatch import Stopwatch, storages
from flowrl.profiling.subject import BenchSubject
from flowrl.recipes import grpo
from flowrl.runtime.placement import Resting
from flowrl.training.parts import family_options, model_family

GIB = 2**30
TINY = "tiny_grpo_geneval"
PUBLISHED = {
    "sd3": ("micro_batch_size=2",),
    "wan": ("micro_batch_size=1",),
    "flux": ("micro_batch_size=1", "pipeline.quantize=nf4"),
    "qwen": ("micro_batch_size=1",),
}
"""A family in short -> how its published dimensions are held against the plan, with all layers."""
SHARE = (0.85, 1.06)
"""What is measured over what is foretold, at least and at most: more than foretold is what runs out of memory."""
RESTORED = 2
"""Bytes of the largest matrix while a product restores it from 4 bits, as the plan has it."""


@pytest.mark.seconds(75)
@pytest.mark.parametrize("family", list(PUBLISHED))
def check_plan(place: Place, figures: Figures, tmp_path: Any, family: str) -> None:
    """Weights and the peak of a forward and backward pass against the plan's; saved bytes, counted, in the CPU form."""
    if not place.on_card and family in ("flux", "qwen"):
        on_meta(figures, family)
        return
    if place.on_card and family in ("flux", "qwen") and torch.cuda.mem_get_info()[0] < 60 * GIB:
        pytest.skip("all layers of it take 30 to 50 GiB, and this card has less free")
    found = subject_of(place, family, *place.pick(PUBLISHED[family], ()), layers=None, folder=tmp_path)
    network = found.network
    assert network is not None
    rows = found.geometry.micro_batch_size if place.on_card else 2
    form, width = found.config.pipeline.quantize, torch.finfo(place.dtype).bits // 8
    held = sum(x.nbytes for part in found.denoisers for x in frozen_of(part))
    figures |= {"weights GiB": held / GIB, "foretold weights GiB": base_bytes(network.weights, form, width) / GIB}
    checkpointed = found.config.pipeline.gradient_checkpointing
    saved = network.saved_checkpointed if checkpointed else network.saved
    if place.on_card:
        restored = RESTORED * max(a * b for a, b in network.weights.matrices) if form == "nf4" else 0
        foretold, measured = rows * (saved + network.beside) + restored, peak_of(place, found, rows)
    else:
        foretold, measured = rows * saved, counted(found, rows)
    figures |= {"rows": rows, "GiB": measured / GIB, "foretold GiB": foretold / GIB, "share": measured / foretold}
    assert held == pytest.approx(base_bytes(network.weights, form, width), rel=0.03)
    assert SHARE[0] < measured / foretold < SHARE[1]
    del found
    release(place)


def on_meta(figures: Figures, family: str) -> None:
    """Twelve and twenty thousand million weights do not fit here: what the plan counts of them on the meta device."""
    path, _ = named_config(PUBLISHED_CONFIGS[family])
    config = load_config(path, PUBLISHED[family])
    known, model = model_family(config.pipeline), location_of(config.pipeline)
    denoiser, few = known.meta_denoiser(model), few_blocks(known, model, known.lora_targets)
    assert denoiser is not None
    assert few is not None
    size, options = known.planned_size(model, family_options(config.pipeline)), family_options(config.pipeline)
    trained = Trained(targets=known.lora_targets, rank=32)
    call = known.meta_call(model, size, known.text_tokens(model, options))
    network = measure(few, call, trained=trained, dtype=torch.bfloat16)
    held = 2 * sum(weight.numel() for weight in denoiser.parameters())
    figures |= {"form": "meta device", "weights GiB": held / GIB, "saved GiB a row": network.saved / GIB}
    figures |= {"checkpointed GiB a row": network.saved_checkpointed / GIB}
    assert held == base_bytes(network.weights, "none", 2)
    assert 0 < network.saved_checkpointed < network.saved
    assert base_bytes(network.weights, "nf4", 2) < 0.35 * held


def frozen_of(network: nn.Module) -> list[Tensor]:
    """Weights of the base and the codes that stand for them, without the LoRA and without tables of positions."""
    codes = {name for name, _ in network.named_buffers() if "codes" in name or "scale" in name or "quantiles" in name}
    named = [*network.named_parameters(), *((n, b) for n, b in network.named_buffers() if n in codes)]
    return [tensor for name, tensor in named if "lora_" not in name]


def peak_of(place: Place, found: BenchSubject, rows: int) -> int:
    """Most bytes at once of a forward and backward pass beside what was there."""
    call = with_backward(found, found.evaluation(rows))
    call()  # workspaces of libraries, which stay
    place.wait()
    place.free()
    before = place.allocated()
    call()
    place.wait()
    return torch.cuda.max_memory_allocated(place.device) - before


def counted(found: BenchSubject, rows: int) -> int:
    """Bytes that autograd saves for the backward pass, of distinct storages."""
    watch = Stopwatch(
        device=found.device,
        repeats=1,
        warm_ups=1,
        deadline=time.monotonic() + 60,
        weights=storages(found.pipeline.denoiser.parameters()),
    )
    phase = watch.phase("memory", "saved", with_backward(found, found.evaluation(rows)))
    return phase.saved_bytes or 0


# ---- whole runs ------------------------------------------------------------------------------------------------------


def live(place: Place) -> int:
    """Bytes of tensors: by the allocator of a card, by the garbage collector's list on a CPU."""
    gc.collect()
    if place.on_card:
        return place.allocated()
    found = dict[int, int]()
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu" and thing.layout == torch.strided:
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(found.values())


@contextmanager
def at_updates(look: Callable[[Any], None]) -> Iterator[None]:
    """Inside, runs of recipe grpo show their record at the beginning of each iteration's update."""
    update = grpo.update

    def looked(record: Any, *args: Any) -> None:
        look(record)
        update(record, *args)

    with mock.patch.object(grpo, "update", looked):
        yield


def check_record(place: Place, figures: Figures, tmp_path: Any) -> None:
    """The rollout's record has the states of the trained steps and of no other, once."""
    sizes = list[tuple[int, int, str]]()

    def look(record: Any) -> None:
        states, steps = record.sampled.states, int(record.sampled.step.unique().numel())
        images = len(record.sampled.finished)
        sizes.append((states.nbytes, images * (steps + 1) * states[0].numel() * 4, str(states.device)))

    with at_updates(look):
        train(place, tmp_path / "run", TINY, "sampler.sde_window_range=[2, 5]")
    figures |= {"bytes": sizes[-1][0], "states of trained steps": sizes[-1][1], "on": sizes[-1][2]}
    assert len(sizes) == 2
    assert all(size == wanted for size, wanted, _ in sizes)


@pytest.mark.seconds(40)
def check_steady(place: Place, figures: Figures, tmp_path: Any) -> None:
    """From the second iteration on an update begins with as many bytes as the one before."""
    seen = list[int]()
    gc.collect()
    gc.freeze()  # what was there before cannot grow, and looking through it takes as long as the run
    try:
        with at_updates(lambda _: seen.append(live(place))):
            rows = train(place, tmp_path / "run", TINY, "num_iterations=4", "checkpoint_every=9", "group_size=2")
    finally:
        gc.unfreeze()
    figures |= {f"MiB at update {number}": size / 2**20 for number, size in enumerate(seen)}
    peaks = [row["memory/peak_gib"] for row in rows if "memory/peak_gib" in row]
    figures |= {"peak GiB, first and last": f"{peaks[0]} {peaks[-1]}"} if peaks else {}
    assert len(seen) == 4
    assert seen[3] <= 1.02 * seen[2]
    assert not peaks or peaks[-1] <= 1.05 * peaks[1]


def check_reserved(place: Place, figures: Figures, tmp_path: Any) -> None:
    """What the allocator holds beside tensors stays below 1.5 GiB."""
    place.needs_card("blocks that its allocator caches")
    release(place)
    rows = train(place, tmp_path / "run", TINY, "num_iterations=3")
    reserved, peak = (f(place.device) for f in (torch.cuda.max_memory_reserved, torch.cuda.max_memory_allocated))
    figures |= {"reserved GiB": reserved / GIB, "allocated GiB": peak / GIB}
    figures["logged GiB"] = rows[-1].get("memory/reserved_gib")
    assert reserved - peak < 1.5 * GIB


def check_rest(place: Place, figures: Figures) -> None:
    """A network that rests on the host leaves no byte on the device, and comes back with its bits; the meta device
    stands for a card in the CPU form."""
    network = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 64)).requires_grad_(False)
    kept = {name: value.clone() for name, value in network.state_dict().items()}
    there = place.pick(place.device, torch.device("meta"))
    resting = Resting([network], there)
    release(place)
    before = place.allocated()
    for _ in range(3):
        with resting.awake():
            devices = {x.device.type for x in (*network.parameters(), *network.buffers())}
            assert devices == {there.type}
            network.eval()(torch.zeros(4, 512, device=there))
        place.wait()
    figures |= {"bytes before": before, "bytes after": place.allocated()}
    assert place.allocated() == before
    assert all(torch.equal(value, kept[name]) for name, value in network.state_dict().items())
    assert {x.device.type for x in network.parameters()} == {"cpu"}


def check_out_of_memory(place: Place, figures: Figures, tmp_path: Any) -> None:
    """A run without enough memory ends with one paragraph that names the setting to lower; its error is pretended in
    the CPU form."""
    if place.on_card:
        release(place)
        whole = torch.cuda.get_device_properties(place.device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(place.device) + 96 * 2**20) / whole)
        try:
            sizes = ("group_size=256", "micro_batch_size=256", "prompts_per_step=1")
            [ended] = train(place, tmp_path / "run", TINY, *sizes, code=1)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free")
        with mock.patch.object(grpo, "descend", side_effect=error):
            [ended] = train(place, tmp_path / "run", TINY, code=1)
    figures["told"] = told = " ".join(ended["error"].split())[-400:]
    assert "memory" in told
    assert "batch_size" in told
    assert "Traceback" not in ended["error"]
