"""What the functions for Python return: frozen, numbers as numbers, images as PIL images that are read late."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.media.reading import read_rgb
from flowrl.rendering.markup import bounds, code, number, signed
from flowrl.rendering.notebook import curve, heading, images_row, rows_table
from flowrl.statistics.bootstrap import Interval

Columns = Mapping[str, tuple[float, ...]]
"""Name of a metric -> its value at each row; all are as long, NaN stands where a row has none."""


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
        folder: of the run.
        finished: whether it came to its end; False where it was stopped, which `resume` continues.
        config: every setting of the run.
        metrics: columns of the iterations, "iteration" among them (docs/research/methods.md names the others).
        evaluations: columns of the evaluations, likewise.
        scores: of a finished run that was evaluated before and after: "geneval" and each reward.
        warnings: kind -> iterations at which the run warned of it.
        report: the page; None where it was not written.
        lora: folder for stock diffusers; None where all weights were trained, or nothing is saved yet.
    """

    folder: Path
    finished: bool
    config: Mapping[str, Any]
    metrics: Columns
    evaluations: Columns
    scores: Mapping[str, Change]
    warnings: Mapping[str, tuple[int, ...]]
    report: Path | None
    lora: Path | None
    shots: tuple[tuple[str, Path, Path | None], ...] = field(repr=False)
    """Prompt, file at the first sampling, file at the last one."""

    def __repr__(self) -> str:
        scores = {name: f"{one.before:.4g} -> {one.after:.4g}" for name, one in self.scores.items()}
        done = len(self.metrics.get("iteration", ()))
        return f"TrainedRun(folder={str(self.folder)!r}, finished={self.finished}, iterations={done}, scores={scores})"

    @property
    def images(self) -> list[tuple[str, Image.Image, Image.Image | None]]:
        """(prompt, image before training, the same noise after it) of the run's samples; of videos rows of frames."""
        return [(words, read_rgb(first), None if last is None else read_rgb(last)) for words, first, last in self.shots]

    def _repr_html_(self) -> str:
        ended = "finished" if self.finished else "stopped before its end"
        rows = [
            (name, number(row.before), number(row.after), signed(row.change.mean), bounds(row.change, sign=True))
            for name, row in self.scores.items()
        ]
        shown = [part for words, first, last in self.images for part in ((first, f"{words}, before"), (last, "after"))]
        pairs = [(image, words) for image, words in shown if image is not None][:8]
        return (
            heading(f"{self.folder.name}: {ended} after {len(self.metrics.get('iteration', ()))} iterations",
                    f"report: {self.report}" if self.report else "")
            + curve("reward", self.metrics.get("reward", ()))
            + rows_table(("", "before", "after", "change", "95 %"), rows)
            + images_row([image for image, _ in pairs], [words for _, words in pairs])
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunPlan:
    """What a run will do and need; estimates from counted tensors and operations, not measurements.

    Attributes:
        name: of the configuration.
        text: the whole plan, as `flowrl plan` prints it.
        verdict: whether it fits a card, and with which settings.
        peak_bytes: memory of a process at most; None where the model's dimensions are not known.
        flops: of the whole run, evaluations included; None likewise.
        iterations: of the run.
        missing: what has to be put in place before the run starts.
    """

    name: str
    text: str = field(repr=False)
    verdict: str
    peak_bytes: int | None
    flops: float | None
    iterations: int
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return heading(self.name, self.verdict) + code(self.text)


def columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Rows as columns of numbers; what is no number becomes NaN, and a column without any is left out.

    >>> columns([{"iteration": 0, "reward": 0.5}, {"iteration": 1, "reward": None, "kl": 0.1}])
    {'iteration': (0, 1), 'reward': (0.5, nan), 'kl': (nan, 0.1)}
    """
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if _is_number(value))
    return {key: tuple(row[key] if _is_number(row.get(key)) else math.nan for row in rows) for key in keys}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
