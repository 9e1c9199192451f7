"""From what commands found, and from run folders, to the objects for Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowrl.interface.call_results import (
    Change,
    TrainedRun,
    columns,
)
from flowrl.runs.run_data import read_run
from flowrl.runtime.files import read_json
from flowrl.statistics.bootstrap import UNKNOWN, Interval, point


def run_result(folder: Path, *, finished: bool | None = None) -> TrainedRun:
    """A run folder; `finished` where that is known better than by the folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no run.
    """
    run = read_run(folder)
    report, lora = folder / "report.html", folder / "lora"
    return TrainedRun(
        folder=folder, finished=run.finished if finished is None else finished, config=run.config,
        metrics=columns(run.train), evaluations=columns(run.evaluations), scores=dict(_changes(folder)),
        warnings={kind: tuple(iteration for iteration, _ in said) for kind, said in run.warnings.items()},
        report=report if report.is_file() else None, lora=lora if lora.is_dir() else None,
        shots=tuple((pair.prompt, pair.before, pair.after) for pair in run.pairs),
    )  # fmt: skip


def _changes(folder: Path) -> Iterable[tuple[str, Change]]:
    """The scores of `summary.json`: GenEval's has intervals at both ends, rewards have numbers."""
    path = folder / "summary.json"
    summary: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    if "before" in summary:
        yield "geneval", _change(summary)
    for name, entry in summary.get("rewards", {}).items():
        yield name, _change(entry)


def _change(entry: Mapping[str, Any]) -> Change:
    before, after, change = (_interval(entry[key]) for key in ("before", "after", "change"))
    return Change(before=before.mean, after=after.mean, change=change)


def _interval(value: Any) -> Interval:
    if isinstance(value, Mapping):
        return Interval(**{key: float("nan") if value[key] is None else value[key] for key in ("mean", "low", "high")})
    return UNKNOWN if value is None else point(float(value))
