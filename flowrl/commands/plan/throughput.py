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


def pace(config: TrainConfig, given: float | None) -> tuple[float, str, bool]:
    """TFLOP/s by which hours are estimated, and where they are from: what was given, else measured here, else assumed;
    and whether they were measured.

    Args:
        config: of the run that is planned.
        given: by `--tflops`; None where it was not.
    """
    if given is not None:
        return given, f"The pace of {given:g} TFLOP/s is what --tflops says.", False
    damaged = list[Path]()
    found = measured_tflops(config, damaged)
    left_out = "".join(f" Left out, since it is damaged: {path}." for path in damaged)
    if found is not None:
        return found[0], f"The pace of {found[0]:g} TFLOP/s was measured on this machine: {found[1]}.{left_out}", True
    told = f"The pace of {DEFAULT_TFLOPS:g} TFLOP/s is assumed: flowrl bench CONFIG measures it."
    return DEFAULT_TFLOPS, told + left_out, False


def measured_tflops(config: TrainConfig, damaged: list[Path], folder: Path = RUNS) -> tuple[float, Path] | None:
    """TFLOP/s on the clock of the newest bench of the same model on this machine, and the bench.

    Its dtype, `pipeline.compile` and `threads` have to be those of the run too. A bench of fewer blocks (`--layers`)
    has the pace of no model, so it is not taken.

    Args:
        config: of the run that is planned.
        damaged: gets the files that cannot be read.
        folder: whose folders hold benches.
    """
    wanted = {
        "layers": None, "model": config.pipeline.model, "dtype": config.pipeline.dtype,
        "compile": config.pipeline.compile,
    }  # fmt: skip
    found = [
        (str(facts.get("date")), tflops, path, facts)
        for path, facts, tflops in _benches(folder, damaged)
        if {key: facts.get(key) for key in wanted} == wanted
    ]
    if not found:
        return None
    here = _machine(config)
    for _, tflops, path, facts in sorted(found, key=lambda one: one[:3], reverse=True):
        if {key: facts.get(key) for key in here} == here:
            return float(f"{tflops:.3g}"), path
    return None


def _benches(folder: Path, damaged: list[Path]) -> Iterator[tuple[Path, dict[str, Any], float]]:
    """Path, facts and TFLOP/s of the benches that lie in a folder's folders, but for those that measured no pace."""
    for path in sorted(folder.glob(f"*/{FILE}")):
        try:
            data = read_json(path)
            facts, measured = data["facts"], data["throughput"]
            tflops = float(measured["tflops"]) if measured else 0.0
            if not isinstance(facts, dict):
                raise TypeError
        except (ValueError, KeyError, TypeError, OSError):
            damaged.append(path)
        else:
            if tflops > 0:
                yield path, facts, tflops


def _machine(config: TrainConfig) -> dict[str, Any]:
    """The facts by which a machine is known again, and the threads of a run on it."""
    import torch

    device = config.pipeline.device
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    name = torch.cuda.get_device_name() if on_gpu and torch.cuda.is_available() else "cpu"
    threads = torch.get_num_threads() if config.threads is None else config.threads
    return {"device": name, "cpu_count": os.cpu_count(), "threads": threads}
