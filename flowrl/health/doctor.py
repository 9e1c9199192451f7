"""Finds what would stop a run on this machine or of this configuration, or what went wrong in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.base import find_config
from flowrl.config.overrides import Typed
from flowrl.config.strict_yaml import dotted_items
from flowrl.health.diagnosis import Diagnosis, Examination
from flowrl.runtime.public import public

if TYPE_CHECKING:
    from flowrl.runs.trained_run import TrainedRun


@public
def doctor(
    config_or_run: str | Path | Mapping[str, Any] | TrainedRun | None = None,
    *,
    step: bool = True,
    offline: bool = False,
    on_examination: Callable[[Examination], object] | None = None,
    show: bool = True,
    **settings: Any,
) -> Diagnosis:
    """Checks this machine and a configuration, or a run, finished or not.

    Args:
        config_or_run: a YAML file, the name of one that ships, or a mapping of settings; or a run folder, or what
            `train` returned.
        step: train two iterations of the configuration.
        offline: do not ask the hub.
        on_examination: a function that gets each part of the diagnosis as soon as it is ready.
        show: show progress.
        **settings: replace those of the configuration, as in `train`.

    Raises:
        FlowrlError: there are settings with a run or without a configuration, no configuration has that name, or
            the folder is not a run.
    """
    subject = getattr(config_or_run, "folder", config_or_run)
    folder = Path(subject).expanduser() if isinstance(subject, str | Path) else None
    if folder is not None and not folder.is_dir():
        try:
            find_config(str(subject))  # before a look at the machine
        except ValueError as error:
            raise ValueError(f"{error}; or give a run folder") from None
        folder = None
    if settings and (subject is None or folder is not None):
        key, value = next(dotted_items(settings))
        word = value if isinstance(value, Typed) else f"{key}={value}"
        if folder is not None:
            raise ValueError(f"{word} has no effect on the run {folder}, which is over: give the run alone")
        raise ValueError(f"{word} is a setting of a configuration: name that first, flowrl doctor CONFIG {word}")

    def examinations() -> Iterator[Examination]:
        if folder is not None:
            from flowrl.health.run_findings import diagnose_run

            yield diagnose_run(folder)
            return
        from flowrl.health.machine_checks import diagnose_machine

        yield diagnose_machine(offline=offline)
        if subject is not None:
            from flowrl.health.configuration_checks import diagnose_configuration

            given = subject if isinstance(subject, Mapping) else str(subject)
            yield diagnose_configuration(given, settings, step=step, offline=offline)

    found = list[Examination]()
    for one in examinations():
        found.append(one)
        if on_examination is not None:
            on_examination(one)
    return Diagnosis(examinations=tuple(found), of_run=folder is not None)
