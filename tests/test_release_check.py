"""`make release-check` finds what it is there to find; the whole of it takes an hour and is a command of its own."""

from __future__ import annotations

import argparse
import re
import subprocess
import zipfile
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest
import release_archives
import release_check
import release_image
import release_licences
import release_pythons
from release_part import ROOT, Broken, Part
from wheel_alone import whole

from flowrl.runtime import former_names

WHEEL = "flowrl_toolkit-1.2.3-py3-none-any.whl"


@pytest.fixture
def part() -> Part:
    return Part("a part")


def about(**fields: str) -> Message:
    made = Message()
    for name, value in fields.items():
        for one in value.split("; "):
            made[name.replace("_", "-")] = one
    return made


# ---- licences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License_Expression": "MIT OR Apache-2.0", "License": "x"}, "MIT OR Apache-2.0"),
        ({"License": "Apache 2.0 License"}, "Apache-2.0"),
        ({"License": "MPL-2.0 AND MIT"}, "MPL-2.0 AND MIT"),
        ({"License": "3-Clause BSD License"}, "BSD-3-Clause"),
        ({"License": "Copyright (c) somebody", "Classifier": "License :: OSI Approved :: BSD License"}, "BSD"),
        ({"Classifier": "License :: OSI Approved; License :: OSI Approved :: MIT License"}, "MIT"),
        ({"License": "Do what you like"}, "Do what you like"),
        ({}, ""),
    ],
)
def test_a_licence_is_read_from_what_the_metadata_has(fields: dict[str, str], licence: str) -> None:
    assert release_licences.licence_of("a", about(**fields))[0] == licence


@pytest.mark.parametrize(
    ("licence", "said"),
    [
        ("MIT", ""),
        ("(MIT OR GPL-3.0-only)", ""),
        ("Apache-2.0 AND Apache-2.0 WITH LLVM-exception", ""),
        ("GPL-3.0-only", "a 1 has the licence 'GPL-3.0-only', which is not allowed (GPL-3.0-only)"),
        ("MIT AND LGPL-2.1-only", "a 1 has the licence 'MIT AND LGPL-2.1-only', which is not allowed (LGPL-2.1-only)"),
        ("Do what you like", "a 1 has the licence 'Do what you like', which is not allowed (Do what you like)"),
        ("", "a 1 says no licence: look, and enter it"),
    ],
)
def test_what_is_unknown_or_restrictive_is_refused(licence: str, said: str) -> None:
    assert release_licences.judged("a", "1", licence, "License").refused == said


def test_every_installed_package_of_the_lock_has_a_licence_that_is_allowed(part: Part) -> None:
    installed = {item.name.lower() for item in metadata.distributions()}
    found = [
        release_licences.judged(name, version, *release_licences.licence_of(name, metadata.metadata(name)))  # type: ignore[arg-type]
        for name, version in release_licences.locked()
        if name in installed
    ]
    assert len(found) > 100
    assert [package.refused for package in found if package.refused] == []
    table = release_licences.in_a_table(found)
    assert all(f"| {package.name} | {package.version} |" in table for package in found)


# ---- archives --------------------------------------------------------------------------------------------------------


def wheel_of(folder: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(folder / WHEEL, "w") as content:
        for name, text in files.items():
            content.writestr(name, text)
    return folder / WHEEL


def test_a_wheel_that_is_not_sane_is_refused(part: Part, tmp_path: Path) -> None:
    inside = "flowrl_toolkit-1.2.3.dist-info"
    wheel = wheel_of(
        tmp_path,
        {
            "flowrl/py.typed": "",
            "flowrl/tests/test_a.py": "",
            "samplers/a.py": "",
            "flowrl/__pycache__/a.pyc": "",
            "flowrl/a.json": '{"read_from": "/home/ann/code"}',
            "flowrl/b.py": "# see https://x/home/ann and ./work/a",
            f"{inside}/METADATA": "Metadata-Version: 2.4\nName: flowrl-toolkit\nVersion: 1.2.3\n",
        },
    )
    release_archives.contents_of_wheel(part, wheel)
    said = "\n".join(part.wrong)
    assert "no part of the package: ['samplers/a.py']" in said
    assert "leftovers: ['flowrl/tests/test_a.py', 'flowrl/__pycache__/a.pyc']" in said
    assert "lacks ['flowrl/__init__.pyi'" in said
    assert "lacks LICENSE" in said
    assert "lacks of configs: ['flowrl/configs/" in said
    assert "paths of a machine: ['flowrl/a.json']" in said
    assert release_archives.metadata(wheel)["Version"] == "1.2.3"
    assert f"{inside}/METADATA" in release_archives.digests(wheel)


def test_the_changelog_of_a_version_is_what_was_unreleased(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- b\n\n## [0.1.0] - 2026-01-01\n\n- a\n")

    def changelog(version: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), "changelog", f"VERSION={version}"]
        return subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False)

    assert changelog("0.2.0").returncode == 0
    text = re.sub(r"\d{4}-\d\d-\d\d", "DAY", (tmp_path / "CHANGELOG.md").read_text())
    assert text == "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - DAY\n\n- b\n\n## [0.1.0] - DAY\n\n- a\n"
    assert "has a section '## [0.2.0]'" in changelog("0.2.0").stderr
    assert "write make changelog VERSION=1.2.3" in changelog("next").stderr


# ---- the wheel alone -------------------------------------------------------------------------------------------------


def test_a_python_is_taken_where_it_runs(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, text in {"broken": "exit 127", "other": "echo 3.9.1", "good": "echo 3.12.7"}.items():
        file = tmp_path / folder / "python3.12"
        file.parent.mkdir()
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", ":".join(str(tmp_path / name) for name in ("broken", "other", "good")))
    assert release_pythons.python_of(part, "3.12", tmp_path) == tmp_path / "good" / "python3.12"
    assert part.left == []


def test_a_python_that_is_nowhere_is_told(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*command: object, **_: object) -> str:
        raise Broken("uv ended with 1:\n  cause: no route to https://example.org/python.tar.gz")

    monkeypatch.setattr(release_pythons, "run", run)
    assert release_pythons.python_of(part, "3.12", tmp_path) is None
    assert part.left == [
        "Python 3.12: none on PATH, in pyenv or known to uv, and uv cannot fetch one (cause: no route to an address)"
    ]


def test_no_python_and_no_disk_are_told(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_pythons, "python_of", lambda *_: None)
    release_pythons.wheel_alone(part, tmp_path, tmp_path / WHEEL, ["3.11"], ["lock"])
    assert part.wrong == ["of Python 3.11 none is here"]
    monkeypatch.setattr(release_pythons, "python_of", lambda *_: Path("python3.11"))
    monkeypatch.setattr(release_pythons, "version_of", lambda _: "3.11.7")
    monkeypatch.setattr(release_pythons, "ROOM", 1e18)
    release_pythons.wheel_alone(part, tmp_path, tmp_path / WHEEL, ["3.11"], ["lock", "newest"])
    assert [line.partition(":")[0] for line in part.left] == ["Python 3.11, lock", "Python 3.11, newest"]


def test_what_is_not_the_locks_is_named() -> None:
    locked = dict(release_licences.locked())
    packages = {"torch": locked["torch"] + "+cu132", "numpy": "1.0", "flowrl-toolkit": "1.2.3"}
    assert release_pythons.unlike_the_lock(packages) == {"numpy": "1.0"}


@pytest.mark.parametrize("fault", ["<h1>a", '<h1>a</h1><img src="b.png">', "<h1>a</h1>"])
def test_a_page_that_is_not_whole_is_refused(tmp_path: Path, fault: str) -> None:
    page = tmp_path / "page.html"
    page.write_text('<h1>A</h1><p>b<br><img src="data:x">')
    with pytest.raises(Broken, match="open"):
        whole(page)
    page.write_text('<h1>A</h1><p>b<br><img src="data:x"></p>')
    assert whole(page)["headings"] == ["A"]
    page.write_text(fault)
    with pytest.raises(Broken, match="open"):
        whole(page)


# ---- the container ---------------------------------------------------------------------------------------------------


def test_every_instruction_of_the_container_is_known_and_copies_what_is_needed(tmp_path: Path) -> None:
    steps = release_image.instructions((ROOT / "Dockerfile").read_text())
    assert {word for word, _ in steps} <= {"FROM", "ARG", "WORKDIR", "COPY", "ENV", "RUN", "ENTRYPOINT"}
    assert [rest for word, rest in steps if word == "COPY"] == [". ."]
    assert release_image.instructions("# a\nRUN a && \\\n  b\n") == [("RUN", "a &&  b")]
    ignored = (ROOT / ".dockerignore").read_text().split()
    needed = ("Makefile", "requirements.lock", "pyproject.toml", "launch/one_node.sh", "flowrl/runs/manifest.py")
    assert not [name for name in needed if release_image.is_ignored(name, ignored)]
    assert [name for name in needed if not (ROOT / name).is_file()] == []
    kept_out = ("runs/a/lora/x", ".venv/bin/python", "dist/a.whl", "flowrl/a/__pycache__/b.pyc", ".venv-oldest/x")
    assert [name for name in kept_out if not release_image.is_ignored(name, ignored)] == []


# ---- words -----------------------------------------------------------------------------------------------------------


def test_a_part_without_its_wheel_is_wrong_and_the_end_says_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = release_check.checked("image", tmp_path, argparse.Namespace(dist=tmp_path))
    right = Part("version", facts={"seconds": 3.2}, left=["a tag: there is no git"])
    capsys.readouterr()
    assert release_check.summary([right, broken], ["wheel"]) == 1
    assert capsys.readouterr().out == (
        f"\nRight:\n  version (3 s)\n\nWrong:\n  image: there is no wheel in {tmp_path}: the part `archives` makes it\n"
        "\nNot done on this machine:\n  version: a tag: there is no git\n  wheel: not asked for\n"
    )
    assert release_check.summary([right], []) == 0


def test_every_former_name_is_in_the_notes_on_upgrading() -> None:
    text = (ROOT / "docs" / "upgrading.md").read_text()
    tables = (former_names.KEYS, former_names.COMMANDS, former_names.FUNCTIONS)
    assert [name for table in tables for pair in table.items() for name in pair if name not in text] == []
