"""The table of what each test takes, `tests/durations.json`: how it is read, merged and written.

Seconds are processor seconds, of the test's process and of the children that it ended: under load they hardly change.
A file's seconds hold everything, fixtures that its tests share too; a test's seconds are its own and leave those out.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "durations.json"
LIMIT = 2.0
"""Seconds that a test may take which is not marked slow."""
MARGIN = 1.5
"""What noise may add before a run is refused."""
LEAST = 0.05
"""Seconds below which a test has no entry."""
ENOUGH = 0.5
"""Seconds that the cases of one parametrised test may take together where representatives are wanted."""
UNKNOWN = 5.0
"""Seconds that a file without an entry is taken to need, so that a new one does not come last."""


@dataclass(kw_only=True)
class Spent:
    """What a test took in one run, in seconds."""

    cpu: float = 0.0
    """Its own processor seconds: its call, and the fixtures made for it alone."""
    wall: float = 0.0
    """The same by the clock."""
    rest: float = 0.0
    """Processor seconds of what it shares, which fall to its file: wider fixtures, and taking things down."""
    slow: bool = False
    calibration: float | None = None
    """Of a long test: what `calibrate` took right after it."""
    whole: bool = False
    """It passed; what fails or is skipped says nothing of its length."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The file's contents."""

    made: dict[str, Any] = field(default_factory=dict)
    """When, of which commit, where and by which command the whole suite was measured."""
    files: dict[str, float] = field(default_factory=dict)
    tests: dict[str, float] = field(default_factory=dict)
    slow: frozenset[str] = frozenset()
    """Those of the tests that are marked slow."""
    exceptions: dict[str, float] = field(default_factory=dict)
    """Tests above the limit that are not marked slow; a record takes some off or makes them shorter, never more."""

    def scale(self, calibration: float | None) -> float:
        """How many times as long as in the table everything takes on a machine."""
        known = self.made.get("calibration")
        return calibration / known if calibration and known else 1.0

    def limit(self, test: str) -> float:
        """Seconds that a test may take on the table's machine."""
        return max(LIMIT, self.exceptions.get(test, 0.0))

    def long(self) -> dict[str, float]:
        """Tests above the limit that are not marked slow."""
        return {test: seconds for test, seconds in self.tests.items() if seconds > LIMIT and test not in self.slow}

    def rest(self) -> dict[str, float]:
        """File -> its seconds without the tests that have an entry."""
        listed = defaultdict[str, float](float)
        for test, seconds in self.tests.items():
            listed[file_of(test)] += seconds
        return {file: max(0.0, seconds - listed[file]) for file, seconds in self.files.items()}

    def of_files(self, *, slow: bool) -> dict[str, float]:
        """File -> its seconds, with its slow tests or without them."""
        found = dict(self.files)
        if not slow:
            for test in self.slow:
                found[file_of(test)] -= self.tests[test]
        return {file: round(max(0.0, seconds), 2) for file, seconds in found.items()}

    def of_tests(self, tests: Iterable[str]) -> dict[str, float]:
        """File -> seconds of what these tests need; what a file's tests share counts whole."""
        rest, found = self.rest(), dict[str, float]()
        for test in tests:
            file = file_of(test)
            found.setdefault(file, rest.get(file, UNKNOWN))
            found[file] += self.tests.get(test, 0.0)
        return found


def file_of(test: str) -> str:
    return test.partition("::")[0]


def read_table(path: Path = TABLE) -> Table:
    """The table, empty where there is no file."""
    if not path.is_file():
        return Table()
    found = json.loads(path.read_text())
    return Table(**found | {"slow": frozenset(found["slow"])})


def write_table(table: Table, path: Path = TABLE) -> None:
    """Writes sorted entries, one a line."""
    parts: dict[str, Mapping[str, Any] | Sequence[str]] = {
        "made": table.made,
        **{
            name: {key: round(value, 2) for key, value in sorted(entries.items())}
            for name, entries in (("files", table.files), ("tests", table.tests), ("exceptions", table.exceptions))
        },
        "slow": sorted(table.slow),
    }
    path.write_text("{\n" + ",\n".join(f'"{name}": {_lines(part)}' for name, part in parts.items()) + "\n}\n")


def _lines(part: Mapping[str, Any] | Sequence[str]) -> str:
    if isinstance(part, Mapping):
        entries, ends = [json.dumps({key: value}, ensure_ascii=False)[1:-1] for key, value in part.items()], "{}"
    else:
        entries, ends = [json.dumps(one, ensure_ascii=False) for one in part], "[]"
    return "\n".join([ends[0], ",\n".join(entries), ends[1]]) if entries else ends


def representatives(seconds: Sequence[float], enough: float = ENOUGH) -> list[int]:
    """Places of the cases that stand for all cases of a parametrised test, which take `seconds` each.

    All, where they take no longer than `enough` together. Else the first, and of the others, the last before the middle
    ones, those that fit into what is left.
    """
    if sum(seconds) <= enough:
        return list(range(len(seconds)))
    ends, order = [(0, len(seconds) - 1)], [0, len(seconds) - 1]
    for first, last in ends:  # grows while it is walked: halves, quarters, ...
        if last - first > 1:
            middle = (first + last) // 2
            order.append(middle)
            ends += [(first, middle), (middle, last)]
    kept, left = {0}, enough - seconds[0]
    for place in order[1:]:
        if place not in kept and seconds[place] <= left:
            kept.add(place)
            left -= seconds[place]
    return sorted(kept)


def merged(
    table: Table, run: Mapping[str, Spent], *, known: Collection[str], complete: Collection[str], scale: float = 1.0
) -> Table:
    """The table with what was run in place of what it said.

    Args:
        run: test -> what it took here.
        known: tests that were collected, left out or not. What is gone from their files is dropped, and so is what
            lies in files that are gone.
        complete: files of which every test was run; others keep what their other tests took.
        scale: how many times as long this machine takes.
    """
    passed = {test: spent for test, spent in run.items() if spent.whole}
    took = {test: spent.cpu / scale for test, spent in passed.items()}
    there = {file_of(test) for test in known}
    kept = {
        test: seconds
        for test, seconds in table.tests.items()
        if test not in took and (test in known or (file_of(test) not in there and (ROOT / file_of(test)).is_file()))
    }
    tests = kept | {test: seconds for test, seconds in took.items() if seconds >= LEAST}
    slow = (table.slow - passed.keys()) | {test for test, spent in passed.items() if spent.slow}
    files = {file: seconds for file, seconds in table.files.items() if (ROOT / file).is_file()}
    for file, spent in _of_files(passed).items():
        total = sum(one.cpu + one.rest for one in spent.values()) / scale
        if file not in complete and file in files:
            before = sum(table.tests.get(test, 0.0) for test in spent)
            total = files[file] - before + sum(took[test] for test in spent if took[test] >= LEAST)
        files[file] = max(0.0, total)
    exceptions = {
        test: min(seconds, tests[test])
        for test, seconds in table.exceptions.items()
        if tests.get(test, 0.0) > LIMIT and test not in slow
    }
    return replace(table, files=files, tests=tests, slow=slow & tests.keys(), exceptions=exceptions)


def _of_files(run: Mapping[str, Spent]) -> dict[str, dict[str, Spent]]:
    found = defaultdict[str, dict[str, Spent]](dict)
    for test, spent in run.items():
        found[file_of(test)][test] = spent
    return found


def spread(seconds: Iterable[float], cores: int) -> list[float]:
    """Seconds of each core if each takes, when it is free, the next of a list, the longest first."""
    loads = [0.0] * cores
    for one in sorted(seconds, reverse=True):
        loads[loads.index(min(loads))] += one
    return loads


def typical(calibrations: Iterable[float]) -> float | None:
    """The median of what workers measured."""
    found = [one for one in calibrations if one]
    return statistics.median(found) if found else None
