"""What this machine offers beyond the minimum: probed without side effects, one line each."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flowrl.runtime.versions import version_of

_OPERATORS = "operators built for torch"
_ATTENTION_PACKAGES = ("xformers", "flash-attn", "flash_attn_3", "kernels")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What kernels need to know of a machine; plain data, so a test can describe any machine."""

    device: str
    """Either "cpu", "cuda" or "mps"."""
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of installed packages with attention kernels."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Why some of those do not work here."""


def this_machine(device: str) -> Machine:
    """This machine, for networks on a kind of device. Imports nothing."""
    packages = {name: version for name in _ATTENTION_PACKAGES if (version := version_of(name)) is not None}
    state = xformers_state()
    faults = {} if "xformers" not in packages or state.startswith(_OPERATORS) else {"xformers": state}
    capability = torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else None
    return Machine(device=device, packages=packages, capability=capability, faults=faults)


def at_least_version(found: str, least: str) -> bool:
    """Whether a version is at least another one, by their numbers."""
    numbers = [tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])) for text in (found, least)]
    return numbers[0] >= numbers[1]


def capabilities() -> dict[str, str]:
    """A line about each optional part; goes into a run's manifest."""
    if torch.cuda.is_available():
        cuda = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        bfloat16 = "in hardware" if torch.cuda.is_bf16_supported() else "emulated"
    else:
        cuda, flags = "not available", Path("/proc/cpuinfo")
        known = flags.exists() and "avx512_bf16" in flags.read_text(encoding="utf-8")
        bfloat16 = "in hardware (avx512_bf16)" if known else "on the CPU, speed unknown"
    lines = {"cuda": cuda, "bfloat16": bfloat16, "xformers": xformers_state()}
    others = (name for name in _ATTENTION_PACKAGES if name not in lines)
    return lines | {name: version_of(name) or "not installed" for name in others}


def xformers_state(folder: Path | None = None) -> str:
    """Whether xformers' compiled operators fit the installed torch, by the record of its build in `folder` (None: the
    installed package's): built for another torch, its import prints a page of warnings and loads no operators."""
    if folder is None:
        spec = importlib.util.find_spec("xformers")
        if spec is None or spec.origin is None:
            return "not installed"
        folder = Path(spec.origin).parent
    try:
        built = json.loads((folder / "cpp_lib.json").read_text(encoding="utf-8"))["version"]["torch"]
    except (OSError, ValueError, KeyError, TypeError):
        return "installed without compiled operators"
    here = torch.__version__
    if str(built).split("+")[0].split(".")[:2] != here.split("+")[0].split(".")[:2]:
        return f"installed, but built for torch {built} while {here} runs: no operators"
    return f"{_OPERATORS} {built}"
