"""Which trackers a configuration asks for."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.runtime.extras import check_extra
from flowrl.runtime.scrubbing import settings_without_secrets, without_secrets
from flowrl.training.trackers.tensorboard_tracker import TensorBoardTracker
from flowrl.training.trackers.tracker import Tracker, Trackers
from flowrl.training.trackers.trackio_tracker import TrackioTracker, check_trackio
from flowrl.training.trackers.wandb_tracker import WandbTracker, check_wandb


def check_trackers(wandb: str, trackio: str, tensorboard: bool | None = None) -> None:
    """Refuses trackers of the section `logging` that cannot be had, before anything loads."""
    if tensorboard:
        check_extra("tensorboard", "logging.tensorboard=true")
    if wandb != "none":
        check_wandb(wandb)
    if trackio != "none":
        check_trackio(trackio)


def open_trackers(settings: Mapping[str, Any], text: str, folder: Path, *, run: str, resumed: bool) -> Trackers:
    """Opens them on the main process.

    Args:
        settings: of the run, sections as mappings.
        text: of its configuration.
        run: the identity that it keeps when it is continued.
        resumed: whether it is continued.

    Raises ValueError: a tracker on another machine refuses the run, or does not answer.
    """
    own, shown = settings["logging"], dict[str, Any](settings_without_secrets(settings))
    found: list[Tracker] = []
    if own["tensorboard"] or (own["tensorboard"] is None and importlib.util.find_spec("tensorboard") is not None):
        found.append(TensorBoardTracker(folder, without_secrets(text)))
    try:
        project = own["project"]
        if own["wandb"] != "none":
            online = own["wandb"] == "online"
            found.append(WandbTracker(folder, shown, run=run, online=online, project=project, entity=own["entity"]))
        if own["trackio"] != "none":
            found.append(TrackioTracker(folder, shown, space=own["trackio"], project=project, resumed=resumed))
    except Exception as error:  # their servers, keys and quotas: whatever they raise, nothing was trained yet
        Trackers(found).close(failed=True)
        raise ValueError(
            f"a tracker could not be started: {error}. Nothing was trained; logging.wandb=offline and "
            "logging.trackio=local need no server"
        ) from error
    return Trackers(found)
