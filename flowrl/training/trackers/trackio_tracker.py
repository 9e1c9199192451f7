"""trackio: a database on this machine, or a Space on the hub."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.training.trackers.tracker import Numbers, Sample

LOCAL = "local"


class TrackioTracker:
    """A run by its folder's name; `trackio show --project PROJECT` opens it. The report has no place in it."""

    name = "trackio"

    def __init__(self, folder: Path, config: Mapping[str, Any], *, space: str, project: str, resumed: bool) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=project,
            name=folder.name,
            space_id=None if space == LOCAL else space,
            config=dict(config),
            resume="allow" if resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, iteration: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=iteration)

    def show(self, iteration: int, samples: Sequence[Sample]) -> None:
        shown: dict[str, Any] = {}
        for sample in samples:
            made = self._trackio.Image if sample.video is None else self._trackio.Video
            shown[f"samples/{sample.number}"] = made(str(sample.video or sample.image), caption=sample.prompt)
        self._run.log(shown, step=iteration)

    def close(self, report: Path | None, *, failed: bool) -> None:
        self._run.finish()


def check_trackio(space: str) -> None:
    """Refuses a tracker that is not there. Raises ValueError: it is not installed, or the name of a Space is none."""
    if importlib.util.find_spec("trackio") is None:
        raise ValueError(
            f"logging.trackio={space} needs the package trackio, which is not installed: docs/trackers.md says how to "
            "install it beside flowrl, or logging.trackio=none"
        )
    if space != LOCAL and (space.count("/") != 1 or not all(space.split("/"))):
        raise ValueError(f"logging.trackio={space}: allowed are none, local, or a Space of the hub as OWNER/NAME")
