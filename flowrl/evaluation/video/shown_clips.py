"""A subject's clips: their temporal diagnostics, and those on an evaluation's page, the first and the worst ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from flowrl.benchmarks.temporal import CELL, LEAST_STEP, NAMES, STILL, diagnose
from flowrl.generation.folders import ImageFile
from flowrl.generation.subject import Subject
from flowrl.media.images import save_png
from flowrl.media.lossless import read_clip, read_rate
from flowrl.media.videos import contact_row, save_mp4
from flowrl.rendering.embedded_images import clip_addresses, image_element
from flowrl.rendering.markup import esc, number, section
from flowrl.runtime.files import plain, write_atomically
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


FIRST = 6
WORST = ("flicker", "freeze", "teleport")
FPS = 8.0  # of clips whose files do not say
ROW = 1600


Shot = tuple[str, Path, Path]
"""A clip of a subject for the page: its label, the file that is played, and the row of its frames."""
Column = Float64[np.ndarray, " n"]


def clips_section(
    subjects: Sequence[Subject],
    clips: Sequence[Sequence[ImageFile]],
    values: Sequence[Mapping[str, Column]],
    home: Path,
) -> str:
    """The part of the page, with the base's clip of a prompt and sample below the subject's; NaN is a failure."""
    # The first sample of the first prompts, then the worst clip of each diagnostic.
    chosen = [("", place) for place, clip in enumerate(clips[0]) if clip.sample == 0][:FIRST]
    for name in WORST:
        column = np.nan_to_num(values[0][name], nan=0.0)
        if len(column) and column.max() > 0:
            chosen.append((f"largest {name}", int(column.argmax())))
    shown = [[_shot(subject, of[place]) for subject, of in zip(subjects, clips, strict=True)] for _, place in chosen]
    films = [shot[1] for shots in shown for shot in shots if shot is not None]
    address = clip_addresses(list(dict.fromkeys(films)), home)
    rows = zip(chosen, shown, strict=True)
    body = "".join(_figure(why, clips[0][place], place, shots, address, values) for (why, place), shots in rows)
    linked = any(not where.startswith("data:") for where in address.values())
    lead = (
        f"The first {FIRST} prompts in order, not picked, then the clips of {esc(subjects[0].label)} with the largest "
        f"{', '.join(WORST[:-1])} and {WORST[-1]} above 0. Beside each clip are frames spread evenly over it."
    )
    more = " The clips are files in shown/: keep this page where it is." if linked else ""
    return section("clips", "Clips to look at", body and f'<div class="pairs clips">{body}</div>', lead + more)


def _shot(subject: Subject, clip: ImageFile) -> Shot | None:
    """Writes the file that the page plays, if it is missing; None if the clip cannot be read."""
    name = f"{clip.index:05d}_{clip.sample:05d}"
    place, row = subject.folder / "shown" / f"{name}.mp4", subject.folder / "shown" / f"{name}.png"
    try:
        mark = place.with_suffix(".txt")
        if not (place.is_file() and row.is_file() and mark.is_file() and mark.read_text("utf-8") == clip.stamp):
            video = read_clip(clip.path)
            save_png(contact_row(video), row)
            save_mp4(video, place, read_rate(clip.path) or FPS)
            write_atomically(mark, clip.stamp)
    except ValueError:
        return None
    return subject.label, place, row


def _figure(
    why: str,
    clip: ImageFile,
    place: int,
    shots: Sequence[Shot | None],
    address: Mapping[Path, str],
    values: Sequence[Mapping[str, Column]],
) -> str:
    elements = ""
    for shot, part in zip(shots, values, strict=True):
        if shot is not None:
            label, film, row = shot
            said = ", ".join(f"{name} {number(float(of[place]))}" for name, of in part.items() if "." not in name)
            elements += (
                f'<div class="shot"><span>{esc(label)}: {esc(said)}</span>'
                f'<video src="{esc(address[film])}" muted loop autoplay playsinline controls '
                f'aria-label="{esc(label)}: {esc(clip.prompt)}"></video>'
                f"{image_element(row, f'frames of {label}: {clip.prompt}', ROW)}</div>"
            )
    head = f"<strong>{esc(why)}</strong> " if why else ""
    small = f' <small class="muted">prompt {clip.index}, sample {clip.sample}</small>'
    caption = f"<figcaption>{head}{esc(clip.prompt)}{small}</figcaption>"
    return f'<figure class="pair">{elements}{caption}</figure>' if elements else ""
