"""What the functions for Python return: frozen, numbers as numbers, images as PIL images that are read late."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.media.reading import read_rgb
from flowrl.rendering.markup import bounds, number, signed
from flowrl.rendering.notebook import heading, images_row, rows_table, scores_table
from flowrl.statistics.bootstrap import UNKNOWN, Interval


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """Images that were drawn, prompt by prompt and seed by seed.

    Attributes:
        prompts: of each image.
        seeds: of the start noise of each image.
        images: one PIL image each; empty of videos.
        videos: the frames of each video as PIL images; empty of images.
        fps: frames per second of videos, 0 of images.
        grid: all of them with captions.
        folder: where files were written; None where none were.
    """

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    images: tuple[Image.Image, ...] = field(repr=False)
    videos: tuple[tuple[Image.Image, ...], ...] = field(repr=False)
    fps: float
    grid: Image.Image = field(repr=False)
    folder: Path | None

    def _repr_html_(self) -> str:
        shown = self.images or tuple(frames[0] for frames in self.videos)
        said = [f"{words} ({seed})" for words, seed in zip(self.prompts, self.seeds, strict=True)]
        return heading(f"{len(shown)} {'videos, their first frames' if self.videos else 'images'}") + images_row(
            shown, said
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evaluation:
    """What a benchmark found.

    Attributes:
        benchmark: its name.
        headline: the result in a sentence or two.
        metrics: `eval/<benchmark>/<metric>` -> number; over several models their mean.
        scores: the main ones with 95 % intervals.
        differences: to the baseline, paired by prompts; empty without one.
        claim: what the intervals speak of.
        notes: without which the numbers mislead.
        rows: one mapping per image, with its prompt and verdict; empty over several models.
        folder: with `page.html`, `result.json` and the images.
    """

    benchmark: str
    headline: str
    metrics: Mapping[str, float]
    scores: Mapping[str, Interval]
    differences: Mapping[str, Interval]
    claim: str
    notes: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...] = field(repr=False)
    folder: Path
    files: tuple[Path, ...] = field(repr=False)
    """Images of the model that were judged, in their order; empty of videos and over several models."""

    @property
    def images(self) -> list[Image.Image]:
        """The images of the model that were judged."""
        return [read_rgb(path) for path in self.files]

    def _repr_html_(self) -> str:
        notes = rows_table(("note",), [(note,) for note in self.notes])
        first = self.files[:8]
        return (
            heading(self.headline, f"page: {self.folder / 'page.html'}")
            + scores_table(self.scores, self.differences)
            + notes
            + images_row([read_rgb(path) for path in first], [path.parent.parent.name for path in first])
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodScore:
    """One method of a comparison.

    Attributes:
        name: of its configuration.
        score: at the end, over seeds and prompts.
        seed_scores: of each seed.
        difference: to the baseline; unknown of the baseline itself.
        p: of the difference over seeds, after Holm's correction; NaN where it cannot be tested.
        spent: mean "nfe", "images", "seconds" and "iterations".
    """

    name: str
    score: Interval
    seed_scores: tuple[float, ...]
    difference: Interval = UNKNOWN
    p: float = math.nan
    spent: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MethodComparison:
    """Methods at one budget, from the highest score to the lowest.

    Attributes:
        metric: that was compared.
        baseline: what differences are taken to.
        methods: those with a finished run.
        missing: runs without a result -> why.
        notes: what the numbers leave out.
        folder: with `compare.html`, `compare.md`, `results.json` and the run folders.
    """

    metric: str
    baseline: str
    methods: tuple[MethodScore, ...]
    missing: Mapping[str, str]
    notes: tuple[str, ...]
    folder: Path

    def _repr_html_(self) -> str:
        rows = [
            (row.name, number(row.score.mean), bounds(row.score), signed(row.difference.mean),
             bounds(row.difference, sign=True), number(row.p))
            for row in self.methods
        ]  # fmt: skip
        missing = rows_table(("no result", "why"), list(self.missing.items()))
        return (
            heading(f"{self.metric}, differences to {self.baseline}", f"page: {self.folder / 'compare.html'}")
            + rows_table(("", "score", "95 %", "difference", "95 %", "p"), rows)
            + missing
        )
