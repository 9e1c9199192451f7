"""Downloads a model of the hub onto each machine's disk before the processes of a run form their group.

One process per machine downloads. The others wait at the launcher's store, for hours if needed, and print whom they
wait for. Inside a group they would wait in a collective, which ends all of them when it times out.
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
    """Returns when the model is on this machine's disk; does nothing for a single process, which downloads while it
    loads. The settings that name the model are the same in every process. Loading refuses a bad `location`."""
    if launched() is None or is_path(settings.model):
        return
    if int(os.environ.get("LOCAL_RANK") or 0) == 0:
        from flowrl.pipelines.weights.stock_loading import fetch  # diffusers takes seconds to import

        with suppress(ValueError):
            fetch(location, settings.variant)
    meet({}, lambda _: "", patience=PATIENCE.total_seconds())
