"""The table of durations is true to the suite, and what measures it measures right (`tests/helpers/durations.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import duration_table
import pytest
from duration_table import (
    LIMIT,
    MARGIN,
    ROOT,
    Spent,
    Table,
    file_of,
    merged,
    read_table,
    representatives,
    spread,
    write_table,
)
from tell_durations import MOST, tell

EXCEPTIONS = 0
"""At most so many tests that are not marked slow may be above the limit. Lower it when it can be; never raise it."""


@pytest.fixture(scope="module")
def table() -> Table:
    return read_table()


# ---- the table -------------------------------------------------------------------------------------------------------


def test_no_test_is_long_that_is_not_marked_slow(table: Table) -> None:
    """Those of the list of exceptions may stay as long as they are, but for noise, until they are made shorter."""
    bound = {test: table.exceptions[test] * MARGIN if test in table.exceptions else LIMIT for test in table.long()}
    found = {test: seconds for test, seconds in table.long().items() if seconds > bound[test]}
    assert not found, f"make these shorter, or mark them slow: {found}"


def test_the_exceptions_only_get_fewer(table: Table) -> None:
    assert len(table.exceptions) <= EXCEPTIONS
    gone = sorted(table.exceptions.keys() - table.long().keys())
    assert not gone, f"these are short, slow or gone: take them off the exceptions: {gone}"


def test_the_table_knows_only_files_that_are_there(table: Table) -> None:
    files = {*table.files, *map(file_of, [*table.tests, *table.exceptions])}
    assert sorted(file for file in files if not (ROOT / file).is_file()) == []
    assert table.slow <= table.tests.keys()
    assert [test for test in table.tests if "/flowrl/" in test] == []  # an id with a path fits one checkout alone


def test_the_table_is_written_as_it_is_read(table: Table, tmp_path: Path) -> None:
    write_table(table, tmp_path / "durations.json")
    assert (tmp_path / "durations.json").read_text() == duration_table.TABLE.read_text()
    assert read_table(tmp_path / "none.json") == Table()


def test_what_is_told_fits_eighty_columns(table: Table) -> None:
    lines = list(tell(table))
    assert max(map(len, lines)) <= 80
    assert 2 * MOST < len(lines)


# ---- representatives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        ([0.1] * 5, [0, 1, 2, 3, 4]),
        ([0.1] * 9, [0, 2, 4, 6, 8]),
        ([2.0] * 3, [0]),
        ([0.3, 1.0, 0.1, 0.1], [0, 2, 3]),
    ],
)
def test_some_cases_stand_for_all(seconds: list[float], kept: list[int]) -> None:
    assert representatives(seconds, enough=0.5) == kept


# ---- sums ------------------------------------------------------------------------------------------------------------

A, B = "tests/test_cli.py", "tests/test_claims.py"
OLD = Table(
    files={A: 6.0, B: 1.0, "tests/test_gone.py": 9.0},
    tests={f"{A}::a": 3.0, f"{A}::b": 2.5, f"{A}::gone": 0.3, f"{B}::c": 0.5, "tests/test_gone.py::d": 9.0},
    slow=frozenset({f"{A}::a"}),
    exceptions={f"{A}::b": 2.5},
)


def spent(cpu: float, *, rest: float = 0.0, slow: bool = False, whole: bool = True) -> Spent:
    return Spent(cpu=cpu, wall=cpu, rest=rest, slow=slow, whole=whole)


def test_a_run_of_some_tests_leaves_what_is_known_of_the_others() -> None:
    new = merged(OLD, {f"{A}::b": spent(1.0, rest=0.7)}, known={f"{A}::a", f"{A}::b"}, complete=())
    assert new.tests == {f"{A}::a": 3.0, f"{A}::b": 1.0, f"{B}::c": 0.5}
    assert new.files == {A: 4.5, B: 1.0}
    assert new.slow == {f"{A}::a"}
    assert new.exceptions == {}


def test_a_run_of_a_whole_file_is_what_the_file_takes() -> None:
    run = {f"{A}::a": spent(1.0, slow=True), f"{A}::b": spent(0.04, rest=0.5), f"{A}::e": spent(0.3)}
    new = merged(OLD, run, known=run, complete={A})
    assert new.tests == {f"{A}::a": 1.0, f"{A}::e": 0.3, f"{B}::c": 0.5}
    assert new.files == {A: pytest.approx(1.84), B: 1.0}


def test_another_machine_is_converted_and_what_failed_says_nothing() -> None:
    run = {f"{A}::a": spent(12.0, slow=True), f"{A}::b": spent(0.1, whole=False)}
    new = merged(OLD, run, known=run, complete=(), scale=2.0)
    assert (new.tests[f"{A}::a"], new.tests[f"{A}::b"], new.files[A]) == (6.0, 2.5, 9.0)
    assert replace(OLD, made={"calibration": 0.5}).scale(1.0) == 2.0
    assert OLD.scale(1.0) == 1.0


def test_exceptions_get_shorter_and_never_longer_or_more() -> None:
    for seconds, left in ((2.2, {f"{A}::b": 2.2}), (9.0, {f"{A}::b": 2.5}), (1.9, {})):
        run = {f"{A}::b": spent(seconds), f"{A}::new": spent(8.0)}
        assert merged(OLD, run, known=run, complete=()).exceptions == left


def test_seconds_of_files() -> None:
    assert OLD.of_files(slow=True)[A] == 6.0
    assert OLD.of_files(slow=False)[A] == 3.0
    assert OLD.of_tests([f"{A}::a", f"{B}::new"]) == {A: pytest.approx(3.2), B: 0.5}
    assert OLD.of_tests(["tests/test_new.py::a"]) == {"tests/test_new.py": duration_table.UNKNOWN}
    assert spread([1, 5, 3, 4], 2) == [6, 7]


# ---- runs ------------------------------------------------------------------------------------------------------------

SUITE = {
    "conftest.py": "import duration_table, durations\nfrom pathlib import Path\n"
    "duration_table.LIMIT = durations.LIMIT = 0.1\nduration_table.LEAST = 0.03\n"
    "duration_table.ROOT = Path(__file__).parent\n"
    "durations.calibrate = lambda: float((duration_table.ROOT / 'pace').read_text())\n",
    "pace": "0.2",
    "test_one.py": "import pytest, subprocess, sys, time\n"
    "def burn(seconds):\n    end = time.process_time() + seconds\n    while time.process_time() < end: pass\n"
    "@pytest.fixture(scope='module')\ndef shared():\n    burn(0.2)\n"
    "@pytest.fixture\ndef own():\n    burn(0.04)\n"
    "def test_short(shared): pass\n"
    "def test_fixture(own): pass\n"
    "def test_long(shared): burn(0.25)\n"
    "def test_asleep(): time.sleep(0.5)\n"
    "def test_child():\n"
    "    code = 'import time\\nwhile time.process_time() < 0.25: pass'\n"
    "    subprocess.run([sys.executable, '-S', '-c', code])\n"
    "@pytest.mark.slow\ndef test_slow(): burn(0.1)\n"
    "def test_fails():\n    burn(0.04)\n    assert 'short' == 'long'\n",
    "test_two.py": "def test_other(): pass\n",
}
"""Files of a suite in which a test may take 0.1 s."""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for name, text in SUITE.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: many seconds\n")
    return tmp_path


def run(suite: Path, *words: str) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'tests' / 'helpers'}"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "xdist",
        "-p",
        "durations",
        "--durations-table=t.json",
        *words,
    ]
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "1", "--dist", "loadfile")], ids=["alone", "worker"])
def test_a_run_writes_what_its_tests_took(suite: Path, workers: tuple[str, ...]) -> None:
    code, said = run(suite, "--durations-to", "out.json", *workers)
    assert code == 1, said
    found = read_table(suite / "out.json")
    names = {f"test_one.py::test_{name}" for name in ("fixture", "long", "child", "slow")}
    assert found.tests.keys() == names, said  # own fixture and child counted; shared fixture, sleep and failure not
    assert found.slow == {"test_one.py::test_slow"}
    assert found.tests["test_one.py::test_long"] >= 0.25
    assert found.tests["test_one.py::test_child"] >= 0.24
    assert found.files["test_one.py"] >= 0.8  # with what is shared
    assert found.made["calibration"] == 0.2
    lines = said.partition("above 0.1 s")[2].splitlines()
    assert {line.split()[2] for line in lines if "::" in line and "FAILED" not in line} == {
        "test_one.py::test_long",
        "test_one.py::test_child",
    }


@pytest.mark.slow
def test_a_long_test_turns_a_run_red_where_that_is_asked(suite: Path) -> None:
    words = ("-k", "not fails", "--refuse-long", "--durations-to=out.json")
    before = {"calibration": 0.2}
    write_table(Table(made=before, tests={"test_gone.py::test_a": 1.0}, files={"test_one.py": 3.0}), suite / "out.json")
    code, said = run(suite, *words)
    assert code == 1
    refused = {line.split()[2] for line in said.splitlines() if line.endswith("refused")}
    assert refused == {"test_one.py::test_long", "test_one.py::test_child"}
    found = json.loads((suite / "out.json").read_text())
    assert found["made"] == before  # this run is not what made the table
    assert "test_gone.py::test_a" not in found["tests"]


@pytest.mark.slow
@pytest.mark.parametrize("why", ["a slow machine", "exceptions", "a machine that others came to"])
def test_a_long_test_is_let_through_where_the_machine_or_the_table_explains_it(suite: Path, why: str) -> None:
    long = {f"test_one.py::test_{name}": 0.5 for name in ("long", "child")}
    slow = why == "a slow machine"
    made = {"calibration": 0.02 if slow else 0.2}
    write_table(Table(made=made, tests=long, exceptions=long if why == "exceptions" else {}), suite / "t.json")
    if "others" in why:  # after the run has begun
        one = suite / "test_one.py"
        one.write_text(one.read_text().replace("burn(0.25)", "burn(0.25); open('pace', 'w').write('2.0')"))
    code, said = run(suite, "-k", "not fails", "--refuse-long")
    assert code == 0, said
    assert "refused" not in said
