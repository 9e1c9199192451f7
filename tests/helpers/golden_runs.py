"""Golden runs: the numbers of short training runs, recorded in `tests/golden/` and compared with those of today's code.

A record holds, for one case, the machine it was made on, every numeric column of `metrics.jsonl` but the times, and the
LoRA at the end: a digest of all its bytes, and sums and norms that can be compared with a tolerance.

Where the machine is of the recorded kind, everything has to be equal, bit for bit. Elsewhere another processor or
another version of a library adds up in another order: float32 differs by 1e-7, Adam's first steps turn a small gradient
into a step of full length whatever its size, and iterations multiply that. `RELATIVE` and `ABSOLUTE` leave room for it
and still show a wrong formula: between AVX-512 and no vector instructions at all (`ATEN_CPU_CAPABILITY=default`) the
largest difference took up an eighth of that room. Whole numbers (counts of rows, images, network evaluations) are equal
everywhere.

    FLOWRL_GOLDEN=write python -m pytest tests/test_golden_toy.py tests/test_golden_embedded.py

writes the records again, with `-k NAME` those of some cases.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from tiny_runs import lora_tensors, metrics
from torch import Tensor

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RELATIVE, ABSOLUTE = 1e-2, 1e-5  # gradients through sampling differ by 0.7 % between CPUs with AVX-512 and AVX2
LIBRARIES = ("numpy", "scipy", "diffusers", "transformers", "peft")
SHOWN = 12
"""Differences that a message lists."""

Row = dict[str, Any]
Record = dict[str, Any]


@cache
def machine() -> dict[str, str]:
    """What decides how numbers are rounded; names of virtual processors are vague, so family and model are added."""
    about = {
        "machine": platform.machine(), "processor": _processor(), "threads": "1",
        "capability": str(torch.backends.cpu.get_cpu_capability()), "torch": str(torch.__version__),
    }  # fmt: skip
    return about | {name: metadata.version(name) for name in LIBRARIES}


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    pairs = (line.partition(":")[::2] for line in path.read_text().split("\n\n")[0].splitlines())
    about = {key.strip(): value.strip() for key, value in pairs}
    known = [about[key] for key in ("model name", "cpu family", "model") if key in about]
    return ", ".join(known) or platform.processor()


@contextmanager
def reproducible() -> Iterator[None]:
    """One thread and deterministic algorithms, whatever a test before this one has left.

    Shapes are not checked meanwhile: other tests do that, and it is half of the time of a toy run.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


# ---- what is recorded ------------------------------------------------------------------------------------------------


def record_of(run: Path) -> Record:
    """The record of a finished run."""
    rows = [
        {key: value for key, value in row.items() if value is None or isinstance(value, int | float)}
        for row in metrics(run)
    ]
    return {"machine": machine(), "rows": rows, "lora": summary_of(lora_tensors(run))}


def summary_of(tensors: Mapping[str, Tensor]) -> Row:
    """Digest over names, types, shapes and bytes; `sum`, `sum of squares` and the norm of each tensor in float64."""
    digest, norms, total, squares = hashlib.sha256(), dict[str, float](), 0.0, 0.0
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
        exact = tensor.double()
        total, squares = total + float(exact.sum()), squares + float(exact.square().sum())
        norms[f"norm {name}"] = float(exact.norm())
    return {"sha256": digest.hexdigest(), "sum": total, "sum of squares": squares, **norms}


def text_of(record: Record) -> str:
    """JSON with a line for each row and for each number of the LoRA."""
    rows = ",\n".join(f"  {json.dumps(_ordered(row))}" for row in record["rows"])
    lora = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record["lora"].items())
    return f'{{\n "machine": {json.dumps(record["machine"])},\n "rows": [\n{rows}\n ],\n "lora": {{\n{lora}\n }}\n}}\n'


def _ordered(row: Row) -> Row:
    return {key: row[key] for key in sorted(row, key=lambda key: (key != "iteration", key))}


# ---- comparison ------------------------------------------------------------------------------------------------------


def compare(group: str, name: str, run: Path) -> None:
    """Compares a run with the record `golden/GROUP/NAME.json`, or writes it where `FLOWRL_GOLDEN` is `write`."""
    path, found = GOLDEN / group / f"{name}.json", record_of(run)
    if os.environ.get("FLOWRL_GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(found), encoding="utf-8")
        return
    if not path.exists():
        pytest.fail(
            f"case '{name}' has no record {group}/{name}.json: write it with FLOWRL_GOLDEN=write", pytrace=False
        )
    recorded: Record = json.loads(path.read_text(encoding="utf-8"))
    exact = recorded["machine"] == found["machine"]
    wrong = list(differences_of(recorded, found, exact=exact))
    if not wrong:
        return
    how = "bit for bit" if exact else f"within {RELATIVE:g} relative and {ABSOLUTE:g} absolute, on another machine"
    other = [] if exact else [f"  recorded on {recorded['machine']}", f"  found on    {found['machine']}"]
    more = [f"  and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
    lines = [
        f"case '{name}' ({group}/{name}.json) gives other numbers than recorded, compared {how}:",
        *(f"  {line}" for line in wrong[:SHOWN]), *more, *other,
        "A refactoring leaves these numbers alone. If they are meant to change, write them with FLOWRL_GOLDEN=write, "
        "and say in the commit why.",
    ]  # fmt: skip
    pytest.fail("\n".join(lines), pytrace=False)


def differences_of(recorded: Record, found: Record, *, exact: bool) -> Iterator[str]:
    """A line for every number that differs, is missing or is new."""
    before, now = recorded["rows"], found["rows"]
    if len(before) != len(now):
        yield f"{len(before)} rows recorded, {len(now)} found"
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        kind = " (evaluation)" if any(key.startswith("eval/") for key in old) else ""
        yield from _differences(f"row {number}, iteration {old['iteration']}{kind}", old, new, exact=exact)
    ignored = () if exact else ("sha256",)
    yield from _differences("LoRA", recorded["lora"], found["lora"], exact=exact, ignored=ignored)


def _differences(where: str, old: Row, new: Row, *, exact: bool, ignored: Sequence[str] = ()) -> Iterator[str]:
    for key in [*old, *(key for key in new if key not in old)]:
        if key not in new or key not in old:
            values = f"recorded {old[key]!r}, not found" if key in old else f"not recorded, found {new[key]!r}"
            yield f"{where}, key '{key}': {values}"
        elif key not in ignored and not _same(old[key], new[key], exact=exact):
            yield f"{where}, key '{key}': recorded {old[key]!r}, found {new[key]!r}"


def _same(old: Any, new: Any, *, exact: bool) -> bool:
    if exact or not (isinstance(old, float) and isinstance(new, float)):
        return json.dumps(old) == json.dumps(new)  # tells 0.0 from -0.0, and 1 from 1.0
    return abs(old - new) <= ABSOLUTE + RELATIVE * abs(old)


def leftovers(group: str, names: Sequence[str]) -> list[str]:
    """Records of a group that belong to no case."""
    return sorted(path.name for path in (GOLDEN / group).iterdir() if path.stem not in names or path.suffix != ".json")
