"""Weights & Biases: online, or into `wandb/` of the run folder for `wandb sync` later."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.training.trackers.tracker import Numbers, Sample


class WandbTracker:
    """A run by the identity in the manifest, so that one that is continued goes on there.

    Numbers lie over `iteration` and not over W&B's own count of calls: iterations that are done again after a stop fall
    on the same place, where W&B would drop what comes late. Neither code nor terminal output is sent.
    """

    name = "Weights & Biases"

    def __init__(
        self, folder: Path, config: Mapping[str, Any], *, run: str, online: bool, project: str, entity: str | None
    ) -> None:
        import wandb

        self._wandb: Any = wandb
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, save_code=False, disable_job_creation=True
        )
        self._run: Any = wandb.init(
            project=project,
            entity=entity,
            dir=str(folder),
            id=run,
            name=folder.name,
            config=dict(config),
            mode="online" if online else "offline",
            resume="allow" if online else None,
            settings=settings,
        )
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, iteration: int, numbers: Numbers) -> None:
        self._run.log({"iteration": iteration, **numbers})

    def show(self, iteration: int, samples: Sequence[Sample]) -> None:
        shown: dict[str, Any] = {}
        for sample in samples:
            key = f"samples/{sample.number}"
            if sample.video is None:
                shown[key] = self._wandb.Image(str(sample.image), caption=sample.prompt)
            else:
                shown[key] = self._wandb.Video(str(sample.video), caption=sample.prompt, format="mp4")
        self._run.log({"iteration": iteration, **shown})

    def close(self, report: Path | None, *, failed: bool) -> None:
        if report is not None:
            self._run.log({"report": self._wandb.Html(report.read_text(encoding="utf-8"), inject=False)})
        self._run.finish(exit_code=int(failed))


def check_wandb(mode: str) -> None:
    """Refuses what W&B would ask about on a terminal, or fail at, in the middle of a start. Raises ValueError: it is
    not installed, or `online` has no key."""
    try:
        import wandb
    except ImportError:
        raise ValueError(
            f"logging.wandb={mode} needs the package wandb, which is not installed: in flowrl's folder, pip "
            "install -e '.[wandb]', or logging.wandb=none"
        ) from None
    if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
        raise ValueError(
            "logging.wandb=online has no key: run 'wandb login', or set WANDB_API_KEY; logging.wandb=offline needs "
            "none and is sent later by 'wandb sync'"
        )
