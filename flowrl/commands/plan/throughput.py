"""The pace of this machine, from the newest bench of a configuration's model on it. Nothing heavy is imported here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.commands.plan.arguments import DEFAULT_TFLOPS
from flowrl.config.train import TrainConfig
from flowrl.files import read_json

FILE = "bench.json"
"""What `flowrl bench` writes."""
RUNS = Path("runs")
"""Where benches are written unless told otherwise, and looked for."""


def pace(config: TrainConfig, given: float | None) -> tuple[float, str]:
    """TFLOP/s by which hours are estimated, and where they are from: what was given, else measured here, else assumed.

    Args:
        config: of the run that is planned.
        given: by `--tflops`; None where it was not.
    """
    if given is not None:
        return given, f"The pace of {given:g} TFLOP/s is what --tflops says."
    if (found := measured_tflops(config)) is not None:
        return found[0], f"The pace of {found[0]:g} TFLOP/s was measured on this machine:\n{found[1]}"
    return DEFAULT_TFLOPS, (f"The pace of {DEFAULT_TFLOPS:g} TFLOP/s is assumed: flowrl bench CONFIG measures it.")


def measured_tflops(config: TrainConfig, folder: Path = RUNS) -> tuple[float, Path] | None:
    """TFLOP/s on the clock of the newest bench of the same model and dtype on this machine, and the bench.

    A bench of fewer blocks (`--layers`) has the pace of no model, so it is not taken.

    Args:
        config: of the run that is planned.
        folder: whose folders hold benches.
    """
    found = [
        (str(facts["date"]), float(tflops), path)
        for path, facts, tflops in _benches(folder)
        if facts.get("layers") is None
        and (facts.get("model"), facts.get("dtype")) == (config.pipeline.model, config.pipeline.dtype)
    ]
    if not found:
        return None
    here = _machine(config.pipeline.device)
    for _, tflops, path in sorted(found, reverse=True):
        facts = read_json(path)["facts"]
        if {key: facts.get(key) for key in here} == here:
            return float(f"{tflops:.3g}"), path
    return None


def _benches(folder: Path) -> Iterator[tuple[Path, dict[str, Any], float]]:
    """Path, facts and TFLOP/s of the benches that lie in a folder's folders."""
    for path in folder.glob(f"*/{FILE}"):
        data = read_json(path, "remove it, or measure again with flowrl bench")
        if isinstance(data, dict) and "tflops" in data.get("throughput", {}) and "date" in data.get("facts", {}):
            yield path, data["facts"], data["throughput"]["tflops"]


def _machine(device: str) -> dict[str, Any]:
    """The facts by which a machine is known again."""
    import torch

    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    name = torch.cuda.get_device_name() if on_gpu and torch.cuda.is_available() else "cpu"
    return {"device": name, "cpu_count": os.cpu_count()}
