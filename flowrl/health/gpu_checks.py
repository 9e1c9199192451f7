"""Driver, CUDA and torch's kernels: what follows from the facts about them, as pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from flowrl.health.diagnosis import Check
from flowrl.pipelines.arithmetic.attention_words import Known, choose, usable
from flowrl.runtime.capabilities import this_machine
from flowrl.runtime.gpus import GpuFacts, driver_fault
from flowrl.training.processes.devices import device_kind


def driver_check(facts: GpuFacts) -> Check:
    """Whether the driver is one, answers, and is new enough for torch's CUDA."""
    if facts.driver is None and not facts.names:
        return Check("driver", "note", "no NVIDIA driver here: runs use the CPU, enough for the embedded models")
    if (fault := driver_fault(facts)) is not None:
        return Check("driver", "fault", *fault)
    shown = f"{facts.driver or 'unknown'}, for torch's CUDA {facts.build}; {len(facts.names)} x {facts.names[0]}"
    return Check("driver", "ok", shown)


def kernel_check(facts: GpuFacts) -> Check:
    """Whether torch was compiled for each GPU, and computes on it."""
    name = "kernels"
    if not facts.names:
        return Check(name, "ok", "torch's CPU kernels")
    for gpu, capability in zip(facts.names, facts.capabilities, strict=True):
        if facts.compiled and not has_kernels(capability, facts.compiled):
            own = ".".join(map(str, capability))
            return Check(
                name,
                "fault",
                f"torch {facts.torch} has no kernels for {gpu} (compute capability {own}): it was built for "
                f"{', '.join(facts.compiled)}",
                f"install a build of torch that lists sm_{capability[0]}{capability[1]}, usually the one for the "
                "newest CUDA: https://pytorch.org/get-started",
            )
    if facts.refused:
        return Check(
            name,
            "fault",
            f"a product of two small matrices failed on the GPU: {facts.refused}",
            "see with nvidia-smi whether another process holds the GPU or its memory, then restart the machine",
        )
    shown = ", ".join(sorted({".".join(map(str, capability)) for capability in facts.capabilities}))
    return Check(name, "ok", f"torch has kernels for compute capability {shown}, and they answer")


def has_kernels(capability: tuple[int, int], compiled: Sequence[str]) -> bool:
    """Whether code for an architecture runs on a GPU: binaries of its major version up to its minor one, or PTX of any
    older one, which the driver compiles."""
    for word in compiled:
        if (found := re.match(r"(sm|compute)_(\d+)(\d)", word)) is None:
            continue
        of = int(found[2]), int(found[3])
        if (found[1] == "compute" and of <= capability) or (of[0] == capability[0] and of[1] <= capability[1]):
            return True
    return False


def attention_check() -> Check:
    """Which kernels of attention this machine has, in the precision that GPUs train in."""
    kind = device_kind("auto")
    machine, dtype = this_machine(kind), torch.float32 if kind == "cpu" else torch.bfloat16
    words = usable(machine, dtype, Known())
    auto = choose("auto", machine, dtype, Known())
    faults = "; ".join(f"{package} is {why}" for package, why in machine.faults.items())
    return Check(
        "attention",
        "ok",
        f"pipeline.attention=auto is {auto}; usable: {', '.join(words)}{f' ({faults})' if faults else ''}",
    )
