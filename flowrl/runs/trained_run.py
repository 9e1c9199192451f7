"""A run folder in numbers and images, as `flowrl.train` and `flowrl.read_run` return it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.media.reading import read_rgb
from flowrl.rendering.markup import bounds, number, plural, signed
from flowrl.rendering.notebook import curve, heading, images_row, rows_table
from flowrl.runs.run_data import read_run as read_data
from flowrl.runtime.files import read_json
from flowrl.runtime.public import public
from flowrl.statistics.bootstrap import UNKNOWN, Interval, point

Columns = Mapping[str, tuple[float, ...]]
"""Name of a metric -> its value in each row; all have the same length, and NaN marks a missing value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A score before and after training, with the interval of the paired difference over prompts."""

    before: float
    after: float
    change: Interval


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedRun:
    """A run folder in numbers and images.

    Attributes:
        folder: the run folder.
        finished: whether the run has finished; `resume` continues one that has not.
        config: every setting of the run.
        metrics: columns of the iterations, "iteration" among them; `flowrl.runs.metric_names` explains the others.
        evaluations: columns of the evaluations, in the same form.
        scores: "geneval" and each reward before and after training, if the finished run has both evaluations.
        warnings: kind -> iterations at which the run warned of it.
        report: the page; None if none was written.
        lora: folder for stock diffusers; None if the run trains all weights, or has saved nothing yet.
        summary: the outcome of a training, as `flowrl train` prints it; empty if the run was only read.
    """

    folder: Path
    finished: bool
    config: Mapping[str, Any]
    metrics: Columns = field(default_factory=dict)
    evaluations: Columns = field(default_factory=dict)
    scores: Mapping[str, Change] = field(default_factory=dict)
    warnings: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    report: Path | None = None
    lora: Path | None = None
    summary: str = field(default="", repr=False)
    shots: tuple[tuple[str, Path, Path | None], ...] = field(default=(), repr=False)
    """Prompt, file at the first sampling, file at the last one."""

    def __repr__(self) -> str:
        scores = {name: f"{one.before:.4g} -> {one.after:.4g}" for name, one in self.scores.items()}
        done = len(self.metrics.get("iteration", ()))
        return f"TrainedRun(folder={str(self.folder)!r}, finished={self.finished}, iterations={done}, scores={scores})"

    @property
    def images(self) -> list[tuple[str, Image.Image, Image.Image | None]]:
        """(prompt, image before training, image after it from the same noise) of samples; of videos rows of frames."""
        return [(words, read_rgb(first), None if last is None else read_rgb(last)) for words, first, last in self.shots]

    def _repr_html_(self) -> str:
        ended = "finished" if self.finished else "stopped before its end"
        rows = [
            (name, number(row.before), number(row.after), signed(row.change.mean), bounds(row.change, sign=True))
            for name, row in self.scores.items()
        ]
        shown = [part for words, first, last in self.images for part in ((first, f"{words}, before"), (last, "after"))]
        pairs = [(image, words) for image, words in shown if image is not None][:8]
        title = f"{self.folder.name}: {ended} after {plural(len(self.metrics.get('iteration', ())), 'iteration')}"
        return (
            heading(title, f"report: {self.report}" if self.report else "")
            + curve("reward", self.metrics.get("reward", ()))
            + rows_table(("", "before", "after", "change", "95 %"), rows)
            + images_row([image for image, _ in pairs], [words for _, words in pairs])
        )


@public
def read_run(folder: str | Path) -> TrainedRun:
    """Reads a run folder, finished, stopped or still training. Raises FlowrlError: no such folder, or no run."""
    return run_in(Path(folder))


def run_in(folder: Path, *, finished: bool | None = None, summary: str = "") -> TrainedRun:
    """Reads a run folder; `finished` overrides what the folder says.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no run.
    """
    run = read_data(folder)
    report, lora, path = folder / "report.html", folder / "lora", folder / "summary.json"
    summed: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    scores = dict[str, Change]()  # GenEval's has intervals at both ends, rewards have numbers
    entries = {"geneval": summed} if "before" in summed else {}
    for name, entry in (entries | dict(summed.get("rewards", {}))).items():
        before, after, change = (_interval(entry[key]) for key in ("before", "after", "change"))
        scores[name] = Change(before=before.mean, after=after.mean, change=change)
    return TrainedRun(
        folder=folder,
        finished=run.finished if finished is None else finished,
        config=run.config,
        metrics=columns(run.train),
        evaluations=columns(run.evaluations),
        scores=scores,
        warnings={kind: tuple(iteration for iteration, _ in said) for kind, said in run.warnings.items()},
        report=report if report.is_file() else None,
        lora=lora if lora.is_dir() else None,
        summary=summary,
        shots=tuple((pair.prompt, pair.before, pair.after) for pair in run.pairs),
    )


def columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Rows as columns of numbers; other values become NaN, and a column without any number is left out.

    >>> columns([{"iteration": 0, "reward": 0.5}, {"iteration": 1, "reward": None, "kl": 0.1}])
    {'iteration': (0, 1), 'reward': (0.5, nan), 'kl': (nan, 0.1)}
    """
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if _is_number(value))
    return {key: tuple(row[key] if _is_number(row.get(key)) else math.nan for row in rows) for key in keys}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _interval(value: Any) -> Interval:
    if isinstance(value, Mapping):
        return Interval(**{key: math.nan if value[key] is None else value[key] for key in ("mean", "low", "high")})
    return UNKNOWN if value is None else point(float(value))
