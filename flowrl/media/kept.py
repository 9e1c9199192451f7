"""The samples that an evaluation keeps for viewing: images, clips, and edits beside their sources.

In the samples folder of a run, with n the iteration in six digits and k the sample in four:

    iteration_<n>/<k>.png     the image; of a video a row of its frames
    iteration_<n>/<k>.mp4     the video, with its sound where it has any
    iteration_<n>.png         all of them with their captions, edits beside their sources
    sources/<k>.png           what was given to edit or to animate; further sources are <k>_1.png, <k>_2.png ...
    latest.png                some of the newest that training drew, in one row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from flowrl.media.images import SMALL, beside, fit, grid, save_png, to_pixels
from flowrl.media.videos import contact_row, contact_sheet, save_mp4

CELL = 448  # the longer side of an edit in the grid
LATEST = 8
"""Samples that `latest.png` shows."""
_LATEST_SIDE = 256  # pixels of their longer side at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Sounds:
    """The sounds of some videos, float [channels, samples] in [-1, 1] each, and their samples per second."""

    waves: Sequence[Tensor]
    rate: int


def write_samples(
    folder: str | Path,
    iteration: int,
    kept: Sequence[Tensor],
    captions: Sequence[str],
    sources: Sequence[Sequence[Tensor]] | None = None,
    fps: float | None = None,
    sounds: Sounds | None = None,
) -> None:
    """Writes the samples of an evaluation; replaces files of an earlier attempt at this iteration one by one.

    Args:
        folder: the samples folder, `RUN/samples`.
        iteration: counts the iterations before this evaluation.
        kept: [3, H, W] images or [F, 3, H, W] videos, float in [0, 1], all of one kind and size.
        sources: for each sample the images it was made from, [3, h, w] of any size; an empty list or None for text
            alone. They are the same at every evaluation, and are kept once.
        fps: frames per second of videos; None for images.
        sounds: one for each video, or None if they are silent.
    """
    _check(kept, captions, sources, fps)
    if not kept:
        return
    folder = Path(folder)
    name = f"iteration_{iteration:06d}"
    for number, own in enumerate(sources or ()):
        for place, source in enumerate(own):
            file = f"{number:04d}_{place}.png" if place else f"{number:04d}.png"
            save_png(source, folder / "sources" / file, durable=True)
    for number, sample in enumerate(kept):
        if fps is not None:  # the clip first: whoever sees the row finds the clip
            sound = None if sounds is None else (sounds.waves[number], sounds.rate)
            save_mp4(sample, folder / name / f"{number:04d}.mp4", fps, sound)
        save_png(sample if fps is None else contact_row(sample), folder / name / f"{number:04d}.png", durable=True)
    save_png(_sheet(kept, captions, sources, fps), folder / f"{name}.png", durable=True)


def write_latest(folder: str | Path, samples: Sequence[Tensor]) -> list[Image.Image]:
    """Writes `latest.png`, one row of images [3, H, W] or of the middle frames of videos [F, 3, H, W]; returns them."""
    stills = [sample if sample.ndim == 3 else sample[len(sample) // 2] for sample in samples]
    row = torch.stack([fit(still.float().clamp(0, 1), _LATEST_SIDE) for still in stills])
    save_png(grid(row, columns=len(row)), Path(folder) / "latest.png")
    return [Image.fromarray(to_pixels(still)) for still in row]


def _sheet(
    kept: Sequence[Tensor], captions: Sequence[str], sources: Sequence[Sequence[Tensor]] | None, fps: float | None
) -> Tensor | Image.Image:
    """All samples in one image."""
    if sources is not None and any(sources):
        return beside(sources, [fit(x, CELL) if fps is None else contact_row(x) for x in kept], captions)
    if fps is not None:
        return contact_sheet(kept, captions)
    return grid(torch.stack(list(kept)), captions=captions, scale=2 if max(kept[0].shape) <= SMALL else 1)


def _check(
    kept: Sequence[Tensor], captions: Sequence[str], sources: Sequence[Sequence[Tensor]] | None, fps: float | None
) -> None:
    if len(captions) != len(kept) or (sources is not None and len(sources) != len(kept)):
        given = "" if sources is None else f" and {len(sources)} lists of sources"
        raise ValueError(f"{len(kept)} samples came with {len(captions)} captions{given}: give one for each sample")
    wanted, kind = (3, "images [3, H, W]") if fps is None else (4, "videos [F, 3, H, W]")
    if wrong := [tuple(sample.shape) for sample in kept if sample.ndim != wanted]:
        raise ValueError(f"fps={fps} asks for {kind}, got the shape {wrong[0]}: give fps for videos and only for them")
