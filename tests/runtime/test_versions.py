"""Which versions of libraries are tested, and what is said of others."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from flowrl.runtime.versions import TESTED, numbers, untested, untested_line, version_of, versions

ROOT = Path(__file__).resolve().parents[2]


def test_tested_versions_are_the_bounds_and_the_lock_file() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lowest = dict(re.findall(r"([\w-]+)>=([\d.]+)", line)[0] for line in needed)
    locked = dict(re.findall(r"(?m)^([\w-]+)==([\d.]+)", (ROOT / "requirements.lock").read_text()))
    for name, (oldest, newest) in TESTED.items():
        assert numbers(lowest[name]) == numbers(oldest)[: len(numbers(lowest[name]))], name
        assert locked[name] == newest, name


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.40.2", "diffusers 0.40.2 is installed, and 0.41.0 to 0.42.1 were tested"),
        ("0.41.0", None),
        ("0.42.0.dev0", None),
        ("0.42.9", None),
        ("0.43.0", "diffusers 0.43.0 is installed, and 0.41.0 to 0.42.1 were tested"),
        ("1.0.0rc1", "diffusers 1.0.0rc1 is installed, and 0.41.0 to 0.42.1 were tested"),
        (None, None),
    ],
)
def test_versions_outside_the_tested_ones_are_told(
    version: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.runtime.versions.TESTED", {"diffusers": ("0.41.0", "0.42.1")})
    assert untested({"diffusers": version, "torch": "1.0"}).get("diffusers") == said
    line = untested_line({"diffusers": version})
    assert line is None if said is None else line == f"{said}: numbers may differ, docs/versions.md"


def test_several_are_one_line() -> None:
    line = untested_line({"torch": "3.0.1+cu140", "peft": "0.1"})
    assert line is not None
    assert line.startswith("torch 3.0.1+cu140 is installed, and ")
    assert "; peft 0.1 is installed" in line
    assert "\n" not in line


def test_what_is_installed_here_is_tested() -> None:
    assert untested(versions()) == {}
    assert version_of("no-such-package") is None
