"""A model of the hub comes onto each machine's disk before the processes of a run form their group.

One process a machine downloads, and the others meet it by the launcher's store, which lets them wait for hours and
says whom they wait for. In a group they would wait inside a collective, which ends all of them when it is late.
"""

from __future__ import annotations

import os
from contextlib import suppress

from flowrl.config.locations import is_path
from flowrl.config.sections import PipelineConfig
from flowrl.training.processes.devices import PATIENCE
from flowrl.training.processes.launched import launched
from flowrl.training.processes.meeting import meet


def fetch_first(settings: PipelineConfig, location: str) -> None:
    """Returns when the model is on this machine's disk; nothing for one process alone, which loads it as it comes. The
    settings that name it are the same in every process. What cannot be had at the `location` is refused when it
    loads."""
    if launched() is None or is_path(settings.model):
        return
    if int(os.environ.get("LOCAL_RANK") or 0) == 0:
        from flowrl.pipelines.weights.stock_loading import fetch  # diffusers takes seconds to import

        with suppress(ValueError):
            fetch(location, settings.variant)
    meet({}, lambda _: "", patience=PATIENCE.total_seconds())
