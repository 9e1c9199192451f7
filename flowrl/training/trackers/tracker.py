"""What a tracker gets of a run, and what a run does with its trackers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flowrl.runtime.failures import explain
from flowrl.runtime.scrubbing import say as print

Numbers = Mapping[str, int | float]
TENSORBOARD = "tensorboard"
FOLDERS = (TENSORBOARD, "wandb")
"""What trackers keep in a run folder; the second is named by W&B itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A file that an evaluation left in `samples/`, of the same prompt and start noise each time."""

    number: int
    prompt: str
    image: Path
    """A PNG: the image, or a row of a video's frames."""
    video: Path | None
    """The MP4, with sound if there is any."""


class Tracker(Protocol):
    """One place that gets numbers and samples."""

    name: str

    def log(self, iteration: int, numbers: Numbers) -> None:
        """Finite numbers under their names in `metrics.jsonl`."""

    def show(self, iteration: int, samples: Sequence[Sample]) -> None:
        """What an evaluation has drawn."""

    def close(self, report: Path | None, *, failed: bool) -> None:
        """The end, with the run's page if it could be written."""


class Trackers:
    """The trackers of a run. If one fails, a note says so once and it is left out: the run goes on."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._left = list(trackers)

    def log(self, row: Mapping[str, Any]) -> None:
        """Hands on a row of `metrics.jsonl`, except what is not a finite number."""
        finite = {key: value for key, value in row.items() if isinstance(value, int | float)}
        numbers = {key: value for key, value in finite.items() if not isinstance(value, bool) and key != "iteration"}
        self._each(lambda tracker: tracker.log(int(row["iteration"]), numbers))

    def show(self, folder: Path, iteration: int) -> None:
        """Hands on the samples that an evaluation has left in a run folder."""
        if self._left and (found := samples_of(folder, iteration)):
            self._each(lambda tracker: tracker.show(iteration, found))

    def close(self, report: Path | None = None, *, failed: bool = False) -> None:
        """Ends all of them; later calls do nothing."""
        self._each(lambda tracker: tracker.close(report, failed=failed))
        self._left = []

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._left):
            try:
                act(tracker)
            except Exception as error:
                self._left.remove(tracker)
                said = f"{tracker.name} gets nothing more from this run, which goes on without it: {explain(error)}"
                print(f"\nWarning: {said}", file=sys.stderr, flush=True)


def samples_of(folder: Path, iteration: int) -> list[Sample]:
    """The samples of one evaluation of a run folder, in the order of its prompts; empty if it kept none."""
    listed, samples = folder / "samples" / "prompts.json", folder / "samples" / f"iteration_{iteration:06d}"
    if not listed.is_file():
        return []
    found = []
    for number, entry in enumerate(json.loads(listed.read_text(encoding="utf-8"))):
        image, video = samples / f"{number:04d}.png", samples / f"{number:04d}.mp4"
        if image.is_file():
            own = video if video.is_file() else None
            found.append(Sample(number=number, prompt=str(entry["prompt"]), image=image, video=own))
    return found
