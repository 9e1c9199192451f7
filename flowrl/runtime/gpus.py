"""What driver and torch report about this machine's NVIDIA GPUs, and why torch computes on none of them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from flowrl.runtime.versions import numbers

LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> the oldest driver whose branch runs its builds (NVIDIA, "CUDA Compatibility", the table of
minor version compatibility)."""
_INSTALL = "install the build of torch for your driver's CUDA: https://pytorch.org/get-started"
_SECONDS = 20  # a driver that hangs does not answer at all


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """What driver and torch report about GPUs."""

    driver: str | None = None
    """Version from nvidia-smi, else from the kernel; None without a driver."""
    named: tuple[str, ...] = ()
    """GPUs that it lists."""
    complaint: str = ""
    """Error of nvidia-smi, if it failed."""
    torch: str = torch.__version__
    """Its version."""
    build: str | None = None
    """CUDA that torch was built for; None for a CPU build."""
    names: tuple[str, ...] = ()
    """GPUs that torch sees."""
    capabilities: tuple[tuple[int, int], ...] = ()
    """Their compute capabilities."""
    compiled: tuple[str, ...] = ()
    """Architectures that torch has kernels for, such as "sm_90"."""
    refused: str = ""
    """Torch's error if it sees no GPU, or if a product on one failed."""


def gpu_facts() -> GpuFacts:
    """Asks nvidia-smi and torch, and computes a small product on each GPU."""
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
        return loaded_driver()
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", loaded_driver()[1], f"nvidia-smi did not answer ({type(error).__name__})"
    if done.returncode:
        return "", loaded_driver()[1], " ".join((done.stdout + done.stderr).split())[:200]
    rows = [line.partition(",") for line in done.stdout.splitlines() if line.strip()]
    return (rows[0][0].strip() if rows else ""), tuple(row[2].strip() for row in rows), ""


def loaded_driver(folder: Path = Path("/proc/driver/nvidia")) -> tuple[str | None, tuple[str, ...], str]:
    """The driver's version from the kernel, if nvidia-smi fails or is missing, as in small images."""
    try:
        found = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", (folder / "version").read_text(encoding="utf-8"))
        cards = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("gpus/*/information"))]
    except OSError:
        return None, (), ""
    named = [match[1].strip() for card in cards if (match := re.search(r"^Model:(.*)$", card, re.MULTILINE))]
    return (None if found is None else found[1]), tuple(named), ""


def driver_fault(facts: GpuFacts) -> tuple[str, str] | None:
    """Why torch computes on no GPU although there is a driver, and what to do; else None."""
    if facts.driver is None and not facts.names:
        return None
    if facts.complaint:
        return f"nvidia-smi fails: {facts.complaint}", (
            "restart the machine where the driver was updated (its module and its libraries differ until then), "
            "else install the driver again; in a container, start it with --gpus all"
        )
    if facts.driver is not None and not re.fullmatch(r"\d+(\.\d+){1,2}", facts.driver):
        return f"nvidia-smi gives {facts.driver!r} as the driver's version, which is not one", (
            "install NVIDIA's driver again, and see that the first nvidia-smi in PATH is the driver's own"
        )
    if facts.build is None:
        seen = f"{facts.named[0]} is here" if facts.named else "a driver is here"
        return f"{seen}, but torch {facts.torch} is built without CUDA: runs would be on the CPU", _INSTALL
    least = LEAST_DRIVER.get(int(facts.build.partition(".")[0]))
    if facts.driver and least is not None and numbers(facts.driver)[0] < least:
        needs = f"torch {facts.torch} is built for CUDA {facts.build}, which needs {least} or newer"
        return f"driver {facts.driver} is too old: {needs}", f"update the driver to {least} or newer, or {_INSTALL}"
    if not facts.names:
        why = f": {facts.refused}" if facts.refused else ""
        return f"driver {facts.driver} lists {', '.join(facts.named) or 'no GPU'}, but torch sees none{why}", (
            "look at CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all"
        )
    return None
