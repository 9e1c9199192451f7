"""Golden runs: the numbers of short training runs, recorded in `tests/golden/` and compared with those of today's code.

A record holds, for one case, the machine it was made on, every numeric column of `metrics.jsonl` but the times, the
first update, tensor by tensor, and a digest of the LoRA at the end with the norms of its tensors.

Where the machine is of the recorded kind, everything has to be equal, bit for bit. Another processor or another version
of a library adds up in another order. What comes before the first update then differs by rounding alone: rewards, the
first loss, the first gradient. Adam turns each entry of that gradient into a step of full length, whatever its size, so
that entries that rounding made step in one of two directions; iterations multiply that, up to 1 % of a norm. So on
another machine

- what is known before the first update, and its gradient, is compared within `RELATIVE`, which is a bound on rounding;
- the first update is compared by its product with the gradient, to which entries near zero add nothing;
- of what comes later, the keys have to be the same, and the numbers that follow from the settings alone.

    FLOWRL_GOLDEN=write python -m pytest tests/test_golden_toy.py tests/test_golden_embedded.py

writes the records again, with `-k NAME` those of some cases. `FLOWRL_GOLDEN=exact` compares bit for bit on any machine:
records of AVX2 are met to the last bit on processors with AVX-512 too, by `ATEN_CPU_CAPABILITY=avx2
ONEDNN_MAX_CPU_ISA=AVX2`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from rounding import rounding
from tiny_runs import lora_tensors, metrics
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
DEPTH = 100_000
"""Roundings from start noise to a gradient: four to ten steps, each forty products of 64 to 512 terms, and back."""
RELATIVE = rounding(torch.float32, DEPTH)
ABSOLUTE = rounding(torch.float32, 64)  # a mean of up to 64 numbers near one that cancel
BEFORE_UPDATE = re.compile(
    "reward|diversity|advantage|images|invalid_ratio|iteration|last_step|live_rows|lr$|nfe/|num_|optimality|pairs|"
    "loser_reward|winner_reward|trained_calls|zero_std_ratio|old_decay|sampling_decay|eval/"
)
"""Keys of a row that are known before its update; the others are means over all updates of the iteration."""
BY_SETTINGS = re.compile(r"iteration$|images$|num_images$|lr$|nfe/|old_decay|sampling_decay")
"""Keys of later rows that rounding cannot reach."""
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
    """One thread and deterministic algorithms, whatever a test before this one has left; the first update is kept.

    Shapes are not checked meanwhile: other tests do that, and it is half of the time of a toy run.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    jaxtyping.config.update("jaxtyping_disable", True)
    _UPDATES.clear()
    hooks = [register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        jaxtyping.config.update("jaxtyping_disable", False)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


# ---- what is recorded ------------------------------------------------------------------------------------------------

_UPDATES: dict[str, Any] = {}
"""Of the run that is at work: how many updates it took, and the gradient, weights and record of the first."""


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _UPDATES["count"] = _UPDATES.get("count", 0) + 1
    if _UPDATES["count"] == 1:
        _UPDATES["weights"] = [weight.detach().double().clone() for weight in _trained(optimizer)]


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _UPDATES["count"] == 1:
        pairs = list(zip(_UPDATES.pop("weights"), _trained(optimizer), strict=True))
        _UPDATES["first"] = first_update(
            [(weight.grad.double(), weight.detach().double() - old) for old, weight in pairs if weight.grad is not None]
        )


def first_update(pairs: Sequence[tuple[Tensor, Tensor]]) -> Row:
    """Numbers of an update, from gradient and step of each tensor: the sum of the gradient's absolute entries and of
    its entries with fixed signs, tensor by tensor, and the sum of products of gradient and step.

    The last is continuous in the gradient, although Adam's step is not: an entry near zero steps either way, and adds
    next to nothing.
    """
    row: Row = {"tensors": len(pairs), "gradient times step": float(sum((grad * step).sum() for grad, step in pairs))}
    for number, (grad, _) in enumerate(pairs):
        signs = 1.0 - 2.0 * (torch.arange(grad.numel()) * 0.6180339887498949 % 1 < 0.5).double()
        row |= {f"size {number}": float(grad.abs().sum()), f"signed {number}": float(grad.flatten() @ signs)}
    return row


def record_of(run: Path) -> Record:
    """The record of a finished run."""
    rows = [
        {key: value for key, value in row.items() if value is None or isinstance(value, int | float)}
        for row in metrics(run)
    ]
    for row in rows:  # where batches of rollout and update differ, it is the rounding of one processor
        if (row.get("ratio_first_deviation") or 1.0) < 1e-6:
            row["ratio_first_deviation"] = 0.0
    first = {"updates": _UPDATES["count"], **_UPDATES["first"]}
    return {"machine": machine(), "rows": rows, "first": first, "lora": summary_of(lora_tensors(run))}


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
    first, lora = (
        ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record[part].items())
        for part in ("first", "lora")
    )
    return (
        f'{{\n "machine": {json.dumps(record["machine"])},\n "rows": [\n{rows}\n ],\n'
        f' "first": {{\n{first}\n }},\n "lora": {{\n{lora}\n }}\n}}\n'
    )


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
    exact = recorded["machine"] == found["machine"] or os.environ.get("FLOWRL_GOLDEN") == "exact"
    wrong = list(differences_of(recorded, found, exact=exact))
    if not wrong:
        return
    how = "bit for bit" if exact else f"up to the first update, within {RELATIVE:.1e}, on another machine"
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
    training = [row for row in before if not _is_evaluation(row)]
    several = recorded["first"]["updates"] > len([row for row in training if "grad_norm" in row])
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        kind = " (evaluation)" if _is_evaluation(old) else ""
        compared: re.Pattern[str] | None = None  # every key
        if not exact and old["iteration"] > 0:
            compared = BY_SETTINGS
        elif not exact and several:
            compared = BEFORE_UPDATE
        where = f"row {number}, iteration {old['iteration']}{kind}"
        yield from _differences(where, old, new, exact=exact, compared=compared)
    yield from _differences_of_first(recorded["first"], found["first"], exact=exact)
    compared = None if exact else re.compile("$")
    yield from _differences("LoRA", recorded["lora"], found["lora"], exact=exact, compared=compared)


def _is_evaluation(row: Row) -> bool:
    return any(key.startswith("eval/") for key in row)


def _differences_of_first(old: Row, new: Row, *, exact: bool) -> Iterator[str]:
    """Sums with signs are compared by the size of their terms, since these cancel."""
    where = "first update"
    if exact or old.keys() != new.keys():
        yield from _differences(where, old, new, exact=exact)
        return
    for key, value in old.items():
        kind, _, number = key.partition(" ")
        scale = old[f"size {number}"] if kind == "signed" else abs(value)
        if abs(value - new[key]) > RELATIVE * scale:
            yield f"{where}, key '{key}': recorded {value!r}, found {new[key]!r}"


def _differences(
    where: str, old: Row, new: Row, *, exact: bool, compared: re.Pattern[str] | None = None
) -> Iterator[str]:
    """Keys have to be the same; the values of those that `compared` matches too, of all where it is None."""
    for key in [*old, *(key for key in new if key not in old)]:
        if key not in new or key not in old:
            values = f"recorded {old[key]!r}, not found" if key in old else f"not recorded, found {new[key]!r}"
            yield f"{where}, key '{key}': {values}"
        elif (compared is None or compared.match(key)) and not _same(old[key], new[key], exact=exact):
            yield f"{where}, key '{key}': recorded {old[key]!r}, found {new[key]!r}"


def _same(old: Any, new: Any, *, exact: bool) -> bool:
    if exact or not (isinstance(old, float) and isinstance(new, float)):
        return json.dumps(old) == json.dumps(new)  # tells 0.0 from -0.0, and 1 from 1.0
    return abs(old - new) <= ABSOLUTE + RELATIVE * abs(old)


def leftovers(group: str, names: Sequence[str]) -> list[str]:
    """Records of a group that belong to no case."""
    return sorted(path.name for path in (GOLDEN / group).iterdir() if path.stem not in names or path.suffix != ".json")
