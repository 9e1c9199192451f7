"""Where the time of the tests goes: `make durations`, from tests/durations.json.

`make durations ARGS=--record` runs the whole suite, slow tests too, and writes that table.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from duration_table import LEAST, ROOT, TABLE, Table, read_table, spread, write_table

WIDTH = 80
MOST = 25
"""Rows of a list."""


def tell(table: Table) -> Iterator[str]:
    """The lines, 80 columns at most."""
    made, quick, every = table.made, table.of_files(slow=False), table.of_files(slow=True)
    where = f"{made.get('processor')}, {made.get('cores')} cores"
    yield from cut(f"{made.get('date')}, commit {made.get('commit')}: {where}")
    yield from cut(f"by {made.get('command')}")
    slow = {file: every[file] - quick[file] for file in every}
    yield ""
    yield f"{'':30}{'seconds':>12}{'not slow':>12}{'slow':>12}"
    yield row("all", every, quick, slow)
    for cores in (2, 8):
        yield balance(cores, every, quick)
    rooms = [defaultdict[str, float](float) for _ in range(3)]
    for room, files in zip(rooms, (every, quick, slow), strict=True):
        for file, seconds in files.items():
            room[str(Path(file).parent)] += seconds
    yield from headed("by room")
    for name in sorted(rooms[0], key=rooms[0].__getitem__, reverse=True):
        yield row(name.removeprefix("tests/"), *({name: room[name]} for room in rooms))
    tests = {test: seconds for test, seconds in table.tests.items() if test not in table.slow}
    for title, one in (
        ("dearest files, without their slow tests", quick),
        ("dearest files, their slow tests alone", slow),
        ("dearest tests that are not slow", tests),
        ("dearest slow tests", {test: table.tests[test] for test in table.slow}),
    ):
        yield from headed(title)
        for name, seconds in sorted(one.items(), key=lambda entry: -entry[1])[:MOST]:
            if seconds >= LEAST:
                yield from cut(f"{seconds:7.1f}  {short(name)}")


def headed(title: str) -> Iterator[str]:
    yield ""
    yield f"---- {title} ".ljust(WIDTH, "-")


def row(name: str, *columns: Mapping[str, float]) -> str:
    return f"{name:30}" + "".join(f"{sum(column.values()):12,.1f}" for column in columns)


def balance(cores: int, every: Mapping[str, float], quick: Mapping[str, float]) -> str:
    """When the last of some cores ends, if each takes the longest file left, and for how much of that time it works."""
    loads = [spread(files.values(), cores) for files in (every, quick)]
    (all_end, quick_end), work = map(max, loads), [100 * sum(load) / (max(load) * cores or 1) for load in loads]
    ends = f"{all_end:,.0f} s, {quick_end:,.0f} s without slow tests"
    return f"{cores} cores: {ends} ({work[0]:.0f} %, {work[1]:.0f} % at work)"


def short(name: str) -> str:
    file, _, test = name.removeprefix("tests/").partition("::")
    return f"{Path(file).stem} {test}" if test else file


def cut(line: str) -> Iterator[str]:
    yield line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def record() -> int:
    """Runs the whole suite and puts what it took in the table's place; returns pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "durations.json"
        command = ["-q", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", "--durations-to", str(path)]
        done = subprocess.run([sys.executable, "-m", "pytest", *command], cwd=ROOT)
        if path.is_file():
            found = read_table(path)
            write_table(replace(found, made=found.made | {"command": "make durations ARGS=--record"}), TABLE)
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Say where the time of the tests goes.")
    parser.add_argument("--record", action="store_true", help="run the whole suite first and write the table")
    code = record() if parser.parse_args().record else 0
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` closes the pipe
    print(*tell(read_table()), sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
