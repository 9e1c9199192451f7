"""Driver, CUDA and torch's kernels: facts that are read once, and what follows from them, as pure functions."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowrl.health.diagnosis import Check
from flowrl.pipelines.arithmetic.attention_words import Known, choose, usable
from flowrl.runtime.capabilities import this_machine
from flowrl.runtime.versions import numbers
from flowrl.training.processes.devices import device_kind

LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> the oldest driver whose branch runs its builds (NVIDIA, "CUDA Compatibility", the table of
minor version compatibility)."""
_INSTALL = "install the build of torch for your driver's CUDA: https://pytorch.org/get-started"
_SECONDS = 20  # a driver that hangs does not answer at all


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """What driver and torch say of GPUs.

    Attributes:
        driver: version as nvidia-smi gives it; None where there is no nvidia-smi.
        named: GPUs that nvidia-smi lists.
        complaint: of nvidia-smi, where it failed.
        torch: its version.
        build: CUDA that torch was built for; None for a CPU build.
        names: GPUs that torch sees.
        capabilities: their compute capabilities.
        compiled: architectures that torch has kernels for, such as "sm_90".
        refused: what torch says where it sees no GPU, or where a product on one failed.
    """

    driver: str | None = None
    named: tuple[str, ...] = ()
    complaint: str = ""
    torch: str = torch.__version__
    build: str | None = None
    names: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()
    compiled: tuple[str, ...] = ()
    refused: str = ""


def gpu_facts() -> GpuFacts:
    """Asks nvidia-smi and torch; on each GPU a small product is computed."""
    driver, named, complaint = _ask_driver()
    count = torch.cuda.device_count()
    refused = ""
    try:
        for number in range(count):
            float((torch.ones(8, 8, device=f"cuda:{number}") @ torch.ones(8, 8, device=f"cuda:{number}")).sum())
        if torch.version.cuda is not None and not count and named:
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        refused = str(error).partition("\n")[0]
    return GpuFacts(
        driver=driver,
        named=named,
        complaint=complaint,
        build=torch.version.cuda,
        names=tuple(torch.cuda.get_device_name(number) for number in range(count)),
        capabilities=tuple(torch.cuda.get_device_capability(number) for number in range(count)),
        compiled=tuple(torch.cuda.get_arch_list()),
        refused=refused,
    )


def _ask_driver() -> tuple[str | None, tuple[str, ...], str]:
    command = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except FileNotFoundError:
        return None, (), ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", (), f"nvidia-smi did not answer ({type(error).__name__})"
    if done.returncode:
        return "", (), " ".join((done.stdout + done.stderr).split())[:200]
    rows = [line.partition(",") for line in done.stdout.splitlines() if line.strip()]
    return (rows[0][0].strip() if rows else ""), tuple(row[2].strip() for row in rows), ""


def driver_check(facts: GpuFacts) -> Check:
    """Whether the driver is one, answers, and is new enough for torch's CUDA."""
    name = "driver"
    if facts.driver is None and not facts.names:
        return Check(name, "note", "no NVIDIA driver here: runs are on the CPU, as the embedded models are")
    if facts.complaint:
        return Check(
            name,
            "fault",
            f"nvidia-smi fails: {facts.complaint}",
            "restart the machine where the driver was updated (its module and its libraries differ until then), "
            "else install the driver again; in a container, start it with --gpus all",
        )
    if facts.driver is not None and not re.fullmatch(r"\d+(\.\d+){1,2}", facts.driver):
        return Check(
            name,
            "fault",
            f"nvidia-smi gives {facts.driver!r} as the driver's version, which is none",
            "install NVIDIA's driver again, and see that the first nvidia-smi in PATH is the driver's own",
        )
    if facts.build is None:
        seen = f"{facts.named[0]} is here" if facts.named else "a driver is here"
        return Check(
            name, "fault", f"{seen}, but torch {facts.torch} is built without CUDA: runs would be on the CPU", _INSTALL
        )
    least = LEAST_DRIVER.get(int(facts.build.partition(".")[0]))
    if facts.driver and least is not None and numbers(facts.driver)[0] < least:
        return Check(
            name,
            "fault",
            f"driver {facts.driver} is too old: torch {facts.torch} is built for CUDA {facts.build}, which needs "
            f"{least} or newer",
            f"update the driver to {least} or newer, or {_INSTALL}",
        )
    if not facts.names:
        return Check(
            name,
            "fault",
            f"driver {facts.driver} lists {', '.join(facts.named) or 'no GPU'}, but "
            f"torch sees none{f': {facts.refused}' if facts.refused else ''}",
            "look at CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all",
        )
    return Check(
        name,
        "ok",
        f"{facts.driver or 'unknown'}, for torch's CUDA {facts.build}; {len(facts.names)} x {facts.names[0]}",
    )


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
