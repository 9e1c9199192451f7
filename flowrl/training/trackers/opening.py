"""Which trackers a configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.config.sections import LoggingConfig
from flowrl.config.train import TrainConfig, to_yaml
from flowrl.runtime.files import plain
from flowrl.runtime.scrubbing import settings_without_secrets, without_secrets
from flowrl.training.trackers.tensorboard_tracker import TensorBoardTracker
from flowrl.training.trackers.tracker import Tracker, Trackers
from flowrl.training.trackers.trackio_tracker import TrackioTracker, check_trackio
from flowrl.training.trackers.wandb_tracker import WandbTracker, check_wandb


def check_trackers(config: LoggingConfig) -> None:
    """Refuses trackers that cannot be had, before anything loads.

    Raises:
        ValueError: says which, and what to change.
    """
    if config.wandb != "none":
        check_wandb(config.wandb)
    if config.trackio != "none":
        check_trackio(config.trackio)


def open_trackers(config: TrainConfig, folder: Path, *, run: str, resumed: bool) -> Trackers:
    """Opens them on the main process; `run` is the identity that the run keeps when it is continued.

    Raises:
        ValueError: a tracker on another machine refuses the run, or does not answer.
    """
    own, settings = config.logging, dict[str, Any](settings_without_secrets(plain(config)))
    found: list[Tracker] = []
    if own.tensorboard:
        found.append(TensorBoardTracker(folder, without_secrets(to_yaml(config))))
    try:
        if own.wandb != "none":
            online = own.wandb == "online"
            found.append(WandbTracker(folder, settings, run=run, online=online, project=own.project, entity=own.entity))
        if own.trackio != "none":
            found.append(TrackioTracker(folder, settings, space=own.trackio, project=own.project, resumed=resumed))
    except Exception as error:  # their servers, keys and quotas: whatever they raise, nothing was trained yet
        Trackers(found).close(failed=True)
        raise ValueError(
            f"a tracker could not be started: {error}. Nothing was trained; logging.wandb=offline and "
            "logging.trackio=local need no server"
        ) from error
    return Trackers(found)
