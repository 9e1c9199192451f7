"""The plugin of pytest that checks run under: a line of the journal for each, and no check after the time is up.

A check that ends the process is in the journal as begun, so that another process goes on behind it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_journal import DEADLINE, JOURNAL, LOST, SECTIONS, entries, write
from gpu_place import Figures, Place

_FIGURES = pytest.StashKey[Figures]()
_LONGEST = 800  # characters of a reason


@pytest.fixture(scope="session")
def place() -> Place:
    """Where checks run."""
    return Place.here()


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """What a check has measured, by name: goes into the result."""
    return request.node.stash.setdefault(_FIGURES, {})


def facts(place: Place) -> dict[str, Any]:
    """What ran where."""
    from flowrl.runtime.gpus import gpu_facts
    from flowrl.runtime.versions import git_commit, versions

    found = gpu_facts()
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "form": "card" if place.on_card else "cpu",
        "card": torch.cuda.get_device_name(0) if place.on_card else None,
        "cards": len(found.names),
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 2) if place.on_card else None,
        "driver": found.driver,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if place.on_card else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if place.on_card else None,
        "capability": ".".join(map(str, found.capabilities[0])) if found.capabilities else None,
        "versions": versions(),
        "commit": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


class Watch:
    """Hooks around each check."""

    def __init__(self, journal: Path, deadline: float) -> None:
        self.journal, self.deadline, self.place = journal, deadline, Place.here()
        self.found: dict[str, Any] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Sections in their order, without what an earlier process has begun."""
        known = {entry["check"] for entry in entries(self.journal) if "check" in entry}
        order = {name: place for place, name in enumerate(SECTIONS)}
        items[:] = [item for item in items if _is_own(item) and name_of(item) not in known]
        items.sort(key=lambda item: order[section_of(item)])
        for item in items:
            item.add_marker("gpu")
        if items and not known:
            write(self.journal, {"facts": facts(self.place), "checks": len(items)})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        function = getattr(item, "function", None)
        what = " ".join((getattr(function, "__doc__", None) or "").split())
        limit = max((float(mark.args[0]) for mark in item.iter_markers("seconds")), default=20.0)
        self.found = {"check": name_of(item), "section": section_of(item), "what": what, "limit": limit}
        write(self.journal, self.found | {"begun": time.time()})
        begun = time.monotonic()
        result = yield
        self.found |= {"seconds": round(time.monotonic() - begun, 2)}
        self.found |= {"figures": _rounded(item.stash.get(_FIGURES, {}))}
        self.found["form"] = self.found["figures"].pop("form", "card" if self.place.on_card else "cpu")
        write(self.journal, self.found)
        if self.found["outcome"] == "failed" and self._lost():
            os._exit(LOST)
        return result

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        left = self.deadline - time.time()
        if left <= 0:
            pytest.skip("left out: the time was up")
        if self.place.on_card and self.found["limit"] > left:
            pytest.skip(f"left out: it may take {self.found['limit']:.0f} s, and {left:.0f} were left")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report: pytest.TestReport = yield
        if report.failed or self.found.get("outcome") in (None, "passed"):
            self.found |= {"outcome": report.outcome, "why": _reason(report, call)}
        return report

    def _lost(self) -> bool:
        """Whether the card refuses everything from now on, as after an access out of bounds."""
        try:
            self.place.wait()
        except RuntimeError:
            return True
        return False


def name_of(item: pytest.Item) -> str:
    """A check's name: "exactness/kernel[cudnn]"."""
    return f"{section_of(item)}/{item.name.removeprefix('check_')}"


def section_of(item: pytest.Item) -> str:
    """The section that a check's file is about."""
    return item.path.stem.removeprefix("check_")


def _is_own(item: pytest.Item) -> bool:
    """Whether a check is defined in its file: what it imports may begin with `check_` too."""
    function: Any = getattr(item, "function", None)
    return function is not None and function.__module__ == item.path.stem


def _reason(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if report.passed or call.excinfo is None:
        return ""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    where, told = call.excinfo.traceback[-1], call.excinfo.exconly()
    told = told if len(told) <= _LONGEST else f"{told[: _LONGEST // 4]} ... {told[-_LONGEST:]}"
    return f"{told} (at {Path(where.path).name}:{where.lineno + 1})"


def _rounded(figures: Figures) -> Figures:
    """Figures to four digits."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()}


def pytest_configure(config: pytest.Config) -> None:
    """Settles the process and registers the hooks."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if (journal := os.environ.get(JOURNAL)) is not None:
        config.pluginmanager.register(Watch(Path(journal), float(os.environ[DEADLINE])), "gpu-watch")
