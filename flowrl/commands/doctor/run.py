"""`flowrl doctor`: looks at the machine, a configuration or a run, says what is wrong and what to change."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from flowrl.health.diagnosis import Check, Diagnosis, as_data
from flowrl.runtime.files import plain
from flowrl.runtime.scrubbing import say as print


def run(parsed: argparse.Namespace) -> int:
    """Prints what was found; returns 1 where something would stop a run, or has made one worthless.

    Raises:
        ValueError: settings beside a run folder, or without a configuration.
    """
    words: list[str] = parsed.arguments
    subject = words[0] if words and "=" not in words[0] else None
    if subject is None and words:
        raise ValueError(
            f"{words[0]} is a setting of a configuration: name that first, flowrl doctor CONFIG {words[0]}"
        )
    folder = None if subject is None else _run_folder(subject)
    if folder is not None and words[1:]:
        raise ValueError(f"{words[1]} has no place beside the run {folder}, which is over: give the run alone")
    found = list[Diagnosis]()
    for make in _examinations(parsed, subject, folder):
        diagnosis = make()
        if not parsed.json:
            from flowrl.health.doctor_text import as_text

            print(("\n" if found else "") + as_text(diagnosis, getattr(sys.stdout, "encoding", None)), flush=True)
        found.append(diagnosis)
    if parsed.json:
        print(json.dumps(plain(as_data(found)), indent=1))
    else:
        from flowrl.health.doctor_text import last_words

        if folder is None:
            print(f"\n{last_words([check for one in found for check in one.checks])}")
    return max(one.code for one in found)


def _examinations(
    parsed: argparse.Namespace, subject: str | None, folder: Path | None
) -> Iterator[Callable[[], Diagnosis]]:
    if folder is not None:
        from flowrl.health.run_findings import diagnose_run

        yield lambda: diagnose_run(folder)
        return
    yield lambda: _machine(offline=parsed.offline, out=Path("runs"))
    if subject is not None:
        from flowrl.health.configuration_checks import diagnose_configuration

        yield lambda: diagnose_configuration(
            subject, parsed.arguments[1:], step=not parsed.no_step, offline=parsed.offline
        )


def _run_folder(subject: str) -> Path | None:
    """The folder of a run; a file or the name of a configuration is none."""
    folder = Path(subject).expanduser()
    return folder if folder.is_dir() else None


def _machine(*, offline: bool, out: Path) -> Diagnosis:
    import platform

    import torch

    from flowrl.health.gpu_checks import attention_check, driver_check, gpu_facts, kernel_check
    from flowrl.health.hub_check import hub_check
    from flowrl.health.machine_checks import (
        disk_check,
        processes_check,
        shared_memory_check,
        version_checks,
    )

    facts = gpu_facts()
    cuda = "a CPU build" if facts.build is None else f"built for CUDA {facts.build}"
    checks: tuple[Check, ...] = (
        driver_check(facts),
        Check(name="torch", state="ok", found=f"{torch.__version__}, {cuda}"),
        kernel_check(facts), attention_check(), *version_checks(), disk_check(out), shared_memory_check(),
        processes_check("gloo", len(facts.names)), processes_check("nccl", len(facts.names)),
        hub_check(offline=offline),
    )  # fmt: skip
    return Diagnosis(about=f"This machine ({platform.node()}, Python {platform.python_version()})", checks=checks)
