"""The lowest versions that pyproject.toml allows: what is installed of them, and whether each model family works there.

    make oldest                                                          all files, whole
    make oldest ARGS="--only flux z_image --tests ode_sampling"          fewer

`make oldest` resolves the lowest direct versions, installs them into `.venv-oldest` and runs this there. What is
asked is whether a user with old libraries gets the numbers that stock gives, so that one file of tests for each family
is enough, and `tests/runtime/test_private_names.py`, which is whole whatever is chosen. The record goes into
`docs/research/trials/oldest_versions.json`, which `tests/test_packaging.py` compares with the bounds.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from origin import origin

from flowrl.runtime.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "research" / "trials" / "oldest_versions.json"
FAMILIES = sorted((ROOT / "tests" / "pipelines" / "families").glob("test_pipeline_*.py"))
FIRST = ROOT / "tests" / "runtime/test_private_names.py"


def bounds() -> dict[str, str]:
    """The lowest version of each package that flowrl or an extra of its tests needs, as pyproject.toml says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = re.findall(r"[a-z-]+", project["optional-dependencies"]["dev"][0].partition("[")[2])
    needed = [*project["dependencies"], *(line for extra in own for line in project["optional-dependencies"][extra])]
    return dict(re.findall(r"([\w-]+)>=([\d.]+)", line)[0] for line in needed)


def ran(paths: list[Path], tests: str | None) -> dict[str, dict[str, Any]]:
    """Outcome of each file: numbers of tests, the names of those that failed, and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["--continue-on-collection-errors"]
        subprocess.run([*command, *map(str, paths), *(["-k", tests] if tests else [])], cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        outcome = found.setdefault(str(case.get("classname") or case.get("name")).rpartition(".")[2], {})
        word = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        outcome[word] = outcome.get(word, 0) + 1
        outcome["seconds"] = round(outcome.get("seconds", 0) + float(case.get("time", 0)), 1)
        if word in ("failure", "error"):
            outcome.setdefault("broken", []).append(case.get("name"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="families, by the names of their test files")
    parser.add_argument("--tests", help="what pytest's -k takes, for fewer tests of families")
    given = parser.parse_args()
    files = [path for path in FAMILIES if not given.only or path.stem.removeprefix("test_pipeline_") in given.only]
    installed = {name: metadata.version(name) for name in bounds()}
    record: dict[str, Any] = {**origin(), "installed": installed, "tests": given.tests or "all"}
    record["files"] = ran([FIRST], None) | ran(files, given.tests)
    write_atomically(RECORD, json.dumps(record, indent=2) + "\n")
    return int(any("broken" in outcome for outcome in record["files"].values()))


if __name__ == "__main__":
    sys.exit(main())
