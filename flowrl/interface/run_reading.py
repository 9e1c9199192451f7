"""From what commands found, and from run folders, to the objects for Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowrl.commands.compare.run import Compared
from flowrl.commands.eval.run import Evaluated
from flowrl.commands.sample.run import Drawn
from flowrl.comparing.comparison_result import read_results
from flowrl.generation.folders import is_folder_of_images, read_folder
from flowrl.interface.call_results import (
    Evaluation,
    MethodComparison,
    MethodScore,
    Samples,
)
from flowrl.media.images import to_pixels
from flowrl.statistics.bootstrap import UNKNOWN


def samples_of(made: Drawn, folder: Path | None) -> Samples:
    """What was drawn, as PIL images."""
    sheet = made.sheet if isinstance(made.sheet, Image.Image) else _image(made.sheet)
    return Samples(
        prompts=tuple(prompt.text for prompt, _ in made.pairs), seeds=tuple(seed for _, seed in made.pairs),
        images=() if made.fps else tuple(map(_image, made.images)),
        videos=tuple(tuple(map(_image, video)) for video in made.images) if made.fps else (),
        fps=made.fps, grid=sheet, folder=folder,
    )  # fmt: skip


def evaluation_of(found: Evaluated, benchmark: str) -> Evaluation:
    """What a benchmark found."""
    whole, subject = found.whole, found.plans[0].subject
    folder = subject.images or subject.folder / "images"
    files = len(found.plans) == 1 and is_folder_of_images(folder)
    return Evaluation(
        benchmark=benchmark, headline=whole.headline, metrics=dict(whole.metrics), scores=dict(whole.intervals),
        differences=dict(whole.differences), claim=whole.claim, notes=whole.notes, rows=whole.rows, folder=found.out,
        files=tuple(image.path for image in read_folder(folder)) if files else (),
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


def _image(pixels: Any) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(to_pixels(pixels)))
