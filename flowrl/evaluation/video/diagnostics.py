"""The temporal diagnostics of a subject's clips, kept in its journal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from flowrl.benchmarks.temporal import CELL, LEAST_STEP, NAMES, STILL, diagnose
from flowrl.generation.folders import ImageFile
from flowrl.generation.subject import Subject
from flowrl.media.lossless import read_clip
from flowrl.runtime.files import plain
from flowrl.runtime.journal import Journal
from flowrl.runtime.progress import progress
from flowrl.runtime.shapes import Float64

VERSION = f"temporal-1:cell-{CELL}:still-{STILL:.5f}:least-{LEAST_STEP:g}"
READ_AS = (
    "flicker, freeze and teleport are in [0, 1], less is better; change is how much pixels change from frame to frame. "
    "They know nothing of the prompt."
)


Faults = Mapping[str, Float64[np.ndarray, " n"]]
"""Each diagnostic of every clip."""


def diagnose_clips(subject: Subject, clips: Sequence[ImageFile]) -> Faults:
    """Computes `flowrl.benchmarks.temporal.NAMES` for every clip; NaN if its file cannot be read or is too short."""
    columns: dict[str, list[float]] = {name: [] for name in NAMES}
    with (
        Journal(subject.folder, {"benchmark": "temporal", "version": VERSION}) as journal,
        progress(f"diagnosing {subject.label}", len(clips)) as advance,
    ):
        for clip in clips:
            if clip.stamp not in journal.rows:
                with suppress(ValueError):  # of a file that cannot be read; the next run tries again
                    journal.add(clip.stamp, plain(diagnose(read_clip(clip.path))))
            row = journal.rows.get(clip.stamp, {})
            for name in NAMES:
                columns[name].append(math.nan if row.get(name) is None else row[name])
            advance("")
    return {name: np.array(values, dtype=np.float64) for name, values in columns.items()}
