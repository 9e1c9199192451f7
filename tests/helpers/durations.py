"""What each test takes: measured in every run, told at its end, kept by `--durations-to`, bounded by `--refuse-long`.

The process that runs a test measures it; the process that the run was started in adds up. Without pytest-xdist both are
one. `tests/duration_table.py` is the table, tests/durations.json.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from duration_table import (
    LIMIT,
    MARGIN,
    ROOT,
    TABLE,
    Spent,
    Table,
    file_of,
    merged,
    read_table,
    representatives,
    typical,
    write_table,
)

FIRST = ("tests/training/test_seal.py",)
"""Files that a worker begins with: they fork it, and a fork of a process in which other tests have had threads may wait
for them for ever."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations")
    group.addoption("--durations-to", type=Path, metavar="FILE", help="table to write what tests took into")
    group.addoption("--refuse-long", action="store_true", help="fail if a test that is not marked slow takes too long")
    group.addoption(
        "--representatives", action="store_true", help="run some cases of parametrised tests that take long"
    )
    group.addoption("--durations-table", type=Path, metavar="FILE", default=TABLE, help="table to compare with")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Clock(config), "durations-clock")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Sums(config), "durations-sums")


@pytest.hookimpl(trylast=True)  # once it is known what is left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the longest files first where workers share them; the order within a file stays.

    A file that begins last would keep one core at work and the others idle, and pytest-xdist by itself begins with the
    files of many tests, which are the quick ones.
    """
    table = read_table(config.getoption("durations_table"))
    if config.getoption("representatives"):
        leave_out(items, table, config)
    shared = table.of_tests(item.nodeid for item in items) if hasattr(config, "workerinput") else {}
    items.sort(key=lambda item: (file_of(item.nodeid) not in FIRST, -shared.get(file_of(item.nodeid), 0.0)))


def leave_out(items: list[pytest.Item], table: Table, config: pytest.Config) -> None:
    """Leaves out the cases of parametrised tests that others stand for."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = {
        alike[place]
        for alike in cases.values()
        for place in representatives([table.tests.get(item.nodeid, 0.0) for item in alike])
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


# ---- in the process that runs tests ----------------------------------------------------------------------------------


def processor_seconds() -> float:
    """Of this process, and of its children that have ended and were waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def calibrate() -> float:
    """Processor seconds that a fixed piece of Python and torch work takes here, the best of three."""
    import torch  # conftest.py has imported it

    def work() -> float:
        begun = time.process_time()
        counts: dict[int, int] = {}
        for number in range(300_000):
            counts[number % 97] = counts.get(number % 97, 0) + number * number
        left = torch.ones(256, 256)
        for _ in range(40):
            left = (left @ left).tanh()
        return time.process_time() - begun

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = min(work() for _ in range(3))
    torch.set_num_threads(threads)
    return found


class Clock:
    """Measures the tests of this process and writes what they took into their reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.calibration: float | None = None
        self.cpu = 0.0  # where the phase began
        self.depth = 0
        self.shared = (0.0, 0.0)  # processor and wall seconds of wider fixtures in this phase
        self.left_out: list[str] = []

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.left_out += [item.nodeid for item in items]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        if self.calibration is None:
            self.calibration = calibrate()
        self.cpu = processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        self.depth += 1
        begun = processor_seconds(), time.perf_counter()
        try:
            return (yield)
        finally:
            self.depth -= 1
            if not self.depth:
                cpu, wall = self.shared
                self.shared = cpu + processor_seconds() - begun[0], wall + time.perf_counter() - begun[1]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        now = processor_seconds()
        (shared, waited), cpu = self.shared, now - self.cpu
        self.cpu, self.shared = now, (0.0, 0.0)
        report = yield
        own = call.when != "teardown"  # the last test of a file takes down what all of it shared
        spent = {
            "cpu": max(0.0, cpu - shared) if own else 0.0,
            "wall": max(0.0, call.duration - waited) if own else 0.0,
            "rest": shared if own else cpu,
            "slow": item.get_closest_marker("slow") is not None,
        }
        if call.when == "call" and spent["cpu"] > LIMIT and not spent["slow"]:
            spent["calibration"] = calibrate()  # others may have come to this machine since the run began
            self.cpu = processor_seconds()
        vars(report)["spent"] = spent
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        told = {"calibration": self.calibration, "left_out": self.left_out}
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["durations"] = told
        elif (sums := self.config.pluginmanager.get_plugin("durations-sums")) is not None:
            sums.workers.append(told)


# ---- in the process that was started ---------------------------------------------------------------------------------


class Sums:
    """Adds up what tests took, compares it with the table and says what is too long."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.table = read_table(config.getoption("durations_table"))
        self.workers: list[dict[str, Any]] = []
        self.collected: Collection[str] = ()
        self.run = defaultdict[str, Spent](Spent)
        self.refused: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = {item.nodeid for item in session.items} or self.collected

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.collected = set(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if (told := getattr(node, "workeroutput", {}).get("durations")) is not None:
            self.workers.append(told)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (found := getattr(report, "spent", None)) is None:
            return
        spent = self.run[report.nodeid]
        spent.cpu, spent.wall, spent.rest = (getattr(spent, key) + found[key] for key in ("cpu", "wall", "rest"))
        spent.slow = found["slow"]
        spent.calibration = found.get("calibration", spent.calibration)
        spent.whole = report.passed and (spent.whole or report.when == "call")

    @property
    def calibration(self) -> float | None:
        return typical(one["calibration"] for one in self.workers)

    @property
    def scale(self) -> float:
        return self.table.scale(self.calibration)

    def long(self) -> dict[str, Spent]:
        """Tests above the limit here that are not marked slow, the longest first."""
        found = {test: one for test, one in self.run.items() if not one.slow and one.cpu > LIMIT * self.scale}
        return dict(sorted(found.items(), key=lambda one: -one[1].cpu))

    def too_long(self) -> list[str]:
        """Those that no noise explains, by the processor and by the clock."""
        found = self.long()
        scales = {test: max(self.scale, self.table.scale(one.calibration)) for test, one in found.items()}
        bound = {test: self.table.limit(test) * scales[test] * MARGIN for test in found}
        return [test for test, spent in found.items() if min(spent.cpu, spent.wall) > bound[test]]

    @pytest.hookimpl(trylast=True)  # after the clock of this process
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.config.getoption("refuse_long"):
            self.refused = self.too_long()
            if self.refused and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if (path := self.config.getoption("durations_to")) is not None:
            self.write(path)

    def write(self, path: Path) -> None:
        """Merges the run into a table; where there is none, this run is what it was made by."""
        table = read_table(path)
        if not path.is_file():
            table = Table(made=self.made(), exceptions=self.table.exceptions)
        known = {*self.collected, *(test for one in self.workers for test in one["left_out"])}
        missing = {file_of(test) for test in known if test not in self.run or not self.run[test].whole}
        complete = {file_of(test) for test in self.run} - missing
        scale = table.scale(self.calibration)
        write_table(merged(table, self.run, known=known, complete=complete, scale=scale), path)

    def made(self) -> dict[str, Any]:
        """What the table says of the run that made it."""
        commit = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True
        )
        return {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "commit": commit.stdout.strip(),
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "calibration": round(self.calibration or 0.0, 4),
            "command": " ".join(["pytest", *map(str, self.config.invocation_params.args)]),
        }

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        say = terminalreporter.write_line
        found = self.long()
        excepted = [test for test in found if test in self.table.exceptions and test not in self.refused]
        told = [test for test in found if test not in excepted]
        if told:
            terminalreporter.section(f"not marked slow, and above {LIMIT:g} s")
            say(f"Seconds of the processor and of the clock; this machine takes {self.scale:.2f} of the table's time.")
            for test in told:
                mark = "  refused" if test in self.refused else ""
                say(f"{found[test].cpu:7.1f} {found[test].wall:7.1f}  {test}{mark}")
        if excepted and self.config.getoption("verbose") > 0:
            say(f"{len(excepted)} more above {LIMIT:g} s are exceptions of tests/durations.json.")
        if self.refused:
            say("Make these shorter, or mark them slow: see CONTRIBUTING.md, 'Tests'.")


def processor_name() -> str:
    """The processor's name, as Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
