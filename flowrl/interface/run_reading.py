"""From what commands found, and from run folders, to the objects for Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowrl.commands.compare.run import Compared
from flowrl.commands.sample.run import Drawn
from flowrl.comparing.comparison_result import read_results
from flowrl.interface.call_results import (
    Change,
    MethodComparison,
    MethodScore,
    Samples,
    TrainedRun,
    columns,
)
from flowrl.media.images import to_pixels
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


def samples_of(made: Drawn, folder: Path | None) -> Samples:
    """What was drawn, as PIL images."""
    sheet = made.sheet if isinstance(made.sheet, Image.Image) else _image(made.sheet)
    return Samples(
        prompts=tuple(prompt.text for prompt, _ in made.pairs), seeds=tuple(seed for _, seed in made.pairs),
        images=() if made.fps else tuple(map(_image, made.images)),
        videos=tuple(tuple(map(_image, video)) for video in made.images) if made.fps else (),
        fps=made.fps, grid=sheet, folder=folder,
    )  # fmt: skip


def comparison_of(made: Compared, folder: Path) -> MethodComparison:
    """A comparison, read from its folder.

    Raises:
        ValueError: no run has finished.
    """
    found = read_results(folder, made.question, **made.view)
    methods = tuple(
        MethodScore(
            name=row.name, score=row.score.interval, seed_scores=row.seed_scores,
            difference=UNKNOWN if row.difference is None else row.difference.interval, p=row.holm,
            spent=dict(row.spent),
        )
        for row in found.methods
    )  # fmt: skip
    return MethodComparison(
        metric=found.metric, baseline=found.baseline, methods=methods, missing=dict(found.missing),
        notes=found.notes, folder=folder,
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


def _image(pixels: Any) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(to_pixels(pixels)))
