"""What this machine offers beyond the minimum, probed without side effects and said in one line each."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch


def capabilities() -> dict[str, str]:
    """A line about each optional part; goes into a run's manifest."""
    return {"cuda": _cuda(), "bfloat16": _bfloat16(), "xformers": xformers_state()}


def xformers_state(folder: Path | None = None) -> str:
    """Whether xformers' compiled operators fit the installed torch.

    Importing xformers beside a torch that it was not built for prints a page of warnings and loads no operators, so
    this reads the record of its build instead.

    Args:
        folder: of the package; None looks for the installed one.
    """
    if folder is None:
        spec = importlib.util.find_spec("xformers")
        if spec is None or spec.origin is None:
            return "not installed; torch's own attention is used"
        folder = Path(spec.origin).parent
    try:
        built = json.loads((folder / "cpp_lib.json").read_text(encoding="utf-8"))["version"]["torch"]
    except (OSError, ValueError, KeyError, TypeError):
        return "installed without compiled operators; torch's own attention is used"
    here = torch.__version__
    if str(built).split("+")[0].split(".")[:2] != here.split("+")[0].split(".")[:2]:
        return f"installed, but built for torch {built} while {here} runs: no operators; torch's own attention is used"
    return f"operators built for torch {built}"


def _cuda() -> str:
    if not torch.cuda.is_available():
        return "not available"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def _bfloat16() -> str:
    if torch.cuda.is_available():
        return "in hardware" if torch.cuda.is_bf16_supported() else "emulated"
    flags = Path("/proc/cpuinfo")
    known = flags.exists() and "avx512_bf16" in flags.read_text(encoding="utf-8")
    return "in hardware (avx512_bf16)" if known else "on the CPU, speed unknown"
