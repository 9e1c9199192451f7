"""The pace from which hours are computed: a given one, a bench, or a range for each of some GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.config.train import TrainConfig
from flowrl.runtime.files import read_json

FILE = "bench.json"
"""What `flowrl bench` writes."""
RUNS = Path("runs")
"""Where benches are written unless told otherwise, and looked for."""
PEAKS = {"4090": 165.2, "A100": 312.0, "L40S": 362.1, "H100": 989.4, "H200": 989.4, "B200": 2250.0}
"""GPU -> TFLOP/s of bfloat16 products with float32 sums, dense, by the makers' data sheets (SXM where it exists)."""
SHARES = (0.213, 0.462)
"""Published shares of the peak in training of large transformers: GPT-3's and PaLM's (arXiv 2204.02311, table 3); Llama
3's, 0.38 to 0.43, lies between them (arXiv 2407.21783, table 4)."""
THREAD = 0.1
"""TFLOP/s of one thread of a CPU: products and sums in float32, 8 at once, two a cycle, at 3 GHz."""
SURE_THREADS = 2
"""Threads from which a small network surely gains; the range's upper end counts all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """TFLOP/s from which hours are computed."""

    range: tuple[float, float] | None
    """Lowest and highest expected value; None: the plan then gives hours for some GPUs."""
    told: str
    """Its source, as a sentence."""
    processor: str = "GPU"
    """"GPU" or "CPU"."""


def pace(config: TrainConfig, given: float | None, bench: str | None = None) -> Pace:
    """The given pace (`tflops`), or that of the given bench, perhaps of another machine, or of the newest one here, or
    a usual one. Raises ValueError: the bench cannot be read, measured no pace, or is of another model."""
    processor = "CPU" if config.pipeline.device == "cpu" else "GPU"
    if given is not None:
        told = f"The pace of {given:g} TFLOP/s is what `tflops` says."
        return Pace(range=(given, given), told=told, processor=processor)
    if bench is not None:
        return _of_file(config, Path(bench), processor)
    damaged = list[Path]()
    found = measured_tflops(config, damaged)
    left_out = "".join(f" Left out, since it is damaged: {path}." for path in damaged)
    if found is not None:
        from flowrl.training.processes.devices import device_kind

        (low, median, high), path = found
        told = f"The pace of {median:g} TFLOP/s ({low:g} to {high:g}) was measured on this machine: {path}.{left_out}"
        return Pace(range=(low, high), told=told, processor=device_kind(config.pipeline.device).upper())
    least, most = (f"{100 * share:.0f}" for share in SHARES)
    peak, by, usual = "a GPU's peak", "training of large transformers was published to reach", None
    if processor == "CPU":
        from flowrl.runtime.placement import usable_cores  # which imports torch

        threads = config.threads or usable_cores()
        peak = f"{threads} x {THREAD:g} TFLOP/s, the peak of {threads} thread{'s' * (threads > 1)}"
        by = "two trainings of tiny_recommended reached on two cores"
        usual = (SHARES[0] * THREAD * min(threads, SURE_THREADS), SHARES[1] * THREAD * threads)
    told = f"At {least} to {most} % of {peak}, which {by}; flowrl bench CONFIG measures this model's pace.{left_out}"
    return Pace(range=usual, told=told, processor=processor)


def _of_file(config: TrainConfig, path: Path, processor: str) -> Pace:
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"`bench`: there is no {file}: give the folder of a flowrl bench, or its {FILE}")
    try:
        facts, found = _read(file)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(
            f"`bench`: {file} is damaged, or of another version: measure again with flowrl bench"
        ) from error
    if found is None:
        raise ValueError(f"`bench`: {file} measured no pace: let flowrl bench time the network, or leave `bench` out")
    wanted = _wanted(config)
    if other := {key: facts.get(key) for key in wanted if facts.get(key) != wanted[key]}:
        theirs = ", ".join(f"{key} {value}" for key, value in other.items())
        own = ", ".join(f"{key} {wanted[key]}" for key in other)
        raise ValueError(f"`bench`: {file} was measured with {theirs}, this run has {own}: measure this one")
    low, median, high = found
    where = facts.get("device", "a device that it does not name")
    told = f"The pace of {median:g} TFLOP/s ({low:g} to {high:g}) was measured on {where}: {file}."
    return Pace(range=(low, high), told=told, processor=processor)


def measured_tflops(config: TrainConfig, damaged: list[Path]) -> tuple[tuple[float, float, float], Path] | None:
    """TFLOP/s on the clock of the newest bench of the same model on this machine, and the bench: least, median, most.

    Its dtype, `pipeline.compile` and `threads` must equal those of the run. A bench with fewer blocks (`--layers`) is
    not used, because its pace belongs to no model. Benches lie in folders of `RUNS`; `damaged` gets unreadable files.
    """
    wanted = _wanted(config)
    found = []
    for path in sorted(RUNS.glob(f"*/{FILE}")):
        try:
            facts, measured = _read(path)
        except (ValueError, KeyError, TypeError, OSError):
            damaged.append(path)
            continue
        if measured is not None and {key: facts.get(key) for key in wanted} == wanted:
            found.append((str(facts.get("date")), measured, path, facts))
    if not found:
        return None
    # The facts by which a machine is known again, and the threads of a run on it.
    import torch

    device = config.pipeline.device
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    name = torch.cuda.get_device_name() if on_gpu and torch.cuda.is_available() else "cpu"
    threads = torch.get_num_threads() if config.threads is None else config.threads
    here = {"device": name, "cpu_count": os.cpu_count(), "threads": threads}
    for _, tflops, path, facts in sorted(found, key=lambda one: one[:3], reverse=True):
        if {key: facts.get(key) for key in here} == here:
            return tflops, path
    return None


def _wanted(config: TrainConfig) -> dict[str, Any]:
    """Facts of a bench that has the pace of a run, wherever it was made."""
    settings = config.pipeline
    return {"layers": None, "model": settings.model, "dtype": settings.dtype, "compile": settings.compile}


def _read(path: Path) -> tuple[dict[str, Any], tuple[float, float, float] | None]:
    """Facts of a bench and its TFLOP/s, least, median and most; None where it measured no pace."""
    data = read_json(path)
    facts, measured = data["facts"], data["throughput"]
    tflops = float(measured["tflops"]) if measured else 0.0
    if not isinstance(facts, dict):
        raise TypeError
    if not tflops > 0:
        return facts, None
    name = str(measured.get("tflops_of"))
    walls = [row["wall"] for row in data.get("phases", ()) if row["name"] == name and row.get("wall")]
    median, low, high = (float(walls[0][key]) if walls else 1.0 for key in ("median", "low", "high"))
    if not min(median, low, high) > 0:
        median = low = high = 1.0
    return facts, (_rounded(tflops * (median / high)), _rounded(tflops), _rounded(tflops * (median / low)))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
